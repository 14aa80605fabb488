"""Faults for draft workers, in a thread or in a process of their own, and a record of those that
really happened."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from d3d.engine.drafter import Draft
from d3d.engine.noise import uniform
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.async_.preparer import Preparer, PreparingSession
from support.async_runs import VOCAB
from support.doubles import (
    Double,
    PreparingDouble,
    always_wrong,
    empty,
    foresees,
    misjudges,
    noisy,
    oracle,
    scripted,
    sometimes,
    wrong_at,
)
from support.drafters import tiny_drafter
from support.tiny import tiny_transformer

DRAFTERS = ("oracle", "noisy", "always wrong", "wrong at 1", "empty", "scripted", "model")


@dataclass(frozen=True)
class Ledger:
    """A file with a line for every fault: it outlives whoever wrote them."""

    path: Path

    def note(self, kind: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{kind}\n")

    def counts(self) -> Counter[str]:
        return Counter(self.path.read_text().splitlines()) if self.path.exists() else Counter()


@dataclass(frozen=True)
class Mischief:
    """What happens before a drafter's pass: each fault with its probability, which hangs on (seed,
    number of the pass) alone."""

    ledger: Ledger
    seed: int = 0
    delay: float = 0.0
    """Sleeps up to `delay_s`."""
    slow: float = 0.0
    """Sleeps `delay_s` and longer."""
    delay_s: float = 0.005
    raises: float = 0.0
    out_of_memory: float = 0.0
    faulty: float = 0.0
    garbage: float = 0.0
    """Ids that no model knows, far too long a block, successors that nobody has asked for."""
    crashes: float = 0.0
    hangs: float = 0.0
    hang_s: float = 3600.0
    in_process: bool = False

    def strike(self, number: int) -> str | None:
        """Sleep, raise or end the process; or say what is to come in place of an answer."""
        if self._falls("delay", self.delay, number):
            time.sleep(self.delay_s * uniform(self.seed, 100 * number))
        if self._falls("slow", self.slow, number):
            time.sleep(self.delay_s * (1 + 3 * uniform(self.seed, 100 * number)))
        if self._falls("hang", self.hangs, number):
            time.sleep(self.hang_s)
        if self._falls("crash", self.crashes, number):
            if self.in_process:
                os._exit(3)
            raise SystemExit  # ends a thread without a word
        if self._falls("out of memory", self.out_of_memory, number):
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte
        if self._falls("raise", self.raises, number):
            raise RuntimeError("told to fail")
        if self._falls("fault", self.faulty, number):
            return "fault"
        return "garbage" if self._falls("garbage", self.garbage, number) else None

    def _falls(self, kind: str, probability: float, number: int) -> bool:
        place = 100 * number + 1 + sum(map(ord, kind)) % 97
        if not probability or uniform(self.seed, place) >= probability:
            return False
        self.ledger.note(kind)
        return True


@dataclass
class Troubled(Preparer):
    """A `Preparer` that mischief befalls."""

    preparer: Preparer
    mischief: Mischief
    number: int = 0
    """Passes so far, of all sequences."""

    def open(self, outcome_budget: int) -> TroubledSession:
        return TroubledSession(self, self.preparer.open(outcome_budget))

    def strike(self) -> str | None:
        self.number += 1
        return self.mischief.strike(self.number)


@dataclass
class TroubledSession(PreparingSession):
    troubled: Troubled
    session: PreparingSession

    def draft(self, text: list[int], draft_length: int) -> Draft:
        instead = self.troubled.strike()
        return (
            self.session.draft(text, draft_length)
            if instead is None
            else _spoilt(instead, draft_length)
        )

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        return self.session.likely_outcomes(text, draft, budget)

    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> dict[Outcome, Draft]:
        instead = self.troubled.strike()
        if instead is None:
            return self.session.prepare(text, draft, outcomes, draft_length)
        also = [Outcome(place, 10**9) for place in range(500)] if instead == "garbage" else []
        return {outcome: _spoilt(instead, draft_length) for outcome in [*also, *outcomes]}


def _spoilt(how: str, draft_length: int) -> Draft:
    return (
        Draft(fault="told to be faulty")
        if how == "fault"
        else Draft((3, 10**9, -1) * 50 * draft_length)
    )


@dataclass(frozen=True)
class Troublemaker:
    """Makes a worker's drafter, in the worker; it can be sent to a process."""

    drafter: str
    """One of DRAFTERS."""
    answers: tuple[tuple[int, ...], ...]
    block_size: int
    hits: float
    """With what probability a double foresees the verdict."""
    mischief: Mischief
    fails_to_load: bool = False

    def __call__(self) -> Preparer:
        if self.fails_to_load:
            self.mischief.ledger.note("fails to load")
            raise ValueError("told not to load")
        if self.drafter == "model":
            return Troubled(
                PackedDrafter(tiny_drafter(tiny_transformer(), block_size=self.block_size), VOCAB),
                self.mischief,
            )
        knows = foresees(self.answers)
        expect = sometimes(self.hits, self.mischief.seed, knows, misjudges(knows, VOCAB))
        return Troubled(
            PreparingDouble(double(self.drafter, self.block_size, self.answers), expect),
            self.mischief,
        )


def double(name: str, block_size: int, answers: Sequence[Sequence[int]]) -> Double:
    """A scripted drafter by its name."""
    right = oracle(block_size, answers)
    makes: dict[str, Callable[[], Double]] = {
        "oracle": lambda: right,
        "noisy": lambda: noisy(0.3, 1, block_size, answers, VOCAB),
        "always wrong": lambda: always_wrong(block_size, answers, VOCAB),
        "wrong at 1": lambda: wrong_at(1, block_size, answers, VOCAB),
        "empty": lambda: empty(noisy(0.2, 2, block_size, answers, VOCAB)),
        "scripted": lambda: scripted(
            block_size,
            [[(7 * place + n) % VOCAB for n in range(block_size)] for place in range(40)],
        ),
    }
    return makes[name]()
