"""Drafters that need no model, with a known acceptance, fault or delay: for the engine, and for
async mode's draft worker.

Each is made of a function of a request, the length asked for and the number of the draft. Those
that have to know what is right replay `answers`: the target's own sequences, prompt and answer
together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.noise import uniform
from d3d.engine.request import Request
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.preparer import Preparer, PreparingSession

Propose = Callable[[Request, int, int], Draft]
"""(request, most tokens to propose, drafts made before) -> draft. Must not change the request."""


class Double(Drafter):
    """A drafter made of a function. Of a request it keeps that it has seen it."""

    def __init__(self, block_size: int, propose: Propose) -> None:
        self.max_draft_length = block_size
        self.make_draft = propose
        self.num_drafts = 0
        self.held: set[int] = set()

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        self.held |= {request.id for request in requests}
        number, self.num_drafts = self.num_drafts, self.num_drafts + 1
        return [
            self.make_draft(request, request.draft_room(self.max_draft_length), number)
            for request in requests
        ]

    def end(self, request: Request) -> None:
        self.held.discard(request.id)

    @property
    def num_held(self) -> int:
        return len(self.held)


def oracle(block_size: int, answers: Sequence[Sequence[int]]) -> Double:
    """Always right: continues the first of `answers` that begins with what is committed, with
    nothing if none does."""
    known = [list(answer) for answer in answers]

    def propose(request: Request, length: int, _: int) -> Draft:
        committed = len(request)
        for answer in known:
            if answer[:committed] == request.token_ids:
                return Draft(tuple(answer[committed : committed + length]))
        return Draft()

    return Double(block_size, propose)


def wrong_at(
    index: int, block_size: int, answers: Sequence[Sequence[int]], vocab_size: int
) -> Double:
    """Right, but for the token at `index` (from 0) of every block."""
    return _spoilt(block_size, answers, vocab_size, lambda place, _: place == index)


def always_wrong(block_size: int, answers: Sequence[Sequence[int]], vocab_size: int) -> Double:
    """Never right, as long as one of `answers` is what the target writes."""
    return _spoilt(block_size, answers, vocab_size, lambda _, __: True)


def noisy(
    probability: float,
    seed: int,
    block_size: int,
    answers: Sequence[Sequence[int]],
    vocab_size: int,
) -> Double:
    """Each token is wrong with `probability`, which hangs on (seed, absolute position) alone."""
    return _spoilt(
        block_size, answers, vocab_size, lambda _, position: uniform(seed, position) < probability
    )


def _spoilt(
    block_size: int,
    answers: Sequence[Sequence[int]],
    vocab_size: int,
    is_wrong: Callable[[int, int], bool],
) -> Double:
    """`is_wrong`: (place in the block, absolute position) -> whether that token is replaced by the
    next id."""
    right = oracle(block_size, answers)

    def propose(request: Request, length: int, number: int) -> Draft:
        tokens = right.make_draft(request, length, number).token_ids
        first = len(request)
        return Draft(
            tuple(
                (token + is_wrong(place, first + place)) % vocab_size
                for place, token in enumerate(tokens)
            )
        )

    return Double(block_size, propose)


def scripted(block_size: int, blocks: Sequence[Sequence[int]]) -> Double:
    """Proposes blocks[k] in draft k, whatever the sequence and whatever length is asked for;
    nothing after the last."""

    def propose(_: Request, __: int, number: int) -> Draft:
        return Draft(tuple(blocks[number])) if number < len(blocks) else Draft()

    return Double(block_size, propose)


def empty(double: Double, every: int = 2) -> Double:
    """Proposes nothing in every `every`-th draft, from the first on."""
    return _before(double, lambda number: Draft() if number % every == 0 else None)


def failing(double: Double, at_draft: int = 0) -> Double:
    """Raises RuntimeError in draft `at_draft` and all later ones."""

    def fail(number: int) -> None:
        if number >= at_draft:
            raise RuntimeError(f"told to fail in draft {at_draft}")

    return _before(double, fail)


def faulty(double: Double, at_draft: int = 0) -> Double:
    """Reports a fault in place of draft `at_draft`, as a model with non-finite logits would."""
    return _before(
        double, lambda number: Draft(fault="told to be faulty") if number == at_draft else None
    )


def slow(double: Double, seconds: float) -> Double:
    """Sleeps before each sequence's block."""
    return _before(double, lambda _: time.sleep(seconds))


def _before(double: Double, interrupt: Callable[[int], Draft | None]) -> Double:
    """`interrupt` is called with the draft's number; what it returns takes the place of the
    block."""

    def propose(request: Request, length: int, number: int) -> Draft:
        instead = interrupt(number)
        return double.make_draft(request, length, number) if instead is None else instead

    return Double(double.max_draft_length, propose)


Expect = Callable[[list[int], Sequence[int]], list[Outcome]]
"""(text, draft under verification behind it) -> outcomes to prepare, the likeliest first."""


def nothing_happens(_number: int) -> None:
    pass


@dataclass(frozen=True)
class PreparingDouble(Preparer):
    """A `Preparer` made of functions; its sessions are independent of each other."""

    double: Double
    expect: Expect
    before: Callable[[int], None] = nothing_happens
    """Called before each request with its number in the session, to sleep, to raise or to end the
    process."""
    most_together: int = 1

    def open(self, outcome_budget: int) -> PreparingDoubleSession:
        return PreparingDoubleSession(self)


@dataclass
class PreparingDoubleSession(PreparingSession):
    """Counts the requests."""

    preparer: PreparingDouble
    number: int = field(default=0)

    def draft(self, text: list[int], draft_length: int) -> Draft:
        self._count()
        return self._propose(text, draft_length)

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        return self.preparer.expect(text, draft)[:budget]

    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> dict[Outcome, Draft]:
        self._count()
        return {
            o: self._propose([*text, *draft[: o.num_accepted], o.bonus_token], draft_length)
            for o in outcomes
        }

    def _count(self) -> None:
        self.number += 1
        self.preparer.before(self.number - 1)

    def _propose(self, text: list[int], draft_length: int) -> Draft:
        double = self.preparer.double
        wanted = min(draft_length, double.max_draft_length)
        return double.make_draft(Request(text), wanted, self.number - 1)


def foresees(answers: Sequence[Sequence[int]]) -> Expect:
    """Knows the verdict, as long as one of `answers` (prompt and answer together) is what the
    target writes."""
    known = [list(answer) for answer in answers]

    def expect(text: list[int], draft: Sequence[int]) -> list[Outcome]:
        for answer in known:
            if answer[: len(text)] == text:
                coming = answer[len(text) :]
                places = range(min(len(draft), len(coming)))
                num_accepted = next(
                    (place for place in places if draft[place] != coming[place]), len(places)
                )
                return (
                    [Outcome(num_accepted, coming[num_accepted])]
                    if num_accepted < len(coming)
                    else []
                )
        return []

    return expect


def misjudges(expect: Expect, vocab_size: int) -> Expect:
    """Expects another bonus token than would be right: every round misses."""

    def expect_another(text: list[int], draft: Sequence[int]) -> list[Outcome]:
        return [
            Outcome(o.num_accepted, (o.bonus_token + 1) % vocab_size) for o in expect(text, draft)
        ]

    return expect_another


def sometimes(probability: float, seed: int, first: Expect, otherwise: Expect) -> Expect:
    """`first` with `probability`, which hangs on (seed, length of the text) alone."""

    def expect(text: list[int], draft: Sequence[int]) -> list[Outcome]:
        return (first if uniform(seed, len(text)) < probability else otherwise)(text, draft)

    return expect
