"""The D3D drafter behind the Drafter protocol: catch up with the committed tokens and draft, in one
pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.core.protocols import TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.confidence import confident_prefix
from d3d.drafting.layout import MASKED, DraftLayout, draft_layout
from d3d.model.choice import SEEN_TOKENS, Chosen
from d3d.model.drafter import DrafterModel
from d3d.model.from_target import clean_rows_are_of
from d3d.model.kv_cache import KVCache
from d3d.target.native import NativeSession

NOT_FINITE = "the drafter's logits are not finite"

CATCH_UP_ROWS = 1024
"""More missing clean tokens than this run in passes of their own before the pass that drafts."""


@dataclass(frozen=True)
class BlockDrafter:
    """Proposes blocks with a `DrafterModel`, in `num_denoise_steps` passes each."""

    model: DrafterModel
    target_vocab_size: int
    num_denoise_steps: int = 1
    draft_confidence: float | None = None
    """Cut a draft where the chance that all of it is kept falls below; None cuts nothing."""

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def open(self, num_sequences: int, capacity: int) -> BlockDraftSession:
        limit = self.model.transformer.config.max_length
        # besides the text: the padding beside another sequence's catch-up rows, and the slots
        room = min(capacity, limit) + 2 * self.block_size + 1
        return BlockDraftSession(self, self.model.transformer.new_cache(num_sequences, room))

    def open_beside(self, target: TargetSession) -> BesideTargetSession | None:
        if not isinstance(target, NativeSession) or not clean_rows_are_of(self.model, target.model):
            return None
        return BesideTargetSession(self, target.cache)


class BlockDraftSession:
    """Between passes the cache holds a clean prefix of every sequence's committed tokens, never a
    slot."""

    def __init__(self, drafter: BlockDrafter, cache: KVCache) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._cache = cache

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)

    def join(self, count: int) -> None:
        self._cache.join(count)

    @torch.inference_mode()
    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        blocks = self.draft_behind([sequence.token_ids for sequence in sequences], lengths)
        return [confident_prefix(block, self._drafter.draft_confidence) for block in blocks]

    def draft_behind(self, texts: list[list[int]], lengths: ListLike[int]) -> list[DraftBlock]:
        """A block of at most `lengths[i]` tokens to follow the token ids `texts[i]`."""
        decoder = self._model.transformer.config
        limit = decoder.max_length
        wanted = [
            max(0, min(n, self._drafter.block_size, limit - len(text)))
            for text, n in zip(texts, lengths, strict=True)
        ]
        if max(wanted) < 1:
            return [DraftBlock() for _ in texts]
        # a text that the drafter's context can't hold goes along up to there, and gets no draft
        known = [text if len(text) <= limit else text[:limit] for text in texts]
        unknown = [
            max(ids[done:], default=0) >= decoder.vocab_size
            for ids, done in zip(known, self._cache.lengths, strict=True)
        ]
        if any(unknown):
            known = [
                _readable(ids, decoder.vocab_size) if odd else ids
                for ids, odd in zip(known, unknown, strict=True)
            ]
        self._catch_up(known)
        blocks = torch.full((len(texts), max(wanted)), MASKED)
        last = torch.tensor(
            [last_tokens(ids) for ids in known], device=self._model.transformer.device
        )
        finite = torch.ones(len(texts), dtype=torch.bool)
        chances = None if self._drafter.draft_confidence is None else torch.zeros(blocks.shape)
        steps = self._drafter.num_denoise_steps
        for step in range(steps):
            self._cache.crop(
                [len(ids) - 1 for ids in known]
            )  # the anchor's row is computed with every draft
            layout = draft_layout(self._model.config, self._cache.lengths, known, blocks)
            chosen = self._choose(
                layout,
                last,
                None if step == 0 else blocks,
                logprobs=steps > 1 or chances is not None,
            )
            finite &= torch.isfinite(chosen.best).all(-1).cpu()
            before, blocks = blocks, reveal(blocks, chosen, remaining_steps=steps - step)
            if chances is not None and chosen.logprobs is not None:
                chances = torch.where(before == blocks, chances, chosen.logprobs.exp().cpu())
        drafted = zip(blocks.tolist(), wanted, finite.tolist(), unknown, strict=True)
        made = [
            _block(block[:length], is_finite, odd, decoder.vocab_size)
            for block, length, is_finite, odd in drafted
        ]
        if chances is None:
            return made
        return [
            block._replace(confidences=tuple(row[: len(block.token_ids)]))
            for block, row in zip(made, chances.tolist(), strict=True)
        ]

    def _catch_up(self, known: list[list[int]]) -> None:
        """Leave to the pass that drafts what a round can have added. Whoever lacks more than others
        do, having joined them later, catches up alone: in a pass of all it would make them
        padding."""
        missing = [len(ids) - done for ids, done in zip(known, self._cache.lengths, strict=True)]
        far_behind = [
            row for row, count in enumerate(missing) if count > self._drafter.block_size + 1
        ]
        if far_behind and (len(far_behind) < len(known) or any(self._cache.lengths)):
            for row in far_behind:
                with self._cache.only(row, row + 1):
                    self._run_clean([known[row][:-1]], 0)
        self._run_clean(known, CATCH_UP_ROWS)

    def _run_clean(self, known: list[list[int]], left: int) -> None:
        """Until nobody lacks more than `left` tokens."""
        no_blocks = torch.empty((len(known), 0), dtype=torch.long)
        while (
            max(len(ids) - done for ids, done in zip(known, self._cache.lengths, strict=True))
            > left
        ):
            part = [
                ids[: done + CATCH_UP_ROWS]
                for ids, done in zip(known, self._cache.lengths, strict=True)
            ]
            self._hidden(draft_layout(self._model.config, self._cache.lengths, part, no_blocks))

    def _choose(
        self, layout: DraftLayout, last: Tensor, blocks: Tensor | None, *, logprobs: bool
    ) -> Chosen:
        """Run the pass, and choose a token in every place of the blocks."""
        hidden = self._hidden(layout)
        device = hidden.device
        states = hidden.gather(
            1, layout.predicting.to(device)[..., None].expand(-1, -1, hidden.shape[-1])
        )
        blocks = None if blocks is None else blocks.to(device)
        logits, token_ids = self._model.few_logits(states, self._drafter.target_vocab_size)
        own_rows = self._model.config.own_rows
        return self._model.choose(
            states,
            logits,
            last,
            own_rows=own_rows,
            token_ids=token_ids,
            blocks=blocks,
            logprobs=logprobs,
        )

    def _hidden(self, layout: DraftLayout) -> Tensor:
        hidden = self._model.hidden(
            layout.token_ids, layout.positions, layout.mask, self._cache, layout.num_slots
        )
        self._cache.advance(layout.num_clean)
        return hidden


class BesideTargetSession:
    """Drafts behind the target's own cached rows; the cache is left as the target had it."""

    def __init__(self, drafter: BlockDrafter, cache: KVCache) -> None:
        self._drafter = drafter
        self._session = BlockDraftSession(drafter, cache)
        self._cache = cache
        self._sequence_ids = list(cache.sequence_ids)

    def keep(self, rows: list[int]) -> None:
        """The target compacts the cache itself, maybe less: what does not draft any more may go on
        there."""
        self._sequence_ids = [self._sequence_ids[row] for row in rows]

    def join(self, count: int) -> None:
        self._sequence_ids += self._cache.sequence_ids[len(self._cache.sequence_ids) - count :]

    @torch.inference_mode()
    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        before = list(self._cache.lengths)
        rows = [self._cache.sequence_ids.index(sequence_id) for sequence_id in self._sequence_ids]
        texts, wanted = (
            [[0] * (length + 1) for length in before],
            [0] * len(before),
        )  # any text for those that do not draft
        for row, sequence, length in zip(rows, sequences, lengths, strict=True):
            texts[row], wanted[row] = sequence.token_ids, length
        try:
            blocks = self._session.draft_behind(texts, wanted)
        finally:
            self._cache.crop(before)
        for row, block in enumerate(blocks):
            if block.fault is not None:
                self._cache.clear_behind(row)
        config, least = self._drafter.model.config, self._drafter.draft_confidence
        own_rows = (
            config.own_rows if config.draft_vocabulary is None else 0
        )  # what the target chooses may be no token that can be drafted
        sure = [
            own_rows if sequence.params.greedy else 0 for sequence in sequences
        ]  # the target's own rows choose greedily, too
        return [
            confident_prefix(blocks[row], least, num_sure=count)
            for row, count in zip(rows, sure, strict=True)
        ]


def last_tokens(ids: list[int]) -> list[int]:
    """The last SEEN_TOKENS of a text, the very last first; the first one again where it has
    fewer."""
    return [ids[max(0, len(ids) - 1 - back)] for back in range(SEEN_TOKENS)]


def _readable(ids: list[int], vocab_size: int) -> list[int]:
    """Any text of the same length that the drafter can read; its block is dropped."""
    return [token_id if token_id < vocab_size else 0 for token_id in ids]


def unknown_id(vocab_size: int) -> DraftBlock:
    """What becomes of a text that the drafter can't read."""
    return DraftBlock(
        fault=f"the text has an id that the drafter does not know (it knows ids below {vocab_size})"
    )


def _block(token_ids: list[int], is_finite: bool, odd: bool, vocab_size: int) -> DraftBlock:
    if odd:
        return unknown_id(vocab_size)
    return DraftBlock(tuple(token_ids)) if is_finite else DraftBlock(fault=NOT_FINITE)


def reveal(blocks: Tensor, chosen: Chosen, *, remaining_steps: int) -> Tensor:
    """Fill the most confident masked places: all of them in the last step, an even share before.

    blocks int64 [batch, draft_length], MASKED where open; chosen: for every place, with `logprobs`
    before the last step. Returns new blocks."""
    open_places = blocks == MASKED
    filled = torch.where(open_places, chosen.token_ids.to(blocks.device), blocks)
    if remaining_steps == 1:
        return filled
    assert chosen.logprobs is not None, "which places are surest is not known"
    count = -(-int(open_places.sum(1).max()) // remaining_steps)
    confidence = chosen.logprobs.to(blocks.device).masked_fill(~open_places, float("-inf"))
    most = confidence.topk(count, dim=1).indices
    keep = torch.zeros_like(open_places).scatter(1, most, True) & open_places
    return torch.where(keep, filled, blocks)
