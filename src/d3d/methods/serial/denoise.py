"""Passes that fill blocks: catch up with the committed tokens and draft, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3d.engine.drafter import NO_DRAFT, Draft
from d3d.errors import NotFinite
from d3d.model.choice import SEEN_TOKENS, Chosen
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.kv_cache import KVCache, Window
from d3d.model.layout import MASKED, PassLayout, SlotGroup, lay_out

CATCH_UP_ROWS = 1024
"""Limit of missing clean tokens in a drafting pass; more run in passes of their own before it."""


class BlockDenoiser:
    """Fills blocks with a `DrafterModel`, in `num_denoise_steps` passes each.

    Between drafts the cache holds a clean prefix of every sequence's committed tokens, never a
    slot."""

    def __init__(
        self,
        model: DrafterModel,
        target_vocab_size: int,
        cache: KVCache,
        *,
        num_denoise_steps: int = 1,
        with_confidences: bool = False,
    ) -> None:
        self.model, self.cache = model, cache
        self._target_vocab_size = target_vocab_size
        self._steps, self._with_confidences = num_denoise_steps, with_confidences

    @torch.inference_mode()
    def draft(
        self, ids: Sequence[int], texts: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[Draft]:
        """Draft at most `lengths[i]` tokens after the text `texts[i]` (token ids) of sequence
        `ids[i]`, which must be in the cache."""
        config, limit = self.model.config, self.model.transformer.config.max_length
        wanted = {
            sequence_id: max(0, min(length, config.block_size, limit - len(text)))
            for sequence_id, text, length in zip(ids, texts, lengths, strict=True)
        }
        if max(wanted.values()) < 1:
            return [NO_DRAFT for _ in ids]
        window = self.cache.window(ids)
        by_id = dict(zip(ids, texts, strict=True))
        known = [
            # a text beyond the drafter's context is cut to it and gets no draft; sequences that
            # only lie between the others get any text
            by_id[sequence_id][:limit] if sequence_id in by_id else [0] * (length + 1)
            for sequence_id, length in zip(window.ids, window.lengths, strict=True)
        ]
        between = [sequence_id for sequence_id in window.ids if sequence_id not in by_id]
        before = [self.cache.length(sequence_id) for sequence_id in between]
        drafts = self._draft(
            window, known, [wanted.get(sequence_id, 0) for sequence_id in window.ids]
        )
        for sequence_id, length in zip(between, before, strict=True):
            self.cache.crop(sequence_id, length)
        place = {sequence_id: row for row, sequence_id in enumerate(window.ids)}
        return [drafts[place[sequence_id]] for sequence_id in ids]

    def _draft(self, window: Window, known: list[list[int]], wanted: list[int]) -> list[Draft]:
        vocab_size = self.model.transformer.config.vocab_size
        fresh = zip(known, window.lengths, strict=True)
        unknown = [max(ids[done:], default=0) >= vocab_size for ids, done in fresh]
        if any(unknown):
            known = [
                _readable(ids, vocab_size) if odd else ids
                for ids, odd in zip(known, unknown, strict=True)
            ]
        self._catch_up(window, known)
        blocks = torch.full((len(known), max(wanted)), MASKED)
        device = self.model.transformer.device
        last = torch.tensor([last_tokens(ids) for ids in known], device=device)
        finite = torch.ones(len(known), dtype=torch.bool)
        chances = torch.zeros(blocks.shape) if self._with_confidences else None
        for step in range(self._steps):
            # every draft computes the anchor's row again
            window.crop([len(ids) - 1 for ids in known])
            chosen = self._choose(window, known, blocks, last, is_first=step == 0)
            finite &= torch.isfinite(chosen.best).all(-1).cpu()
            before, blocks = blocks, reveal(blocks, chosen, remaining_steps=self._steps - step)
            if chances is not None and chosen.logprobs is not None:
                chances = torch.where(before == blocks, chances, chosen.logprobs.exp().cpu())
        sure = [()] * len(known) if chances is None else chances.tolist()
        parts = zip(known, blocks.tolist(), wanted, finite.tolist(), unknown, sure, strict=True)
        return [
            unknown_id(vocab_size)
            if odd
            else Draft(tuple(block[:length]), confidences=tuple(row[:length]))
            if is_finite
            else not_finite(len(ids))
            for ids, block, length, is_finite, odd, row in parts
        ]

    def _catch_up(self, window: Window, known: list[list[int]]) -> None:
        """Process missing tokens beyond those of one round, which the drafting pass handles. A
        sequence that lacks more than the others catches up alone: in a common pass the others would
        be padding."""
        missing = [len(ids) - done for ids, done in zip(known, window.lengths, strict=True)]
        most = self.model.config.block_size + 1
        far_behind = [row for row, count in enumerate(missing) if count > most]
        if far_behind and (len(far_behind) < len(known) or any(window.lengths)):
            for row in far_behind:
                self._run_clean(self.cache.window([window.ids[row]]), [known[row][:-1]], 0)
        self._run_clean(window, known, CATCH_UP_ROWS)

    def _run_clean(self, window: Window, known: list[list[int]], left: int) -> None:
        """Run clean passes until no sequence lacks more than `left` tokens."""
        while max(len(ids) - n for ids, n in zip(known, window.lengths, strict=True)) > left:
            trunks = [
                ids[done : done + CATCH_UP_ROWS]
                for ids, done in zip(known, window.lengths, strict=True)
            ]
            attention = self.model.config.block_attention
            layout = lay_out(attention, window.lengths, trunks, [()] * len(known))
            self._hidden(window, layout, [len(trunk) for trunk in trunks])

    def _choose(
        self,
        window: Window,
        known: list[list[int]],
        blocks: Tensor,
        last: Tensor,
        *,
        is_first: bool,
    ) -> Chosen:
        """Run the pass, and choose a token at every position of the blocks."""
        model = self.model
        layout, num_clean = draft_layout(model.config, window.lengths, known, blocks.tolist())
        hidden = self._hidden(window, layout, num_clean)
        predicting = predicting_rows(model.config, layout, num_clean, blocks.shape[1])
        device = hidden.device
        index = predicting.to(device)[..., None].expand(-1, -1, hidden.shape[-1])
        states = hidden.gather(1, index)
        logits, token_ids = model.few_logits(states, self._target_vocab_size)
        return model.choose(
            states,
            logits,
            last,
            own_rows=model.config.own_rows,
            token_ids=token_ids,
            blocks=None if is_first else blocks.to(device),
            logprobs=self._steps > 1 or self._with_confidences,
        )

    def _hidden(self, window: Window, layout: PassLayout, num_clean: list[int]) -> Tensor:
        positions = layout.rows.position
        hidden = self.model.hidden(
            layout.token_ids, positions, layout.mask, window, layout.num_slots
        )
        window.advance(num_clean)
        return hidden


def draft_layout(
    config: DrafterConfig, cached: list[int], known: list[list[int]], blocks: list[list[int]]
) -> tuple[PassLayout, list[int]]:
    """Layout of a drafting pass, and the number of clean rows of each sequence.

    known[b]: all tokens of sequence b so far, the anchor last; blocks[b]: its drafted tokens,
    MASKED if open. The cache must end before the anchor: the draft needs its row, as a clean row or
    as the first slot."""
    clean = [ids[:-1] for ids in known] if config.anchor_slot else known
    trunks = [ids[done:] for done, ids in zip(cached, clean, strict=True)]
    groups = []
    for ids, block, text in zip(clean, blocks, known, strict=True):
        num_slots = config.num_slots(len(block))
        slots = [text[-1], *block[:-1]] if config.anchor_slot else block[:num_slots]
        groups.append([SlotGroup(len(ids) - 1, len(ids), slots)])
    layout = lay_out(config.block_attention, cached, trunks, groups)
    return layout, [len(trunk) for trunk in trunks]


def predicting_rows(
    config: DrafterConfig, layout: PassLayout, num_clean: list[int], draft_length: int
) -> Tensor:
    """Row that predicts each drafted token, int64 [batch, draft_length]."""
    if not config.own_rows:
        return (layout.width + torch.arange(draft_length)).expand(len(num_clean), -1)
    slots = (layout.width + torch.arange(draft_length - 1)).expand(len(num_clean), -1)
    return torch.cat((torch.tensor(num_clean)[:, None] - 1, slots), dim=1)


def last_tokens(ids: list[int]) -> list[int]:
    """Last SEEN_TOKENS tokens of a text, the latest first; a shorter text repeats its first."""
    return [ids[max(0, len(ids) - 1 - back)] for back in range(SEEN_TOKENS)]


def not_finite(position: int) -> Draft:
    """Draft with a fault, for logits that are NaN or infinite. position: of its first token."""
    return Draft(fault=str(NotFinite("the drafter's logits are", "a draft pass", position)))


def unknown_id(vocab_size: int) -> Draft:
    """Draft with a fault, for a text that the drafter can't read."""
    return Draft(
        fault=f"the text has an id that the drafter does not know (it knows ids below {vocab_size})"
    )


def _readable(ids: list[int], vocab_size: int) -> list[int]:
    """Placeholder text of the same length that the drafter can read; its draft is dropped."""
    return [token_id if token_id < vocab_size else 0 for token_id in ids]


def reveal(blocks: Tensor, chosen: Chosen, *, remaining_steps: int) -> Tensor:
    """Fill the most confident masked positions: all of them in the last step, an even share before.

    blocks int64 [batch, draft_length], MASKED if open; chosen: a token for every position, with
    `logprobs` before the last step. Returns new blocks."""
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
