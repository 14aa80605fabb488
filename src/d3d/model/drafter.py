"""The drafter network: a decoder that fills a block of masked slots after a clean prefix in one
pass.

It reads token ids only. This file defines how slots are embedded, which rows predict which drafted
token, and which weights act on which rows. Requests, rounds and files are handled elsewhere."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from d3d.errors import InvalidCheckpoint
from d3d.model.choice import (
    CANDIDATES,
    Candidates,
    Chosen,
    PreviousTokenHead,
    best_few,
    best_of,
    joined,
)
from d3d.model.kv_cache import KeyValueStore
from d3d.model.linear import Linear, linear, merge_deltas
from d3d.model.masks.rules import BlockAttention
from d3d.model.transformer import Transformer

Alignment = Literal["next", "same"]
DeltaScope = Literal["slots", "all"]
Matrix = Literal["qkv", "out", "gate_up", "down"]


class DeltaConfig(BaseModel):
    """Low-rank deltas on linear layers of the decoder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=1, le=1 << 16)
    scope: DeltaScope = "slots"
    """`slots`: clean tokens keep the base model's weights. `all`: the deltas act on every row."""
    matrices: tuple[Matrix, ...] = Field(("qkv", "out", "gate_up", "down"), min_length=1)
    """Matrices of a layer with a delta. Each costs two small matrix products a layer, which is
    noticeable in a short pass."""
    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Kept layers with deltas, by their number in the base; None: all."""


class DrafterConfig(BaseModel):
    """Architecture of a drafter; stored in its checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=1, le=256)
    """Drafted tokens per block, not counting the anchor."""
    block_attention: BlockAttention = "causal"
    alignment: Alignment = "next"
    """`next`: row a + j predicts position a + j + 1, so the anchor's row predicts drafted token 1.
    `same`: slots predict their own position."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding stands for a masked position; None: a learned vector does."""
    kept_layers: tuple[int, ...]
    """Layers taken from the base model, in order."""
    delta: DeltaConfig | None = None
    """None: full weights of its own."""
    anchor_slot: bool = False
    """If true, a block's first slot stands at the anchor's position and holds its token, so that a
    drafting pass is slots only. Else the anchor is a clean row of the pass. Alignment `next`
    only."""
    slot_layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Kept layers that process slots, by their number in the base; None: all. Clean rows use all
    kept layers, so this suits drafters whose clean rows are the base model's."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Number of tokens that can be drafted, and so of logits computed for a slot (FR-Spec, arXiv
    2502.14856); None: all. Fused mode always has all of them, since it shares the target's
    logits."""
    previous_token_width: int | None = Field(None, ge=1, le=1 << 16)
    """Inner width of the previous-token head; None: no head, so a slot's logits do not depend on
    the tokens drafted before it."""

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        if (
            not self.kept_layers
            or sorted(set(self.kept_layers)) != list(self.kept_layers)
            or self.kept_layers[0] < 0
        ):
            raise ValueError(
                f"kept_layers must be ascending layer numbers and not empty, not {self.kept_layers}"
            )
        if self.delta is not None and (
            stray := sorted(set(self.delta.layers or ()) - set(self.kept_layers))
        ):
            raise ValueError(f"delta.layers names layer {stray[0]}, which is not kept")
        if self.anchor_slot and self.alignment != "next":
            raise ValueError(
                "anchor_slot needs alignment next: "
                "a slot that holds its own token has nothing to predict but the next one"
            )
        if self.slot_layers is not None:
            self._check_slot_layers(self.slot_layers)
        return self

    def _check_slot_layers(self, layers: tuple[int, ...]) -> None:
        if not self.clean_rows_are_base:
            raise ValueError(
                "slot_layers needs deltas of scope slots: "
                "with other weights clean rows are thinned too, by kept_layers"
            )
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"slot_layers must be ascending layer numbers, not {layers}")
        if stray := sorted(set(layers) - set(self.kept_layers)):
            raise ValueError(f"slot_layers names layer {stray[0]}, which is not kept")
        assert self.delta is not None
        if stray := sorted(set(self.delta.layers or ()) - set(layers)):
            raise ValueError(f"delta.layers names layer {stray[0]}, which slots do not go through")

    @property
    def clean_rows_are_base(self) -> bool:
        """True if clean tokens go through the base model's weights alone."""
        return self.delta is not None and self.delta.scope == "slots"

    @property
    def own_rows(self) -> int:
        """Rows of a block that are not slots: with alignment `next` the anchor's, which predicts
        the first drafted token."""
        return 1 if self.alignment == "next" and not self.anchor_slot else 0

    @property
    def skipped(self) -> frozenset[int]:
        """Layers that slots skip, as indices into the kept layers."""
        going = set(self.kept_layers if self.slot_layers is None else self.slot_layers)
        return frozenset(
            index for index, layer in enumerate(self.kept_layers) if layer not in going
        )

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers with deltas, by their number in the base."""
        if self.delta is None:
            return ()
        return self.delta.layers or self.slot_layers or self.kept_layers

    @property
    def longest_slot_draft(self) -> int:
        """Maximum number of tokens that the slots of a block draft, without the anchor's row."""
        return self.num_slots(self.block_size)

    def num_slots(self, draft_length: int) -> int:
        """Slots that a draft of this length needs."""
        return draft_length - self.own_rows


class DrafterModel(nn.Module):
    """A `Transformer` with slots."""

    mask_vector: Tensor | None
    previous_token_head: PreviousTokenHead | None

    def __init__(self, config: DrafterConfig, transformer: Transformer) -> None:
        """Raises InvalidCheckpoint if the mask token has no embedding."""
        super().__init__()
        if (
            config.mask_token_id is not None
            and config.mask_token_id >= transformer.config.vocab_size
        ):
            raise InvalidCheckpoint(
                f"mask_token_id is {config.mask_token_id}, "
                f"the drafter knows ids below {transformer.config.vocab_size}"
            )
        self.config = config
        self.transformer = transformer
        self.mask_vector = None
        self.previous_token_head = None
        self.draft_ids: Tensor | None = None
        """The tokens that can be drafted, int64 [draft_vocabulary], ascending; None: all."""
        self._draft_head: Linear | None = None
        self._unpacked_head: Tensor | None = None

    def set_mask_vector(self, vector: Tensor) -> None:
        """Set the learned embedding of a masked position, [hidden_size]."""
        self.mask_vector = nn.Parameter(vector)

    def set_draft_ids(self, token_ids: Tensor) -> None:
        """Set the draft vocabulary, int64 [draft_vocabulary]. Raises InvalidCheckpoint if its size
        is wrong, or ids are not ascending or unknown."""
        ids, wanted = token_ids, self.config.draft_vocabulary
        if (
            ids.shape != (wanted,)
            or bool((ids[1:] <= ids[:-1]).any())
            or int(ids[0]) < 0
            or int(ids[-1]) >= self.transformer.config.vocab_size
        ):
            raise InvalidCheckpoint(
                f"the draft vocabulary must be {wanted} ascending token ids that the drafter knows"
            )
        self.draft_ids = ids.to(self.transformer.device)
        self._largest_draft_id = int(ids[-1])

    def prepare_to_draft(self) -> None:
        """Speed up drafting, after which the model can't be trained: copy the head's rows of the
        draft vocabulary, and merge deltas if a drafting pass is slots only.

        Call it before `pack_weights`."""
        if self.config.anchor_slot:
            merge_deltas(self)
        if self.draft_ids is not None:
            self._draft_head = Linear(self._head_rows()[self.draft_ids])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token_ids int64 [batch, rows], negative for a masked slot: [batch, rows,
        hidden_size]."""
        masked = token_ids < 0
        if self.mask_vector is None:
            return self.transformer.embed(
                token_ids.masked_fill(masked, self.config.mask_token_id or 0)
            )
        embedded = self.transformer.embed(token_ids.clamp(min=0))
        return torch.where(masked[..., None], self.mask_vector.to(embedded.dtype), embedded)

    def delta_rows(self, rows: int, num_slots: int) -> int:
        """Number of last rows of a pass that the deltas act on."""
        if self.config.delta is None:
            return 0
        return num_slots if self.config.delta.scope == "slots" else rows

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        store: KeyValueStore,
        num_slots: int,
    ) -> Tensor:
        """Final states [batch, rows, hidden_size] of a pass whose last `num_slots` rows are slots.

        token_ids int64 [batch, rows], negative for a masked slot; positions int64 [batch or 1,
        rows]; mask and store as in `Transformer.hidden`, on any device."""
        decoder = self.transformer
        return decoder.hidden(
            self.embed(token_ids.to(decoder.device)),
            positions.to(decoder.device),
            None if mask is None else mask.to(decoder.device),
            store,
            self.delta_rows(token_ids.shape[1], num_slots),
            self.config.skipped,
        )

    def draft_logits(self, hidden: Tensor, target_vocab_size: int) -> Tensor:
        """Logits float32 [..., target_vocab_size] of states [..., hidden_size]; -inf for the mask
        token and for tokens outside the draft vocabulary."""
        few, token_ids = self.few_logits(hidden, target_vocab_size)
        if token_ids is None:
            return few
        logits = torch.full((*few.shape[:-1], target_vocab_size), float("-inf"), device=few.device)
        logits[..., token_ids] = few
        return logits

    def few_logits(self, hidden: Tensor, target_vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """Logits of the draft vocabulary only: (float32 [..., tokens], int64 token ids [tokens]),
        or (logits of all tokens, None) if all can be drafted. hidden: [..., hidden_size]."""
        token_ids = self.draft_ids
        if token_ids is None:
            return self.without_mask_token(self.transformer.logits(hidden), target_vocab_size), None
        head = self._draft_head
        logits = (
            linear(hidden, self._head_rows()[token_ids]) if head is None else head.forward(hidden)
        ).float()
        if self._largest_draft_id >= target_vocab_size:
            token_ids = token_ids[token_ids < target_vocab_size]
            logits = logits[..., : len(token_ids)]
        if self.config.mask_token_id is not None:
            logits = logits.masked_fill(token_ids == self.config.mask_token_id, float("-inf"))
        return logits, token_ids

    def without_mask_token(self, logits: Tensor, target_vocab_size: int) -> Tensor:
        """Logits float32 [..., target_vocab_size] in which the mask token is -inf, of the head's
        logits [..., vocab_size]."""
        logits = logits.float()[..., :target_vocab_size]
        mask_token_id = self.config.mask_token_id
        if mask_token_id is not None and mask_token_id < logits.shape[-1]:
            logits[..., mask_token_id] = float("-inf")
        return logits

    def condition(self, states: Tensor, seen_ids: Tensor) -> Tensor:
        """States [n, hidden_size] conditioned on the tokens before the predicted ones; unchanged
        without a previous-token head.

        seen_ids int64 [n, SEEN_TOKENS]: these tokens, the nearest first."""
        head = self.previous_token_head
        if head is None:
            return states
        context = head.embed_context(self.transformer.embed(seen_ids))
        conditioned: Tensor = head(states, head.project_states(states), context)
        return conditioned

    def choose(
        self,
        states: Tensor,
        logits: Tensor,
        last_ids: Tensor,
        *,
        own_rows: int,
        token_ids: Tensor | None = None,
        blocks: Tensor | None = None,
        logprobs: bool = False,
    ) -> Chosen:
        """The best token at each position of the drafts, among its `candidates` if there are any;
        arguments as there."""
        candidates = self.candidates(
            states, logits, last_ids, own_rows=own_rows, token_ids=token_ids, blocks=blocks
        )
        if candidates is None:
            return best_of(logits, token_ids, logprobs=logprobs)
        chosen = best_of(candidates.scores, candidates.token_ids, logprobs=logprobs)
        if not own_rows:
            return chosen
        return joined(best_of(logits[:, :own_rows], token_ids, logprobs=logprobs), chosen)

    def choose_in_turn(
        self, states: Tensor, logits: Tensor, last_ids: Tensor, *, own_rows: int
    ) -> None:
        """Replace logits of the whole vocabulary, float32 [n, draft_length, vocab_size], by the
        scores of the `candidates`, and -inf for all other tokens. In place; without a
        previous-token head nothing changes."""
        candidates = self.candidates(states, logits, last_ids, own_rows=own_rows)
        if candidates is not None:
            logits[:, own_rows:] = float("-inf")
            logits[:, own_rows:].scatter_(2, candidates.token_ids, candidates.scores)

    def candidates(
        self,
        states: Tensor,
        logits: Tensor,
        last_ids: Tensor,
        *,
        own_rows: int,
        token_ids: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> Candidates | None:
        """Each slot's CANDIDATES best tokens, rescored given the tokens before it: the revealed
        ones, else those chosen for the rows before. None without a previous-token head, or without
        slots.

        states [n, draft_length, hidden_size]; logits float32 [n, draft_length, tokens] and
        token_ids as `few_logits` returns them; last_ids int64 [n, SEEN_TOKENS]: the last committed
        tokens, the anchor first; own_rows: number of first rows that are clean, whose logits are
        final; blocks int64 [n, draft_length], negative if not revealed; None: none is."""
        head = self.previous_token_head
        if head is None or logits.shape[1] == own_rows:
            return None
        values, best = best_few(logits[:, own_rows:], CANDIDATES)
        best = best if token_ids is None else token_ids[best]
        banned = values.isneginf() if bool(values[..., -1].isneginf().any()) else None
        projected, rows = head.project_states(states), F.embedding(best, self._head_rows())
        from_clean = (
            best_of(logits[:, :own_rows], token_ids, logprobs=False).token_ids if own_rows else None
        )
        all_scores = []
        context = head.embed_context(self.transformer.embed(last_ids))
        for row in range(logits.shape[1]):
            slot = row - own_rows
            if from_clean is not None and row < own_rows:
                chosen = from_clean[:, row : row + 1]
            else:
                state = head.forward(states[:, row], projected[:, row], context).float()
                scores = torch.matmul(rows[:, slot].float(), state[..., None])[..., 0]
                if banned is not None:
                    scores.masked_fill_(banned[:, slot], float("-inf"))
                all_scores.append(scores)
                chosen = best[:, slot].gather(1, scores.argmax(-1, keepdim=True))
            if blocks is not None:
                revealed = blocks[:, row : row + 1]
                chosen = torch.where(revealed < 0, chosen, revealed)
            if row + 1 < logits.shape[1]:
                newest = head.embed_context(self.transformer.embed(chosen))
                context = torch.cat((newest, context[:, :-1]), dim=1)
        return Candidates(best, torch.stack(all_scores, dim=1))

    def _head_rows(self) -> Tensor:
        """The head's weight as indexable rows, [vocab_size, hidden_size]."""
        weight = self.transformer.head.weight
        if not weight.is_mkldnn:
            return weight
        if self.transformer.config.tied:
            return self.transformer.embedding
        if self._unpacked_head is None:
            self._unpacked_head = weight.to_dense()
        return self._unpacked_head

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name to parameter that a checkpoint stores: deltas or full weights, mask vector,
        previous-token head."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }
