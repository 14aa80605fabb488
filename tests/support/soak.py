"""Async decoding under every fault, drafter, block size, budget, miss policy and placement, in an
order that any stretch covers evenly.

Scenario `n` is the same in every run, so a soak that was interrupted can go on. Each compares every
answer with the target's own, and looks at what must hold whatever happens: waits are bounded, a
round without a draft has a cause, nothing is left behind."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from d3d.engine.drafter import Target
from d3d.engine.round import Round
from d3d.methods.async_.coordinator import Coordinator
from d3d.methods.async_.drafter import AsyncDrafter
from d3d.methods.async_.placement import available_cores, worker_cores
from d3d.methods.async_.workers import ProcessWorker, ThreadWorker, Worker
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.async_runs import VOCAB, Slow, async_drafter, coordinating, decode
from support.drafters import text, tiny_drafter
from support.mischief import DRAFTERS, Ledger, Mischief, Troublemaker, double
from support.runs import SAMPLING, Run, make, run
from support.tiny import tiny_transformer

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "misses": {},
    "delays": {"delay": 1.0},
    "slow": {"slow": 0.4},
    "raises": {"raises": 0.1},
    "out of memory": {"out_of_memory": 0.1},
    "fault": {"faulty": 0.03},
    "garbage": {"garbage": 0.03},
    "crashes": {"crashes": 0.05},
    "killed": {},
    "restarted": {},
    "does not come back": {"crashes": 0.1},
    "hangs": {"hangs": 0.03},
    "stopped": {},
    "aborted": {"delay": 1.0},
    "interleaved": {"raises": 0.02, "delay": 0.3},
    "threads": {"crashes": 0.01, "delay": 0.3},
    "storm": {
        "delay": 0.3,
        "slow": 0.03,
        "raises": 0.03,
        "out_of_memory": 0.03,
        "faulty": 0.003,
        "garbage": 0.003,
        "crashes": 0.02,
    },
}
"""What befalls the worker, by name, and how likely before each of its passes; what befalls it from
outside is in `Going.after_round`."""

IN_THREADS = [fault for fault in FAULTS if fault != "stopped"]
BLOCK_SIZES, BUDGETS, POLICIES, CHOICES = (
    (4, 8, 16),
    (1, 4, 16, 64),
    ("draft_now", "bonus_only"),
    ("greedy", "everything"),
)
WAYS = ("one by one", "together", "interleaved")
HURRIED = {"delays", "slow", "hangs", "stopped", "aborted", "storm"}
"""Faults whose requests wait a few milliseconds only; the others half a second."""
PROCESS_EVERY = 12
"""One scenario of so many runs in a process of its own, which takes seconds to start."""
SLACK_S = 8.0
"""What a wait may exceed its bound by, on a machine that is busy with other things; ending a
process may take 5 s of it."""
KILLS_OF_PROCESSES = 2


@dataclass(frozen=True)
class Scenario:
    """One combination; `seed` makes its chances."""

    fault: str
    placement: str
    drafter: str
    block_size: int
    outcome_budget: int
    miss_policy: str
    sampling: str
    way: str
    seed: int


def scenario(number: int) -> Scenario:
    """All faults with all block sizes, policies and ways of sampling in a lap; drafters, budgets
    and ways of going take turns."""
    in_process = number % PROCESS_EVERY == PROCESS_EVERY - 1
    place = number // PROCESS_EVERY if in_process else number - number // PROCESS_EVERY
    grid = list(
        itertools.product(BLOCK_SIZES, POLICIES, CHOICES, FAULTS if in_process else IN_THREADS)
    )
    block_size, policy, sampling, fault = grid[place % len(grid)]
    if in_process:  # so few of them that all but the fault is drawn
        draw = random.Random(place)
        block_size, policy, sampling = (
            draw.choice(BLOCK_SIZES),
            draw.choice(POLICIES),
            draw.choice(CHOICES),
        )
    turn = random.Random(number)
    placement = "processes" if in_process else "thread"
    way = {"interleaved": "interleaved", "threads": "threads", "aborted": "interleaved"}.get(
        fault
    ) or turn.choice(WAYS)
    return Scenario(
        fault,
        placement,
        turn.choice(DRAFTERS),
        block_size,
        turn.choice(BUDGETS),
        policy,
        sampling,
        way,
        number,
    )


@dataclass
class Tally:
    """What a soak has seen so far."""

    scenarios: int = 0
    requests: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    """By placement."""
    rounds_under: Counter[str] = field(default_factory=Counter)
    """By the scenario's fault."""
    drafted_rounds: int = 0
    accepted: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Injected, by kind."""
    readiness: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Rounds without a draft, by cause."""
    stale: int = 0
    longest_wait_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    """What should not have been, each with the number of its scenario."""

    @property
    def all_rounds(self) -> int:
        return self.rounds.total()


@cache
def target() -> NativeTarget:
    return NativeTarget(tiny_transformer())


PROMPTS = [text(2 + 4 * number, seed=number) for number in range(4)]


@cache
def plain(sampling: str, max_tokens: int) -> tuple[Run, ...]:
    return tuple(
        run(target(), None, prompt, max_tokens=max_tokens, **SAMPLING[sampling])
        for prompt in PROMPTS
    )


@cache
def serial_differs(drafter: str, block_size: int, sampling: str, max_tokens: int) -> bool:
    """Whether serial mode with the same drafter answers otherwise than plain mode."""
    expected = plain(sampling, max_tokens)
    if drafter == "model":
        drafting: Any = BlockDrafter(tiny_drafter(target().model, block_size=block_size), VOCAB)
    else:
        drafting = double(drafter, block_size, [one.token_ids for one in expected])
    params = SAMPLING[sampling] | {"max_tokens": max_tokens, "draft_length": block_size}
    return any(
        run(target(), drafting, prompt, **params).ids != one.ids
        for prompt, one in zip(PROMPTS, expected, strict=True)
    )


def play(one: Scenario, tally: Tally, *, max_tokens: int = 60) -> None:
    """Run a scenario and add it to the tally."""
    with tempfile.TemporaryDirectory() as directory:
        going = Going(one, tally, Ledger(Path(directory) / "faults"), max_tokens)
        with coordinating(going.never_called, launch=going.launch, restarts=10_000) as coordinator:
            going.play(coordinator)
        tally.faults += going.ledger.counts()
    tally.scenarios += 1
    if serial_differs(one.drafter, one.block_size, one.sampling, max_tokens):
        going.complain("serial ids differ from plain ids")


class Going:
    """A scenario that is being played."""

    def __init__(self, one: Scenario, tally: Tally, ledger: Ledger, max_tokens: int) -> None:
        self.one, self.tally, self.ledger = one, tally, ledger
        self.expected = plain(one.sampling, max_tokens)
        self.params = SAMPLING[one.sampling] | {"max_tokens": max_tokens}
        self.patience_s = 0.004 if one.fault in HURRIED else 0.5
        self.chance = random.Random(one.seed)
        self.lives = itertools.count()
        self.kills = 0

    def complain(self, what: str) -> None:
        self.tally.failures.append(f"scenario {self.one.seed} ({self.one}): {what}")

    def never_called(self) -> Any:
        raise AssertionError("workers are launched by `launch`")

    def launch(self) -> Worker:
        """Every worker has faults of its own."""
        life = next(self.lives)
        in_process = self.one.placement == "processes"
        mischief = Mischief(
            self.ledger,
            1000 * self.one.seed + life,
            in_process=in_process,
            hang_s=3600 if in_process else 1.0,
            **FAULTS[self.one.fault],
        )
        hits = {"none": 1.0, "misses": 0.0}.get(self.one.fault, 0.7)
        answers = tuple(tuple(answer.token_ids) for answer in self.expected)
        fails = life > 0 and self.one.fault == "does not come back"
        made = Troublemaker(
            self.one.drafter, answers, self.one.block_size, hits, mischief, fails_to_load=fails
        )
        return (
            ProcessWorker(made, worker_cores(available_cores()))
            if in_process
            else ThreadWorker(made)
        )

    def play(self, coordinator: Coordinator) -> None:
        one = self.one
        in_process, hangs = one.placement == "processes", one.fault in ("hangs", "stopped")
        hung_s = (2.0 if in_process else 0.1) if hangs else 120.0
        fields = {"outcome_budget": one.outcome_budget, "miss_policy": one.miss_policy}
        drafter = async_drafter(
            coordinator,
            draft_length=one.block_size,
            patience_s=self.patience_s,
            hung_s=hung_s,
            **fields,
        )
        engine: Target = Slow(target(), hung_s / 12) if hangs else target()
        runs = [make(target(), prompt, **self.params) for prompt in PROMPTS]
        ends = {
            "one by one": self.one_by_one,
            "together": self.together,
            "interleaved": self.interleaved,
            "threads": self.threads,
        }
        ends[one.way](coordinator, engine, drafter, runs)
        self.look_at(runs)
        self.tally.stale += coordinator.cache.num_stale
        if (len(coordinator._sequences), len(coordinator.cache)) != (0, 0):
            self.complain(
                f"left behind: {len(coordinator._sequences)} sequences, "
                f"{len(coordinator.cache)} blocks"
            )
        if (engine.num_held, drafter.num_held) != (0, 0):
            self.complain(
                f"left behind: {engine.num_held} requests of the target, "
                f"{drafter.num_held} of the drafter"
            )

    # Ways of going

    def one_by_one(
        self, coordinator: Coordinator, engine: Target, drafter: AsyncDrafter, runs: list[Run]
    ) -> None:
        for one in runs:
            self.restore(coordinator)
            for round_ in decode(engine, drafter, [one]):
                self.after_round(coordinator, round_)

    def together(
        self, coordinator: Coordinator, engine: Target, drafter: AsyncDrafter, runs: list[Run]
    ) -> None:
        for round_ in decode(engine, drafter, runs):
            self.after_round(coordinator, round_)

    def interleaved(
        self, coordinator: Coordinator, engine: Target, drafter: AsyncDrafter, runs: list[Run]
    ) -> None:
        going = [(one, decode(engine, drafter, [one])) for one in runs]
        while going:
            chosen = self.chance.choice(going)
            one, rounds = chosen
            round_ = next(rounds, None)
            if round_ is not None:
                self.after_round(coordinator, round_)
            if round_ is None or self.is_given_up(one):
                rounds.close()
                going.remove(chosen)
                self.restore(coordinator)

    def threads(
        self, coordinator: Coordinator, engine: Target, drafter: AsyncDrafter, runs: list[Run]
    ) -> None:
        """Each with a target of its own, since a target is asked by one thread at a time."""
        everyone = [
            threading.Thread(
                target=self.one_by_one,
                args=(coordinator, NativeTarget(target().model), drafter, [one]),
            )
            for one in runs
        ]
        for thread in everyone:
            thread.start()
        for thread in everyone:
            thread.join()

    # What befalls the worker from outside

    def restore(self, coordinator: Coordinator) -> None:
        """What the next request in the program's own front end does."""
        if self.one.fault != "does not come back":
            coordinator.ensure_worker()

    def is_given_up(self, one: Run) -> bool:
        if self.one.fault != "aborted" or one.request.finished or self.chance.random() > 0.15:
            return False
        self.ledger.note("abort")
        return True

    def after_round(self, coordinator: Coordinator, round_: Round) -> None:
        worker, fault = coordinator.link.worker, self.one.fault
        if worker is None or coordinator.link.state != "up":
            return
        if isinstance(worker, ProcessWorker) and not worker.process.is_alive():
            return  # the link has not noticed yet
        if fault == "killed" or (
            fault == "restarted" and round_.number > 0 and self.chance.random() < 0.1
        ):
            if isinstance(worker, ProcessWorker) and self.kills >= KILLS_OF_PROCESSES:
                return
            self.kills += 1
            self.ledger.note("kill")
            _kill(worker)
            if fault == "killed":
                coordinator.ensure_worker()
        elif (
            fault == "stopped"
            and isinstance(worker, ProcessWorker)
            and self.kills < 1
            and self.chance.random() < 0.2
        ):
            self.kills += 1
            self.ledger.note("stop")
            psutil.Process(worker.process.pid).suspend()

    # What must hold

    def look_at(self, runs: list[Run]) -> None:
        tally = self.tally
        for expected, one in zip(self.expected, runs, strict=True):
            tally.requests += 1
            is_whole = one.finish_reason not in (None, "cancelled")
            if one.ids != (expected.ids if is_whole else expected.ids[: len(one.ids)]):
                self.complain(f"ids differ: {one.ids} and not {expected.ids}")
            for round_ in one.rounds:
                tally.rounds[self.one.placement] += 1
                tally.rounds_under[self.one.fault] += 1
                tally.drafted_rounds += round_.draft_length > 0
                tally.accepted += round_.num_accepted
                tally.longest_wait_s = max(tally.longest_wait_s, round_.t_draft)
                if round_.t_draft > 2 * self.patience_s + SLACK_S:
                    self.complain(f"a round waited {round_.t_draft:.2f} s")
                if round_.preparation is not None:
                    tally.readiness[round_.preparation.readiness] += 1
                    if round_.preparation.cause is not None:
                        tally.fallbacks[round_.preparation.cause] += 1
                    elif not round_.draft_length:
                        self.complain("a round without a draft has no cause")
        seen = {
            round_.preparation.readiness
            for one in runs
            for round_ in one.rounds[1:]
            if round_.preparation is not None
        }
        if self.one.fault == "misses" and self.one.drafter != "model" and "hit" in seen:
            self.complain("a hit where nothing was foreseen")


def _kill(worker: Worker) -> None:
    if isinstance(worker, ProcessWorker):
        # signal 9; nothing if it has ended, when its number may be another's
        worker.process.kill()
    else:
        worker.kill()


def soak(
    rounds: int, placements: list[str], tally: Tally, first: int, after_each: Callable[[int], None]
) -> None:
    """Scenarios with these placements, from number `first` on, until the tally has so many rounds.
    `after_each` is told the number of the next."""
    for number in itertools.count(first):
        if tally.all_rounds >= rounds:
            return
        one = scenario(number)
        if one.placement in placements:
            play(one, tally)
            after_each(number + 1)


def first_with(fault: str) -> Scenario:
    """The first scenario that has this fault, in a thread."""
    return next(
        one
        for one in map(scenario, itertools.count())
        if one.fault == fault and one.placement == "thread"
    )
