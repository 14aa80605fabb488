"""Auto mode's arithmetic on a simulated machine: costs and gains of rounds are given, and no clock
runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median

import pytest

from d3d.methods.auto.chooser import (
    FEWEST_ROUNDS,
    FIRST_CHECK,
    PLAIN,
    PLAIN_ROUNDS,
    TRIAL_ROUNDS,
    Chooser,
    ModeTimes,
    RoundCost,
)

HOPELESS_LIMIT = 1.1
DRAFT_LENGTH = 5


@cache
def share_kept(mean: float) -> float:
    """Of drafted tokens, each kept alike, so that a round brings `mean`."""
    shares = [number / 1000 for number in range(1001)]
    return min(
        shares, key=lambda share: abs(sum(share**place for place in range(DRAFT_LENGTH + 1)) - mean)
    )


@dataclass
class Machine:
    """Rounds by mode: seconds, and tokens that a round brings on average. A plain round takes one
    second."""

    modes: dict[str, tuple[float, float]]
    seed: int = 0
    jitter: float = 0.0
    """Share by which a round's time may be longer; one in twenty takes three times as long where
    there is any."""
    entry_s: float = 0.0
    """What the first round of each turn takes besides."""
    taken: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def answer(
        self, chooser: Chooser, length: int, missing: Callable[[str], int] = lambda _: 0
    ) -> float:
        """Seconds that an answer of so many tokens takes, the first one not counted."""
        before, self.tokens = self.seconds, 1.0
        while self.tokens < length:
            mode = chooser.choose(
                int(length - self.tokens), {name: missing(name) for name in chooser.candidates}
            )
            one = self._round(mode)
            chooser.observe(*one)
            self.taken.append(mode)
            self.seconds += one.seconds
            self.tokens += one.tokens
        return self.seconds - before

    def _round(self, mode: str) -> RoundCost:
        seconds, mean = (1.0, 1.0) if mode == PLAIN else self.modes[mode]
        if self.jitter:
            seconds *= (
                1
                + self.jitter * self._random.random()
                + (2.0 if self._random.random() < 0.05 else 0.0)
            )
        if mode != PLAIN and (not self.taken or self.taken[-1] != mode):
            seconds += self.entry_s
        kept, share = 0, share_kept(mean)
        while kept < DRAFT_LENGTH and self._random.random() < share:
            kept += 1
        return RoundCost(seconds, 1.0 + kept)

    def share(self, mode: str, since: int = 0) -> float:
        return self.taken[since:].count(mode) / max(1, len(self.taken[since:]))


def chooser(*candidates: str, times: ModeTimes | None = None) -> Chooser:
    return Chooser(candidates, times or ModeTimes())


@pytest.mark.parametrize("cost", [1.3, 2.2, 3.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_hopeless_drafter_costs_a_tenth_at_most(cost: float, seed: int) -> None:
    machine = Machine({"serial": (cost, 1.0), "fused": (1.9, 1.0)}, seed=seed)
    times = ModeTimes()
    for number in range(6):  # the first answer, and later ones, which know more
        seconds = machine.answer(chooser("serial", "fused", times=times), 128)
        assert seconds <= HOPELESS_LIMIT * 127, number
    assert machine.share(PLAIN) > 0.9


@pytest.mark.parametrize("seed", range(8))
def test_nor_does_it_on_a_machine_whose_rounds_vary(seed: int) -> None:
    noisy = Machine({"serial": (2.2, 1.0)}, seed=seed, jitter=0.3)
    plain = Machine({}, seed=seed, jitter=0.3)
    times = ModeTimes()
    ratios = sorted(
        noisy.answer(chooser("serial", times=times), 256) / plain.answer(chooser(), 256)
        for _ in range(5)
    )
    assert ratios[2] <= HOPELESS_LIMIT


def test_a_longer_answer_costs_no_more_than_its_share() -> None:
    machine = Machine({"serial": (2.2, 1.0)})
    assert machine.answer(chooser("serial"), 2000) <= 1.04 * 1999


@pytest.mark.parametrize(
    ("modes", "best"),
    [
        ({"serial": (2.2, 3.9), "fused": (2.0, 2.4)}, "serial"),
        ({"serial": (2.2, 2.6), "fused": (1.5, 2.8)}, "fused"),
        ({"serial": (2.2, 3.5), "fused": (2.0, 2.4), "async": (1.25, 3.5)}, "async"),
        ({"serial": (2.2, 2.0), "fused": (1.9, 1.5)}, PLAIN),
    ],
    ids=["serial", "fused", "async", "plain"],
)
def test_the_fastest_mode_is_found_and_its_time_nearly_reached(
    modes: dict[str, tuple[float, float]], best: str
) -> None:
    speeds = []
    for seed in range(8):
        machine, times = Machine(modes, seed=seed, jitter=0.1), ModeTimes()
        for _ in range(3):  # the first one pays for finding out
            seconds = machine.answer(chooser(*modes, times=times), 256)
        speeds.append(seconds / 255)
    seconds, tokens = (1.0, 1.0) if best == PLAIN else modes[best]
    expected = 1.15 * seconds / tokens  # the jitter's mean
    assert median(speeds) < 1.15 * expected


def test_the_first_rounds_are_plain_then_each_mode_is_tried_in_turn() -> None:
    machine = Machine({"serial": (1.0, 6.0), "fused": (1.0, 6.0)})
    machine.answer(chooser("serial", "fused"), 250)
    begin = [PLAIN] * PLAIN_ROUNDS + ["serial"] * (1 + FEWEST_ROUNDS)
    assert machine.taken[: len(begin) + 1] == [*begin, "fused"], (
        "two rounds say enough about one that is so much faster"
    )


def test_a_trial_ends_in_any_case() -> None:
    machine = Machine({"serial": (1.0, 1.0)})
    machine.answer(chooser("serial"), 100)
    tried = (
        machine.taken[PLAIN_ROUNDS:].index(PLAIN)
        if PLAIN in machine.taken[PLAIN_ROUNDS:]
        else len(machine.taken)
    )
    assert tried <= 1 + TRIAL_ROUNDS


def test_a_mode_that_can_only_be_slower_is_given_up_after_two_counted_rounds() -> None:
    machine = Machine({"serial": (2.2, 1.0)})
    machine.answer(chooser("serial"), 24)
    assert machine.taken[:8] == [PLAIN] * PLAIN_ROUNDS + ["serial"] * 3 + [PLAIN]
    assert machine.taken.count("serial") == 3


def test_another_answer_begins_with_what_the_last_one_found() -> None:
    times = ModeTimes()
    machine = Machine({"serial": (2.2, 4.0), "fused": (2.0, 2.0)})
    machine.answer(chooser("serial", "fused", times=times), 200)
    number = len(machine.taken)
    machine.answer(chooser("serial", "fused", times=times), 60)
    assert set(machine.taken[number : number + 10]) == {"serial"}


def test_a_text_that_becomes_hard_is_noticed() -> None:
    machine = Machine({"serial": (2.2, 4.5)})
    one = chooser("serial")
    machine.answer(one, 300)
    assert one.report.mode == "serial"
    number = len(machine.taken)
    machine.modes["serial"] = (2.2, 1.0)
    machine.answer(one, 300)
    assert machine.share(PLAIN, number) > 0.8
    assert one.report.mode == PLAIN


def test_a_text_that_becomes_easy_is_noticed() -> None:
    machine = Machine({"serial": (2.2, 1.0)})
    one = chooser("serial")
    machine.answer(one, 200)
    assert one.report.mode == PLAIN
    number = len(machine.taken)
    machine.modes["serial"] = (2.2, 5.0)
    machine.answer(one, 500)
    assert machine.share("serial", number) > 0.3
    assert one.report.mode == "serial"


def test_other_modes_are_looked_at_again_more_and_more_seldom() -> None:
    machine = Machine({"serial": (1.5, 4.0)})
    machine.answer(chooser("serial"), 3000)
    looks = [
        n
        for n, mode in enumerate(machine.taken)
        if mode == PLAIN and n > PLAIN_ROUNDS and machine.taken[n - 1] != PLAIN
    ]
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert len(looks) >= 4
    assert looks[0] >= FIRST_CHECK
    assert all(later >= earlier for earlier, later in pairwise(gaps)), gaps
    assert machine.share(PLAIN) < 0.03


def test_a_hiccup_does_not_decide() -> None:
    times = ModeTimes()
    for seconds in (1.0, 40.0, 1.0):
        times.add(PLAIN, RoundCost(seconds, 1))
    assert times.tpot_s(PLAIN) == pytest.approx((1 + 2 + 1) / 3)
    for seconds in (2.0, 2.0, 60.0, 2.0):
        times.add("serial", RoundCost(seconds, 4))
    assert times.tpot_s("serial") == pytest.approx((2 + 2 + 4 + 2) / 16)


def test_drafts_that_are_never_kept_do_not_lead_however_slow_plain_rounds_seemed() -> None:
    times = ModeTimes()
    for _ in range(8):
        times.add(PLAIN, RoundCost(3.0, 1))
        times.add("serial", RoundCost(2.0, 1))
    assert chooser("serial", times=times).choose(100, {}) == PLAIN
    times.add("serial", RoundCost(2.0, 5))
    times.add("serial", RoundCost(2.0, 5))
    assert chooser("serial", times=times).choose(100, {}) == "serial"


def test_a_drafter_that_would_have_to_read_a_long_text_first_is_not_tried_for_nothing() -> None:
    def missing(_: str) -> int:
        return 1000

    one = chooser("serial")
    one.prefill = RoundCost(51.0, 1000)  # fifty plain rounds to catch up
    machine = Machine({"serial": (2.2, 4.0)})
    assert machine.answer(one, 128, missing) == pytest.approx(127.0)
    assert set(machine.taken) == {PLAIN}
    assert "serial could not be tried" in one.report.why
    cheap = chooser("serial")
    cheap.prefill = RoundCost(2.0, 1000)
    machine.answer(cheap, 128, missing)
    assert "serial" in machine.taken


def test_one_that_is_known_to_be_good_is_worth_the_reading() -> None:
    def first(length: int, row_s: float) -> str:
        times = ModeTimes()
        for _ in range(8):
            times.add(PLAIN, RoundCost(1.0, 1))
            times.add("serial", RoundCost(2.0, 4))
        one = chooser("serial", times=times)
        one.prefill = RoundCost(1 + 1000 * row_s, 1000)
        return one.choose(length, {"serial": 1000})

    assert first(128, 0.01) == "serial", "ten rounds against half of the next 128"
    assert first(128, 0.2) == PLAIN
    assert first(15, 0.01) == PLAIN


def test_a_mode_that_has_failed_is_never_chosen_again_and_is_named() -> None:
    one = chooser("serial", "fused")
    machine = Machine({"serial": (1.0, 6.0), "fused": (1.5, 6.0)})
    machine.answer(one, 100)
    assert one.report.mode == "serial"
    one.choose(100, {})
    one.drop("serial", "its logits are not finite")
    one.observe(0.001, 50)  # the round in which it failed counts for nothing
    number = len(machine.taken)
    machine.answer(one, 100)
    assert "serial" not in machine.taken[number:]
    report = one.report
    assert report.left_out == {"serial": "its logits are not finite"}
    assert report.faults == ("serial: its logits are not finite",)
    assert report.mode == "fused"
    assert report.tpot_s.keys() == {PLAIN, "fused"}


def test_the_reason_names_every_time() -> None:
    one = Chooser(("serial", "fused"), ModeTimes(), {"async": "two cores share one memory bus"})
    machine = Machine({"serial": (1.0, 6.0), "fused": (2.9, 1.0)})
    machine.answer(one, 100)
    report = one.report
    assert report.mode == "serial"
    assert report.why.startswith("serial took ")
    assert "plain 1000.0" in report.why
    assert "fused 2900.0" in report.why
    assert report.why.endswith("async left out: two cores share one memory bus")
    assert report.rounds == {mode: machine.taken.count(mode) for mode in (PLAIN, "serial", "fused")}


def test_without_a_drafter_everything_is_plain() -> None:
    one = Chooser((), ModeTimes(), {"serial": "there is no drafter"})
    assert Machine({}).answer(one, 50) == pytest.approx(49.0)
    assert one.report.mode == PLAIN
    assert one.report.rounds == {PLAIN: 49}


def test_a_round_that_was_not_chosen_here_counts_for_nothing() -> None:
    one = chooser("serial")
    one.observe(5.0, 1.0)
    assert one.report.rounds == {}


def test_a_drafter_with_a_cache_of_its_own_is_tried_behind_a_prompt_of_usual_length() -> None:
    def ratio(prompt: int, mean: float) -> float:
        machine = Machine({"serial": (2.2, mean)}, entry_s=0.04 * prompt)
        one = chooser("serial")
        one.prefill = RoundCost(1 + 0.04 * prompt, prompt)
        seconds = machine.answer(one, 128, lambda _: 0 if "serial" in machine.taken else prompt)
        tried.append("serial" in machine.taken)
        return (one.prefill.seconds + seconds) / (one.prefill.seconds + 127)

    tried: list[bool] = []
    assert ratio(100, 1.0) <= HOPELESS_LIMIT
    assert ratio(100, 5.0) < 0.8
    assert tried == [True, True]
    assert ratio(1000, 1.0) <= HOPELESS_LIMIT
