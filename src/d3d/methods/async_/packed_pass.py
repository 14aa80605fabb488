"""One drafter pass prepares the successors of many outcomes, each as if it were drafted alone.

The drafted tokens under verification are clean rows that all branches share; a branch sees as many
of them as its outcome accepts, its guessed bonus token is its own clean anchor, and its slots
follow. None of these rows stays in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from d3d.engine.drafter import Draft
from d3d.engine.sampling import common_prefix
from d3d.methods.async_.outcomes import Doubt, Outcome, Place, likely_outcomes
from d3d.methods.async_.packed_layout import PackedRows, packed_rows, run_side_by_side
from d3d.methods.async_.preparer import DraftTask, Preparer, PrepareTask, PreparingSession
from d3d.methods.serial.denoise import CATCH_UP_ROWS, last_tokens, not_finite, unknown_id
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import Window
from d3d.model.masks.dense import causal

GuessFrom = Literal["block", "clean_rows"]
"""Source of guesses for the bonus token: the draft's own pass, which costs nothing; or the clean
rows of the draft, which see the tokens before them but take a short pass of their own."""

GUESS_FROM: tuple[GuessFrom, ...] = ("block", "clean_rows")
"""The default first."""

SPARE_TOKENS = 256
"""Initial capacity of a sequence's cache; it grows."""

MOST_TOGETHER = 32
"""Most tasks that share a pass."""

PASS_ROWS = 1024
"""Most rows of a shared pass: more make it no cheaper, and its logits large."""


@dataclass(frozen=True)
class PackedDrafter(Preparer):
    """A `DrafterModel` as a `Preparer`."""

    model: DrafterModel
    target_vocab_size: int
    guess_from: GuessFrom = "block"
    most_together: int = MOST_TOGETHER

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def open(self, outcome_budget: int) -> PackedSession:
        cache = self.model.transformer.new_cache()
        cache.open(0, SPARE_TOKENS)
        return PackedSession(self, cache.window([0]), outcome_budget)

    def draft_together(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Draft a block for each task, in one pass."""
        vocab_size = self.model.transformer.config.vocab_size
        verdicts = [Outcome(0, task.text[-1]) for task in tasks]
        known = [max(task.text) < vocab_size for task in tasks]
        asked = [
            PrepareTask(task.session, task.text[:-1], (), [verdict], task.draft_length)
            for task, verdict, is_known in zip(tasks, verdicts, known, strict=True)
            if is_known
        ]
        blocks = iter(self.prepare_together(asked))
        return [
            next(blocks).get(verdict, Draft()) if is_known else unknown_id(vocab_size)
            for verdict, is_known in zip(verdicts, known, strict=True)
        ]

    @torch.inference_mode()
    def prepare_together(self, tasks: Sequence[PrepareTask]) -> list[dict[Outcome, Draft]]:
        """Prepare the successors of each task, in one pass, or in a few if there are many rows.
        Raises ValueError as `PackedSession.prepare`."""
        sessions = [cast("PackedSession", task.session) for task in tasks]
        branches = [session.branches(task) for session, task in zip(sessions, tasks, strict=True)]
        for shared in _passes([part for part in branches if part is not None]):
            self._run(shared)
        return [{} if part is None else part.session.blocks(part) for part in branches]

    def _run(self, parts: list[_Branches]) -> None:
        states = run_side_by_side(
            self.model, [part.layout for part in parts], [part.session.cache for part in parts]
        )
        for part in parts:
            part.session.keep_text(part.task.text, part.task.draft)
        for length in sorted({part.length for part in parts}):
            pairs = zip(parts, states, strict=True)
            self._choose([(part, rows) for part, rows in pairs if part.length == length])

    def _choose(self, parts: list[tuple[_Branches, Tensor]]) -> None:
        """Choose the tokens of branches of one draft length from their states, [branches,
        draft_length + 1, hidden_size]."""
        states = torch.cat([rows for _, rows in parts])
        logits = self.model.draft_logits(states, self.target_vocab_size)
        last = torch.tensor(
            [ids for part, _ in parts for ids in part.last_tokens()], device=logits.device
        )
        self.model.choose_in_turn(states, logits, last, own_rows=self.model.config.own_rows)
        scores = logits.split([len(rows) for _, rows in parts])
        for (part, _), part_scores in zip(parts, scores, strict=True):
            part.session.take_in(part, part_scores)


@dataclass(frozen=True)
class _Branches:
    """A task's branches, laid out."""

    session: PackedSession
    task: PrepareTask
    outcomes: list[Outcome]
    """Those that fit into the drafter's context."""
    length: int
    """Tokens to draft after each of them."""
    layout: PackedRows

    def last_tokens(self) -> list[list[int]]:
        """The last tokens before each branch's slots, its anchor included."""
        text, draft = self.task.text[-8:], self.task.draft
        return [
            last_tokens([*text, *draft[: outcome.num_accepted], outcome.bonus_token])
            for outcome in self.outcomes
        ]


def _passes(parts: list[_Branches]) -> list[list[_Branches]]:
    """Parts in order, as many to a pass as PASS_ROWS allows."""
    passes: list[list[_Branches]] = []
    rows = PASS_ROWS
    for part in parts:
        rows += part.layout.num_rows
        if rows > PASS_ROWS:
            rows = part.layout.num_rows
            passes.append([])
        passes[-1].append(part)
    return passes


@dataclass(frozen=True)
class _Prepared:
    """A block, and guesses for each of its positions and the one after."""

    block: Draft
    places: tuple[Place, ...]


class PackedSession(PreparingSession):
    """One sequence. Between passes the cache holds a clean prefix of its committed tokens and,
    behind it and not counted, the clean rows of the last draft: those of accepted tokens need not
    be computed again."""

    def __init__(self, drafter: PackedDrafter, cache: Window, outcome_budget: int) -> None:
        self._drafter = drafter
        self._budget = outcome_budget
        self._model = drafter.model
        self.cache = cache
        self._prepared: dict[tuple[int, int], _Prepared] = {}
        """Blocks of the last pass, by length and last token of the text that they follow."""
        self._behind: tuple[int, ...] = ()
        """Drafted tokens whose clean rows are in the cache, after the text's."""
        self._doubt = Doubt()
        self._expected: tuple[int, tuple[int, ...], list[float]] = (0, (), [])
        """From the last call of `likely_outcomes`: length of the text, the draft, and the
        probabilities that clean rows gave its first tokens, as far as these were their best."""

    @property
    def length(self) -> int:
        """Cached tokens."""
        return self.cache.lengths[0]

    def draft(self, text: list[int], draft_length: int) -> Draft:
        """A block of at most `draft_length` tokens to follow `text`."""
        return self._drafter.draft_together([DraftTask(self, text, draft_length)])[0]

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        """At most `budget` likely verdicts on a draft that follows `text`, best first; none if the
        drafter has no guesses."""
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
        return likely_outcomes(
            draft, places, min(budget, self._budget), num_clean=num_clean, doubt=self._doubt.weight
        )

    def _learn(self, text: list[int]) -> None:
        """Learn from the text the verdict on the draft whose outcomes were listed last."""
        start, draft, chances = self._expected
        decided = text[start : start + len(chances)]
        self._doubt.learn(chances, common_prefix(decided, draft), len(decided))
        self._expected = (0, (), [])

    def _block_places(self, text: list[int], draft: Sequence[int]) -> Sequence[Place]:
        """Guesses of the pass that made the draft. Runs that pass if it was not the last one; no
        guesses if the draft is not this drafter's own."""
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
        if (
            len(text) + len(draft) > decoder.max_length
            or max([*text, *draft]) >= decoder.vocab_size
        ):
            return ()
        self._catch_up(text[:-1])  # the anchor's row is wanted
        start = self.length
        rows = torch.tensor([[*text[start:], *draft]])
        positions = start + torch.arange(rows.shape[1])[None]
        mask = causal(torch.tensor([start]), rows.shape[1], start + rows.shape[1])
        hidden = self._model.hidden(rows, positions, mask, self.cache, 0)
        self.keep_text(text, draft)
        return self._places(
            self._model.draft_logits(hidden[0, -len(draft) - 1 :], self._drafter.target_vocab_size)
        )

    def _places(self, logits: Tensor) -> tuple[Place, ...]:
        """logits float32 [places, vocab_size]."""
        guesses = logits.topk(min(self._budget + 1, logits.shape[-1]), dim=-1)
        chances = (guesses.values - logits.logsumexp(-1, keepdim=True)).exp()
        return tuple(
            Place(tuple(ids), tuple(row))
            for ids, row in zip(guesses.indices.tolist(), chances.tolist(), strict=True)
        )

    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> dict[Outcome, Draft]:
        """The block after `text`, the accepted part of `draft` and the bonus token, for every
        outcome that fits into the drafter's context. Raises ValueError for outcomes that accept
        more than was drafted, and for more outcomes than the budget."""
        return self._drafter.prepare_together(
            [PrepareTask(self, text, draft, outcomes, draft_length)]
        )[0]

    def branches(self, task: PrepareTask) -> _Branches | None:
        """Catch up with the text and lay out the task's rows; None if there is nothing to draft.
        Forgets what was prepared before."""
        self._check(task.draft, task.outcomes)
        decoder = self._model.transformer.config
        length = min(task.draft_length, self._drafter.block_size)
        fitting = [
            outcome
            for outcome in task.outcomes
            if self._room(task, outcome) > 0 and outcome.bonus_token < decoder.vocab_size
        ]
        self._prepared = {}
        if (
            length < 1
            or not fitting
            or max([*task.text, *task.draft], default=0) >= decoder.vocab_size
        ):
            return None
        self._catch_up(task.text)
        layout = packed_rows(
            self._model.config, self.length, task.text, task.draft, fitting, length
        )
        return _Branches(self, task, fitting, length, layout)

    def _room(self, task: PrepareTask, outcome: Outcome) -> int:
        """Tokens that fit into the drafter's context after an outcome."""
        return self._model.transformer.config.max_length - len(task.text) - outcome.num_accepted - 1

    def take_in(self, branches: _Branches, logits: Tensor) -> None:
        """Store the blocks that a pass has drafted. logits: float32 [branches, draft_length + 1,
        target_vocab_size]."""
        keys = [_key(branches.task, outcome) for outcome in branches.outcomes]
        read = self._read(logits, [position for position, _ in keys])
        for outcome, key, prepared in zip(branches.outcomes, keys, read, strict=True):
            block = prepared.block._replace(
                token_ids=prepared.block.token_ids[: self._room(branches.task, outcome)]
            )
            self._prepared[key] = _Prepared(block, prepared.places)

    def blocks(self, branches: _Branches) -> dict[Outcome, Draft]:
        """The blocks of the last pass, by outcome."""
        return {
            outcome: self._prepared[_key(branches.task, outcome)].block
            for outcome in branches.outcomes
        }

    def _check(self, draft: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        if len(outcomes) > self._budget:
            raise ValueError(f"{len(outcomes)} outcomes are more than the budget of {self._budget}")
        if any(not 0 <= outcome.num_accepted <= len(draft) for outcome in outcomes):
            raise ValueError(f"no outcome of a draft of {len(draft)} tokens: {list(outcomes)}")
        if len(draft) > self._drafter.block_size:
            raise ValueError(
                f"a draft of {len(draft)} tokens is longer than a block, {self._drafter.block_size}"
            )

    def keep_text(self, text: Sequence[int], draft: Sequence[int]) -> None:
        """Keep a pass's rows of `text`; the draft's rows stay after it, not counted."""
        self.cache.advance([len(text) - self.length])
        self._behind = tuple(draft)

    def _catch_up(self, text: list[int]) -> None:
        self.cache.advance([common_prefix(self._behind, text[self.length :])])
        self._behind = ()
        self.cache.crop([len(text)])
        while len(text) - self.length > CATCH_UP_ROWS:
            start = self.length
            part = torch.tensor([text[start : start + CATCH_UP_ROWS]])
            mask = causal(torch.tensor([start]), CATCH_UP_ROWS, start + CATCH_UP_ROWS)
            self._model.hidden(part, start + torch.arange(CATCH_UP_ROWS)[None], mask, self.cache, 0)
            self.cache.advance([CATCH_UP_ROWS])

    def _read(self, logits: Tensor, first_positions: list[int]) -> list[_Prepared]:
        """One block for each branch: the best token at each position but the last, and guesses for
        all of them. first_positions: of the blocks' first tokens."""
        finite = torch.isfinite(logits.amax(-1)).all(-1).tolist()
        prepared = []
        for is_finite, rows, position in zip(finite, logits, first_positions, strict=True):
            places = self._places(rows)
            block = (
                Draft(tuple(place.token_ids[0] for place in places[:-1]))
                if is_finite
                else not_finite(position)
            )
            prepared.append(_Prepared(block, places))
        return prepared


def _key(task: PrepareTask, outcome: Outcome) -> tuple[int, int]:
    """Key of the block after an outcome: length and last token of the text before it."""
    return len(task.text) + outcome.num_accepted + 1, outcome.bonus_token
