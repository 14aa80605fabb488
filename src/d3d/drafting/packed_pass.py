"""One drafter pass prepares the successors of many outcomes, each as if it were drafted alone.

The drafted tokens of the block under verification are fresh clean rows that all branches share; a branch sees as many of them as its
outcome accepts, its guessed bonus token is its own clean anchor, and its slots follow. Of all that nothing stays in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from d3d.core.types import DraftBlock, Outcome
from d3d.drafting.block_drafter import CATCH_UP_ROWS, NOT_FINITE, last_tokens, unknown_id
from d3d.drafting.outcomes import Doubt, Place, likely_outcomes
from d3d.drafting.packed_layout import PackedLayout, packed_layout
from d3d.masks.dense import causal
from d3d.models.drafter import DrafterModel
from d3d.models.kv_cache import KVCache

GuessFrom = Literal["block", "clean_rows"]
"""Where guesses of a bonus token come from: what the draft's own pass made of each place, which costs nothing; or the clean rows of the
draft, which know the tokens before them, in a short pass of their own."""

GUESS_FROM: tuple[GuessFrom, ...] = ("block", "clean_rows")
"""The default first."""


@dataclass(frozen=True)
class PackedDrafter:
    """A `DrafterModel` as a `Preparer`."""

    model: DrafterModel
    target_vocab_size: int
    guess_from: GuessFrom = "block"

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def open(self, capacity: int, outcome_budget: int) -> PackedSession:
        decoder = self.model.transformer
        # besides the text: a draft, and for every outcome its anchor, its slots and a guess slot
        room = min(capacity, decoder.config.max_length) + self.block_size + outcome_budget * (self.block_size + 2)
        return PackedSession(self, decoder.new_cache(1, room), outcome_budget)


@dataclass(frozen=True)
class _Prepared:
    """A block, and what the drafter makes of each of its places and of the one behind."""

    block: DraftBlock
    places: tuple[Place, ...]


class PackedSession:
    """One sequence; between passes the cache holds a clean prefix of its committed tokens, never a drafted token or a slot."""

    def __init__(self, drafter: PackedDrafter, cache: KVCache, outcome_budget: int) -> None:
        self._drafter = drafter
        self._budget = outcome_budget
        self._model = drafter.model
        self._cache = cache
        self._prepared: dict[tuple[int, int], _Prepared] = {}
        """Of the last pass, by the length of the text that a block follows and that text's last token."""
        self._doubt = Doubt()
        self._expected: tuple[int, tuple[int, ...], list[float]] = (0, (), [])
        """Length of the text behind which outcomes were listed last, the draft, and what clean rows gave its first tokens, as far as these
        are their best."""

    @property
    def length(self) -> int:
        """Cached tokens."""
        return self._cache.lengths[0]

    def draft(self, text: list[int], draft_length: int) -> DraftBlock:
        """A block of at most `draft_length` tokens to follow `text`."""
        vocab_size = self._model.transformer.config.vocab_size
        if max(text) >= vocab_size:
            return unknown_id(vocab_size)
        blocks = self.prepare(text[:-1], (), [Outcome(0, text[-1])], draft_length)
        return blocks.get(Outcome(0, text[-1]), DraftBlock())

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        """Verdicts to expect on a draft behind `text`, best first, at most `budget` of them; none where the drafter can't say."""
        from_block = self._drafter.guess_from == "block"
        places = self._block_places(text, draft) if from_block else self._clean_places(text, draft)
        self._learn(text)
        if not places:
            return []
        num_clean = self._model.config.own_rows if from_block else len(places)
        clean = zip(draft, places[:num_clean], strict=False)
        best = itertools.takewhile(lambda pair: pair[0] == pair[1].token_ids[0], clean)
        chances = [place.chance(token) for token, place in best]
        self._expected = (len(text), tuple(draft), chances)
        return likely_outcomes(draft, places, min(budget, self._budget), num_clean=num_clean, doubt=self._doubt.weight)

    def _learn(self, text: list[int]) -> None:
        """What has become of the draft whose outcomes were listed last, as `text` tells."""
        start, draft, chances = self._expected
        came = text[start : start + len(chances)]
        kept = next((place for place, (token, drafted) in enumerate(zip(came, draft, strict=False)) if token != drafted), len(came))
        self._doubt.learn(chances, kept, len(came))
        self._expected = (0, (), [])

    def _block_places(self, text: list[int], draft: Sequence[int]) -> Sequence[Place]:
        """A draft that did not come out of the last pass costs a pass; none for what is not this drafter's own draft."""
        known = self._prepared.get((len(text), text[-1]))
        if known is None or known.block.token_ids[: len(draft)] != tuple(draft):
            self.draft(text, max(1, len(draft)))
            known = self._prepared.get((len(text), text[-1]))
        if known is None or known.block.token_ids[: len(draft)] != tuple(draft):
            return ()  # foreign, or beyond the drafter's context
        return known.places

    @torch.inference_mode()
    def _clean_places(self, text: list[int], draft: Sequence[int]) -> Sequence[Place]:
        decoder = self._model.transformer.config
        if len(text) + len(draft) > decoder.max_length or max([*text, *draft]) >= decoder.vocab_size:
            return ()
        self._catch_up(text[:-1])  # the anchor's row is wanted
        start = self.length
        rows = torch.tensor([[*text[start:], *draft]])
        positions = start + torch.arange(rows.shape[1])[None]
        mask = causal(torch.tensor([start]), rows.shape[1], start + rows.shape[1])
        hidden = self._model.hidden(rows, positions, mask, self._cache, 0)
        self._cache.advance([len(text) - start])
        return self._places(self._model.draft_logits(hidden[0, -len(draft) - 1 :], self._drafter.target_vocab_size))

    def _places(self, logits: Tensor) -> tuple[Place, ...]:
        """logits float32 [places, vocab_size]."""
        guesses = logits.topk(min(self._budget + 1, logits.shape[-1]), dim=-1)
        chances = (guesses.values - logits.logsumexp(-1, keepdim=True)).exp()
        return tuple(Place(tuple(ids), tuple(row)) for ids, row in zip(guesses.indices.tolist(), chances.tolist(), strict=True))

    @torch.inference_mode()
    def prepare(self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int) -> dict[Outcome, DraftBlock]:
        """The block that follows `text`, the accepted part of `draft` and the bonus token, for every outcome that the drafter's context
        has room for. Outcomes of more accepted tokens than drafted ones, and more outcomes than the budget, raise ValueError."""
        self._check(draft, outcomes)
        decoder = self._model.transformer.config
        length = min(draft_length, self._drafter.block_size)
        room = {outcome: min(length, decoder.max_length - len(text) - outcome.num_accepted - 1) for outcome in outcomes}
        going = [outcome for outcome in outcomes if room[outcome] > 0 and outcome.bonus_token < decoder.vocab_size]
        self._prepared = {}
        if not going or max([*text, *draft], default=0) >= decoder.vocab_size:
            return {}
        self._catch_up(text)
        layout = packed_layout(self._model.config, self.length, text, draft, going, length)
        states, logits = self._pass(layout, len(text))
        last = torch.tensor([last_tokens([*text[-8:], *draft[: o.num_accepted], o.bonus_token]) for o in going], device=logits.device)
        still_open = torch.full(logits.shape[:2], -1, device=logits.device)
        self._model.choose_in_turn(states, logits, still_open, last, own_rows=self._model.config.own_rows)
        for outcome, prepared in zip(going, self._read(logits), strict=True):
            block = prepared.block._replace(token_ids=prepared.block.token_ids[: room[outcome]])
            self._prepared[len(text) + outcome.num_accepted + 1, outcome.bonus_token] = _Prepared(block, prepared.places)
        blocks = [self._prepared[len(text) + outcome.num_accepted + 1, outcome.bonus_token].block for outcome in going]
        return dict(zip(going, blocks, strict=True))

    def _check(self, draft: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        if len(outcomes) > self._budget:
            raise ValueError(f"{len(outcomes)} outcomes are more than the budget of {self._budget}")
        if any(not 0 <= outcome.num_accepted <= len(draft) for outcome in outcomes):
            raise ValueError(f"no outcome of a draft of {len(draft)} tokens: {list(outcomes)}")
        if len(draft) > self._drafter.block_size:
            raise ValueError(f"a draft of {len(draft)} tokens is longer than a block, {self._drafter.block_size}")

    def _catch_up(self, text: list[int]) -> None:
        self._cache.crop([len(text)])
        while len(text) - self.length > CATCH_UP_ROWS:
            start = self.length
            part = torch.tensor([text[start : start + CATCH_UP_ROWS]])
            mask = causal(torch.tensor([start]), CATCH_UP_ROWS, start + CATCH_UP_ROWS)
            self._model.hidden(part, start + torch.arange(CATCH_UP_ROWS)[None], mask, self._cache, 0)
            self._cache.advance([CATCH_UP_ROWS])

    def _pass(self, layout: PackedLayout, committed: int) -> tuple[Tensor, Tensor]:
        """States [branches, draft_length + 1, hidden_size] and float32 logits [branches, draft_length + 1, target_vocab_size]; of the
        pass's rows the cache keeps those of the first `committed` tokens."""
        hidden = self._model.hidden(layout.token_ids, layout.rows.position, layout.mask, self._cache, layout.num_slots)
        self._cache.advance([committed - self.length])
        states = hidden[0, layout.predicting.to(hidden.device)]
        return states, self._model.draft_logits(states, self._drafter.target_vocab_size)

    def _read(self, logits: Tensor) -> list[_Prepared]:
        """One block for each branch: the best token at each place but the last, and guesses at all of them."""
        finite = torch.isfinite(logits.amax(-1)).all(-1).tolist()
        prepared = []
        for is_finite, rows in zip(finite, logits, strict=True):
            places = self._places(rows)
            block = DraftBlock(tuple(place.token_ids[0] for place in places[:-1])) if is_finite else DraftBlock(fault=NOT_FINITE)
            prepared.append(_Prepared(block, places))
        return prepared
