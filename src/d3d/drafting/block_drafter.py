"""The D3D drafter behind the Drafter protocol: catch up with the committed tokens and draft, in one pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.layout import MASKED, DraftLayout, draft_layout
from d3d.models.drafter import DrafterModel

CATCH_UP_ROWS = 1024
"""More missing clean tokens than this run in passes of their own before the pass that drafts."""


@dataclass(frozen=True)
class BlockDrafter:
    """Proposes blocks with a `DrafterModel`, in `num_denoise_steps` passes each."""

    model: DrafterModel
    target_vocab_size: int
    num_denoise_steps: int = 1

    needs_features: tuple[int, ...] = ()
    can_prepare: bool = True

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def open(self, num_sequences: int, capacity: int) -> BlockDraftSession:
        limit = self.model.transformer.config.max_length
        return BlockDraftSession(self, num_sequences, min(capacity, limit) + self.block_size + 1)


class BlockDraftSession:
    """Between passes the cache holds a clean prefix of every sequence's committed tokens, never a slot."""

    def __init__(self, drafter: BlockDrafter, num_sequences: int, capacity: int) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._cache = drafter.model.transformer.new_cache(num_sequences, capacity)

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)

    @torch.inference_mode()
    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        room = self._model.transformer.config.max_length - max(len(sequence) for sequence in sequences)
        longest = min(max(lengths), self._drafter.block_size, room)
        if longest < 1:
            return [DraftBlock() for _ in sequences]
        self._catch_up(sequences)
        blocks = torch.full((len(sequences), longest), MASKED)
        for step in range(self._drafter.num_denoise_steps):
            self._cache.crop([len(sequence) - 1 for sequence in sequences])  # the anchor's row is computed with every draft
            layout = draft_layout(self._model.config, self._cache.lengths, [s.token_ids for s in sequences], blocks)
            logits = self._pass(layout)
            if not bool(torch.isfinite(logits.amax(-1)).all()):
                return [DraftBlock(fault="the drafter's logits are not finite") for _ in sequences]
            blocks = reveal(blocks, logits, remaining_steps=self._drafter.num_denoise_steps - step)
        return [DraftBlock(tuple(block[:length])) for block, length in zip(blocks.tolist(), lengths, strict=True)]

    def _catch_up(self, sequences: ListLike[Sequence]) -> None:
        while max(len(s) - done for s, done in zip(sequences, self._cache.lengths, strict=True)) > CATCH_UP_ROWS:
            known = [s.token_ids[: done + CATCH_UP_ROWS][: len(s) - 1] for s, done in zip(sequences, self._cache.lengths, strict=True)]
            layout = draft_layout(self._model.config, self._cache.lengths, known, torch.empty((len(sequences), 0), dtype=torch.long))
            self._hidden(layout)

    def _pass(self, layout: DraftLayout) -> Tensor:
        """Float32 logits of the rows that predict drafted tokens, [batch, draft_length, target_vocab_size]."""
        hidden = self._hidden(layout)
        index = layout.predicting[..., None].expand(-1, -1, hidden.shape[-1])
        return self._model.draft_logits(hidden.gather(1, index), self._drafter.target_vocab_size)

    def _hidden(self, layout: DraftLayout) -> Tensor:
        layout = layout.to(self._model.transformer.device)
        rows = layout.token_ids.shape[1]
        hidden = self._model.transformer.hidden(
            self._model.embed(layout.token_ids),
            layout.positions,
            layout.mask,
            self._cache,
            self._model.delta_rows(rows, layout.num_slots),
        )
        self._cache.advance(layout.num_clean)
        return hidden


def reveal(blocks: Tensor, logits: Tensor, *, remaining_steps: int) -> Tensor:
    """Fill the most confident masked places: all of them in the last step, an even share before.

    blocks int64 [batch, draft_length], MASKED where open; logits float32 [batch, draft_length, vocab]. Returns new blocks.
    """
    best, tokens = logits.max(-1)
    open_places = blocks == MASKED
    filled = torch.where(open_places, tokens.to(blocks.device), blocks)
    if remaining_steps == 1:
        return filled
    count = -(-blocks.shape[1] // remaining_steps) if bool(open_places.all()) else -(-int(open_places.sum(1).max()) // remaining_steps)
    confidence = (best - logits.logsumexp(-1)).to(blocks.device).masked_fill(~open_places, float("-inf"))
    chosen = confidence.topk(min(count, blocks.shape[1]), dim=1).indices
    keep = torch.zeros_like(open_places).scatter(1, chosen, True) & open_places
    return torch.where(keep, filled, blocks)
