"""A drafter: a decoder that fills a block of masked slots behind a clean prefix in one pass.

It needs token ids only. This file knows how slots are embedded, which rows predict which drafted
token, and which weights act where; it does not know requests, rounds or files."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from d3d.errors import InvalidCheckpoint
from d3d.model.choice import Candidates, Chosen, best_few, best_of, joined
from d3d.model.kv_cache import KeyValueStore
from d3d.model.linear import Linear, linear, merge_deltas
from d3d.model.masks.rules import BlockAttention
from d3d.model.transformer import Transformer

Alignment = Literal["next", "same"]
DeltaScope = Literal["slots", "all"]
SEEN_TOKENS = 2
"""Tokens before a slot's own that a previous-token head is told."""

CANDIDATES = 64
"""A slot's best tokens, among which one is chosen when the tokens before it are known."""

Matrix = Literal["qkv", "out", "gate_up", "down"]


class DeltaConfig(BaseModel):
    """Low-rank deltas on linear layers of the decoder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=1)
    scope: DeltaScope = "slots"
    """`slots`: clean tokens keep the base model's weights. `all`: the deltas act on every row."""
    matrices: tuple[Matrix, ...] = Field(("qkv", "out", "gate_up", "down"), min_length=1)
    """Which matrices of a layer have one. Each costs two small matrix products a layer, which a
    short pass notices."""
    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Which of the kept layers have them, by their number in the base; None: all."""


class DrafterConfig(BaseModel):
    """What makes a drafter; stored in its checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=1, le=256)
    """Drafted tokens a block, the anchor not counted."""
    block_attention: BlockAttention = "causal"
    alignment: Alignment = "next"
    """`next`: row a + j predicts position a + j + 1, the anchor's own row drafted token 1. `same`:
    slots predict their own position."""
    mask_token_id: int | None = Field(None, ge=0)
    """Embedding row that stands for a masked position; None where a learned vector does."""
    kept_layers: tuple[int, ...]
    """Which of the base model's layers it has, in order."""
    delta: DeltaConfig | None = None
    """None: full weights of its own."""
    anchor_slot: bool = False
    """Whether a block's first slot stands at the anchor's own place and holds its token, so that a
    draft needs no clean row: its pass is slots only. Else the anchor is a clean row of the pass.
    Alignment `next` only."""
    slot_layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Which of the kept layers slots go through, by their number in the base; None: all. Clean rows
    go through all of them, so this is for drafters whose clean rows are the base model's."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """How many tokens can be drafted at all, so that a draft computes so many logits a slot
    (FR-Spec, arXiv 2502.14856); None: all. Fused mode, whose logits come with the target's, has
    them all."""
    previous_token_width: int | None = Field(None, ge=1)
    """Inner width of the previous-token head; None where a slot's logits do not depend on the
    tokens drafted before it."""

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
                "anchor_slot needs alignment next: a slot that holds its own token has nothing to predict but the next one"
            )
        if self.slot_layers is not None:
            self._check_slot_layers(self.slot_layers)
        return self

    def _check_slot_layers(self, layers: tuple[int, ...]) -> None:
        if not self.clean_rows_are_base:
            raise ValueError(
                "slot_layers needs deltas of scope slots: with other weights clean rows are thinned too, by kept_layers"
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
        """Whether clean tokens go through the base model's weights alone."""
        return self.delta is not None and self.delta.scope == "slots"

    @property
    def own_rows(self) -> int:
        """Rows of a block that are no slots: in alignment `next` the anchor's, which predicts the
        first drafted token."""
        return 1 if self.alignment == "next" and not self.anchor_slot else 0

    @property
    def skipped(self) -> frozenset[int]:
        """Layers that slots pass by, counted among the kept ones."""
        going = set(self.kept_layers if self.slot_layers is None else self.slot_layers)
        return frozenset(
            index for index, layer in enumerate(self.kept_layers) if layer not in going
        )

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers that have deltas, by their number in the base."""
        if self.delta is None:
            return ()
        return self.delta.layers or self.slot_layers or self.kept_layers

    @property
    def longest_slot_draft(self) -> int:
        """Most tokens that the slots of a block can draft, without the anchor's row."""
        return self.num_slots(self.block_size)

    def num_slots(self, draft_length: int) -> int:
        """Slots that a draft of this length needs."""
        return draft_length - self.own_rows


class PreviousTokenHead(nn.Module):
    """Tells a slot's final state which tokens were drafted before it, by a gated low-rank step (the
    idea is DSpark's Markov head, arXiv 2607.05147; there it is a table of bigram logits).

    All slots of a block are computed at once, so none of them knows what those before it came to;
    this much it can be told."""

    matrices = ("of_state", "of_tokens", "up")

    def __init__(self, hidden_size: int, width: int, generator: torch.Generator) -> None:
        """Says nothing before it is trained: `up` is zero."""
        super().__init__()
        self.of_state = nn.Parameter(
            torch.randn(width, hidden_size, generator=generator) * hidden_size**-0.5
        )
        self.of_tokens = nn.Parameter(
            torch.randn(width, SEEN_TOKENS * hidden_size, generator=generator) * hidden_size**-0.5
        )
        self.up = nn.Parameter(torch.zeros(hidden_size, width))

    def reading(self, states: Tensor) -> Tensor:
        """What the head makes of states [..., hidden_size] alone: [..., width]. All slots of a
        block at once."""
        return linear(F.rms_norm(states, states.shape[-1:]), _as(self.of_state, states.dtype))

    @staticmethod
    def sight(embeddings: Tensor) -> Tensor:
        """What the head sees of tokens, by their embeddings [n, tokens, hidden_size]."""
        return F.rms_norm(embeddings, embeddings.shape[-1:])

    def forward(self, states: Tensor, reading: Tensor, seen: Tensor) -> Tensor:
        """states [n, hidden_size] and their `reading`; seen [n, SEEN_TOKENS, hidden_size]: the
        `sight` of the tokens before, the nearest first. Returns the states [n, hidden_size] from
        which the decoder's head makes logits, in their dtype."""
        dtype = states.dtype
        told = reading + linear(seen.flatten(1), _as(self.of_tokens, dtype))
        return states + linear(F.silu(told), _as(self.up, dtype))


def _as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the dtype that is computed in; packed ones have it already."""
    return weight if weight.dtype is dtype else weight.to(dtype)


class DrafterModel(nn.Module):
    """A `Transformer` with slots."""

    mask_vector: Tensor | None
    previous_token_head: PreviousTokenHead | None

    def __init__(self, config: DrafterConfig, transformer: Transformer) -> None:
        """Raises InvalidCheckpoint where the mask token has no embedding."""
        super().__init__()
        if (
            config.mask_token_id is not None
            and config.mask_token_id >= transformer.config.vocab_size
        ):
            raise InvalidCheckpoint(
                f"mask_token_id is {config.mask_token_id}, the drafter knows ids below {transformer.config.vocab_size}"
            )
        self.config = config
        self.transformer = transformer
        self.mask_vector = None
        self.previous_token_head = None
        self.draft_ids: Tensor | None = None
        """int64 [draft_vocabulary], ascending: the tokens that can be drafted."""
        self._draft_head: Linear | None = None
        self._unpacked_head: Tensor | None = None

    def set_mask_vector(self, vector: Tensor) -> None:
        """vector [hidden_size]: the learned embedding of a masked position."""
        self.mask_vector = nn.Parameter(vector)

    def set_draft_ids(self, token_ids: Tensor) -> None:
        """token_ids int64 [draft_vocabulary]. Raises InvalidCheckpoint where they are too many or
        few, not ascending, or unknown."""
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

    def prepare_to_draft(self) -> None:
        """Make what speeds drafting up and can't be trained any more: the rows of the head that a
        draft needs, and where a drafting pass holds slots only, weights with their deltas merged.
        Before `pack_weights`."""
        if self.config.anchor_slot:
            merge_deltas(self)
        if self.draft_ids is not None:
            self._draft_head = Linear(self._head_rows()[self.draft_ids])

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [batch, rows], negative where a slot is masked -> [batch, rows,
        hidden_size]."""
        masked = token_ids < 0
        if self.mask_vector is None:
            return self.transformer.embed(
                token_ids.masked_fill(masked, self.config.mask_token_id or 0)
            )
        embedded = self.transformer.embed(token_ids.clamp(min=0))
        return torch.where(masked[..., None], self.mask_vector.to(embedded.dtype), embedded)

    def delta_rows(self, rows: int, num_slots: int) -> int:
        """How many of a pass's last rows the deltas act on."""
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
        """A pass whose last `num_slots` rows are slots: final states [batch, rows, hidden_size].

        token_ids int64 [batch, rows], negative where a slot is masked; positions int64 [batch or 1,
        rows], of which those of slots may lie past the longest text, where any will do; mask and
        store as `Transformer.hidden` has them, on any device."""
        decoder = self.transformer
        return decoder.hidden(
            self.embed(token_ids.to(decoder.device)),
            positions.to(decoder.device).clamp(max=decoder.config.max_length - 1),
            None if mask is None else mask.to(decoder.device),
            store,
            self.delta_rows(token_ids.shape[1], num_slots),
            self.config.skipped,
        )

    def draft_logits(self, hidden: Tensor, target_vocab_size: int) -> Tensor:
        """hidden [..., hidden_size] -> float32 [..., target_vocab_size] in which what can't be
        drafted is -inf: the mask token, and what is not in the draft vocabulary."""
        few, token_ids = self.few_logits(hidden, target_vocab_size)
        if token_ids is None:
            return few
        logits = torch.full((*few.shape[:-1], target_vocab_size), float("-inf"), device=few.device)
        logits[..., token_ids] = few
        return logits

    def few_logits(self, hidden: Tensor, target_vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """The same without what is not in the draft vocabulary: float32 [..., tokens], and whose
        logits they are, int64 [tokens]; None where all can be drafted."""
        token_ids = self.draft_ids
        if token_ids is None:
            return self.without_mask_token(self.transformer.logits(hidden), target_vocab_size), None
        head = self._draft_head
        logits = (
            linear(hidden, self._head_rows()[token_ids]) if head is None else head.forward(hidden)
        ).float()
        if target_vocab_size < self.transformer.config.vocab_size:
            token_ids = token_ids[token_ids < target_vocab_size]
            logits = logits[..., : len(token_ids)]
        if self.config.mask_token_id is not None:
            logits = logits.masked_fill(token_ids == self.config.mask_token_id, float("-inf"))
        return logits, token_ids

    def without_mask_token(self, logits: Tensor, target_vocab_size: int) -> Tensor:
        """Logits of the decoder's head [..., vocab_size] -> float32 [..., target_vocab_size] in
        which the mask token can't be chosen."""
        logits = logits.float()[..., :target_vocab_size]
        mask_token_id = self.config.mask_token_id
        if mask_token_id is not None and mask_token_id < logits.shape[-1]:
            logits[..., mask_token_id] = float("-inf")
        return logits

    def tell(self, states: Tensor, seen_ids: Tensor) -> Tensor:
        """states [n, hidden_size], seen_ids int64 [n, SEEN_TOKENS]: the tokens before what each
        state predicts, the nearest first -> states [n, hidden_size] that know them; the same where
        there is no previous-token head."""
        if self.previous_token_head is None:
            return states
        head = self.previous_token_head
        out: Tensor = head(
            states, head.reading(states), head.sight(self.transformer.embed(seen_ids))
        )
        return out

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
        """The best token in each place of the drafts, among its `candidates` where it has some;
        arguments as there."""
        found = self.candidates(
            states, logits, last_ids, own_rows=own_rows, token_ids=token_ids, blocks=blocks
        )
        if found is None:
            return best_of(logits, token_ids, logprobs=logprobs)
        in_turn = best_of(found.scores, found.token_ids, logprobs=logprobs)
        return (
            joined(best_of(logits[:, :own_rows], token_ids, logprobs=logprobs), in_turn)
            if own_rows
            else in_turn
        )

    def choose_in_turn(
        self, states: Tensor, logits: Tensor, last_ids: Tensor, *, own_rows: int
    ) -> None:
        """Leave in logits of the whole vocabulary, float32 [n, draft_length, vocab_size], those of
        the `candidates` alone, with their scores; -inf elsewhere. In place; nothing happens without
        a previous-token head."""
        found = self.candidates(states, logits, last_ids, own_rows=own_rows)
        if found is not None:
            logits[:, own_rows:] = float("-inf")
            logits[:, own_rows:].scatter_(2, found.token_ids, found.scores)

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
        """Each slot's CANDIDATES best tokens, scored again by what the tokens before it are; where
        these are still open they are what was chosen in the rows before. None without a
        previous-token head, or without slots.

        states [n, draft_length, hidden_size]; logits float32 [n, draft_length, tokens] and
        token_ids as of `few_logits`; last_ids int64 [n, SEEN_TOKENS]: the last committed tokens,
        the anchor first; own_rows: how many of the first rows are clean and know their tokens;
        blocks int64 [n, draft_length], negative where open; None: all are."""
        head = self.previous_token_head
        if head is None or logits.shape[1] == own_rows:
            return None
        values, best = best_few(logits[:, own_rows:], CANDIDATES)
        best = best if token_ids is None else token_ids[best]
        banned = values.isneginf() if bool(values[..., -1].isneginf().any()) else None
        reading, rows = head.reading(states), F.embedding(best, self._head_rows())
        own = (
            best_of(logits[:, :own_rows], token_ids, logprobs=False).token_ids if own_rows else None
        )
        all_scores = []
        seen = head.sight(self.transformer.embed(last_ids))
        for place in range(logits.shape[1]):
            if own is not None and place < own_rows:
                chosen = own[:, place : place + 1]
            else:
                told = head.forward(states[:, place], reading[:, place], seen)
                scores = torch.matmul(rows[:, place - own_rows].float(), told.float()[..., None])[
                    ..., 0
                ]
                if banned is not None:
                    scores.masked_fill_(banned[:, place - own_rows], float("-inf"))
                all_scores.append(scores)
                chosen = best[:, place - own_rows].gather(1, scores.argmax(-1, keepdim=True))
            if blocks is not None:
                chosen = torch.where(
                    blocks[:, place : place + 1] < 0, chosen, blocks[:, place : place + 1]
                )
            if place + 1 < logits.shape[1]:
                seen = torch.cat((head.sight(self.transformer.embed(chosen)), seen[:, :-1]), dim=1)
        return Candidates(best, torch.stack(all_scores, dim=1))

    def _head_rows(self) -> Tensor:
        """The head's weight as rows that can be picked, [vocab_size, hidden_size]."""
        weight = self.transformer.head.weight
        if not weight.is_mkldnn:
            return weight
        if self.transformer.config.tied:
            return self.transformer.embedding
        if self._unpacked_head is None:
            self._unpacked_head = weight.to_dense()
        return self._unpacked_head

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name to parameter of what a checkpoint stores: deltas or full weights, mask vector,
        previous-token head."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }
