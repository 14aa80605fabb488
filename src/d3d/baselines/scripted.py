"""Drafters that need no model: for tests, and for experiments that want a known acceptance, fault
or delay.

Each is a `Double`: a function of a sequence, the length asked for and the number of the session's
draft. Those that have to know what is right replay `answers`: the target's own sequences, prompt
and answer together."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.engine.rng import uniform

Propose = Callable[[Sequence, int, int], DraftBlock]
"""(sequence, most tokens to propose, drafts that the session has made before) -> block. Must not
change the sequence."""


@dataclass(frozen=True)
class Double:
    """A drafter made of a function. It keeps no state of its own, so sessions are independent of
    each other."""

    block_size: int
    propose: Propose

    def open(self, num_sequences: int, capacity: int) -> DoubleSession:  # noqa: ARG002 - nothing is cached
        return DoubleSession(self, num_sequences)


class DoubleSession:
    """Counts the drafts; see `DraftSession`. Raises ValueError when it is asked about other
    sequences than it was opened for."""

    def __init__(self, double: Double, num_sequences: int) -> None:
        self._double = double
        self._num_sequences = num_sequences
        self._num_drafts = 0

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        if len(sequences) != self._num_sequences:
            raise ValueError(
                f"the session holds {self._num_sequences} sequences, not {len(sequences)}"
            )
        number = self._num_drafts
        self._num_drafts += 1
        wanted = [min(length, self._double.block_size) for length in lengths]
        return [
            self._double.propose(sequence, length, number)
            for sequence, length in zip(sequences, wanted, strict=True)
        ]

    def keep(self, rows: list[int]) -> None:
        if any(not place <= row < self._num_sequences for place, row in enumerate(rows)):
            raise ValueError(f"rows can only move to the front: {rows}")
        self._num_sequences = len(rows)

    def join(self, count: int) -> None:
        self._num_sequences += count


def oracle(block_size: int, answers: ListLike[ListLike[int]]) -> Double:
    """Always right: continues the first of `answers` that begins with what is committed, with
    nothing if none does."""
    known = [list(answer) for answer in answers]

    def propose(sequence: Sequence, length: int, _: int) -> DraftBlock:
        committed = len(sequence)
        for answer in known:
            if answer[:committed] == sequence.token_ids:
                return DraftBlock(tuple(answer[committed : committed + length]))
        return DraftBlock()

    return Double(block_size, propose)


def wrong_at(
    index: int, block_size: int, answers: ListLike[ListLike[int]], vocab_size: int
) -> Double:
    """Right, but for the token at `index` (from 0) of every block."""
    return _spoilt(block_size, answers, vocab_size, lambda place, _: place == index)


def always_wrong(block_size: int, answers: ListLike[ListLike[int]], vocab_size: int) -> Double:
    """Never right, as long as one of `answers` is what the target writes."""
    return _spoilt(block_size, answers, vocab_size, lambda _, __: True)


def noisy(
    probability: float,
    seed: int,
    block_size: int,
    answers: ListLike[ListLike[int]],
    vocab_size: int,
) -> Double:
    """Each token is wrong with `probability`, which hangs on (seed, absolute position) alone."""
    return _spoilt(
        block_size, answers, vocab_size, lambda _, position: uniform(seed, position) < probability
    )


def _spoilt(
    block_size: int,
    answers: ListLike[ListLike[int]],
    vocab_size: int,
    is_wrong: Callable[[int, int], bool],
) -> Double:
    """`is_wrong`: (place in the block, absolute position) -> whether that token is replaced by the
    next id."""
    right = oracle(block_size, answers)

    def propose(sequence: Sequence, length: int, number: int) -> DraftBlock:
        tokens = right.propose(sequence, length, number).token_ids
        first = len(sequence)
        return DraftBlock(
            tuple(
                (token + is_wrong(place, first + place)) % vocab_size
                for place, token in enumerate(tokens)
            )
        )

    return Double(block_size, propose)


def scripted(block_size: int, blocks: ListLike[ListLike[int]]) -> Double:
    """Proposes blocks[k] in draft k, whatever the sequence and whatever length is asked for;
    nothing after the last."""

    def propose(_: Sequence, __: int, number: int) -> DraftBlock:
        return DraftBlock(tuple(blocks[number])) if number < len(blocks) else DraftBlock()

    return Double(block_size, propose)


def empty(double: Double, every: int = 2) -> Double:
    """Proposes nothing in every `every`-th draft, from the first on."""
    return _before(double, lambda number: DraftBlock() if number % every == 0 else None)


def failing(double: Double, at_draft: int = 0) -> Double:
    """Raises RuntimeError in draft `at_draft` and all later ones."""

    def fail(number: int) -> None:
        if number >= at_draft:
            raise RuntimeError(f"told to fail in draft {at_draft}")

    return _before(double, fail)


def faulty(double: Double, at_draft: int = 0) -> Double:
    """Reports a fault in place of draft `at_draft`, as a model with non-finite logits would."""
    return _before(
        double, lambda number: DraftBlock(fault="told to be faulty") if number == at_draft else None
    )


def slow(double: Double, seconds: float) -> Double:
    """Sleeps before each sequence's block."""
    return _before(double, lambda _: time.sleep(seconds))


def _before(double: Double, interrupt: Callable[[int], DraftBlock | None]) -> Double:
    """`interrupt` is called with the draft's number; what it returns takes the place of the
    block."""

    def propose(sequence: Sequence, length: int, number: int) -> DraftBlock:
        instead = interrupt(number)
        return double.propose(sequence, length, number) if instead is None else instead

    return Double(double.block_size, propose)
