"""Which mode the next round goes through, by what rounds have shown so far: arithmetic only, no
models and no clock.

Two rules. The mode of least time per token leads, and the others are looked at again, more and more
seldom. And a debt is kept: what drafted rounds have cost beyond plain ones that bring as many
tokens. It may not pass a few plain rounds and a small share of the time, so decoding is never much
slower than plain, whatever the drafter does."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

PLAIN = "plain"

PLAIN_ROUNDS = 4
"""Before anything is compared with plain rounds, there are so many."""

TRIAL_ROUNDS, CHECK_ROUNDS, FEWEST_ROUNDS = 24, 12, 2
"""Most counted rounds of a mode that was never tried, and of one that is looked at again; and the
fewest. In between, a trial ends as soon as more of them would hardly change which mode is
faster."""

LUCK = 1.5
"""A mode whose rounds had this much bad luck, in standard errors of their tokens, may still be the
fastest, and its trial goes on."""

NOT_FOR_LESS = 0.97
"""Another mode takes the lead where it takes less than this share of the leader's time per
token."""

FIRST_CHECK, LAST_INTERVAL = 24, 256
"""Rounds until the other modes are looked at again; twice as many each time that this changes
nothing, up to the second number."""

ALLOWED_ROUNDS, ALLOWED_SHARE = 4.0, 0.03
"""The debt may come to so many plain rounds, and to this share of the time that rounds have
taken."""

FIRST_SHARE = 0.08
"""Of the time that the prompt and the next LOOK_AHEAD tokens take, if so many may come: what the
first look at a mode may cost."""

CREDIT_ROUNDS = 16.0
"""What drafting has gained counts against the debt up to so many plain rounds: a drafter that was
good may not be bad for long."""

LOOK_AHEAD = 128
"""Tokens over which a mode must earn what it costs to enter it, if so many may still come."""

WINDOW, KEPT = 32, 8
"""Rounds of a mode that are remembered; and how many of them count where the text may have become
easier or harder."""


class RoundCost(NamedTuple):
    """What a round took, in seconds, and how many tokens it committed for each sequence."""

    seconds: float
    tokens: float


class _Span(NamedTuple):
    """Of a mode's remembered rounds: means, the standard error of their tokens, and the most
    seconds that a round counts for, since hiccups of the machine meet every mode alike."""

    seconds: float
    tokens: float
    error: float
    most: float


class ModeTimes:
    """What rounds of each mode have shown, over all requests of a model."""

    def __init__(self) -> None:
        self._rounds: dict[str, deque[RoundCost]] = {}
        self._spans: dict[str, _Span] = {}
        """Of modes whose rounds have not changed since."""

    def add(self, mode: str, one: RoundCost) -> None:
        self._rounds.setdefault(mode, deque(maxlen=WINDOW)).append(one)
        self._spans.pop(mode, None)

    def count(self, mode: str) -> int:
        return len(self._rounds.get(mode, ()))

    def shorten(self, mode: str, kept: int) -> None:
        """Forget all but the last rounds."""
        rounds = self._rounds.get(mode, deque())
        while len(rounds) > kept:
            rounds.popleft()
            self._spans.pop(mode, None)

    def new_text(self) -> None:
        """A request begins: how many tokens a round brings may have changed."""
        for mode in self._rounds:
            self.shorten(mode, KEPT)

    def tpot_s(self, mode: str, luck: float = 0.0) -> float | None:
        """Seconds per token; None where no round is known. One hiccup of the machine counts for two
        rounds at most, and no round is taken to be shorter than a plain one, whose pass it holds:
        where it was, other work has slowed plain rounds down.

        luck: what it would be if the tokens of these rounds had been so many standard errors fewer
        than they usually are."""
        span, plain = self._span(mode), self._span(PLAIN)
        if span is None:
            return None
        if plain is None or mode == PLAIN:
            return span.seconds / span.tokens
        return max(span.seconds, plain.seconds) / max(1.0, span.tokens + luck * span.error)

    def excess_s(self, mode: str, one: RoundCost | None = None) -> float:
        """What a round of this mode costs beyond plain ones that bring as many tokens: this round,
        or the mean of those remembered. 0 where nothing is known to compare it with."""
        plain, span = self.tpot_s(PLAIN), self._span(mode)
        if one is None:
            one = RoundCost(0.0, 0.0) if span is None else RoundCost(span.seconds, span.tokens)
        seconds = one.seconds if span is None else min(one.seconds, span.most)
        return 0.0 if plain is None else max(seconds, plain) - one.tokens * plain

    def _span(self, mode: str) -> _Span | None:
        rounds = self._rounds.get(mode)
        if not rounds:
            return None
        if mode not in self._spans:
            count, most = len(rounds), 2 * median(one.seconds for one in rounds)
            tokens = sum(one.tokens for one in rounds) / count
            # one more square, since two equal rounds are no certainty
            error = (sum((one.tokens - tokens) ** 2 for one in rounds) + 1) ** 0.5 / count
            self._spans[mode] = _Span(
                sum(min(one.seconds, most) for one in rounds) / count, tokens, error, most
            )
        return self._spans[mode]


@dataclass(frozen=True)
class AutoReport:
    """What auto mode has come to."""

    mode: str
    """The one that led in the end."""
    why: str
    rounds: dict[str, int]
    """Rounds of each mode that was taken."""
    tpot_s: dict[str, float]
    """Seconds per token of each mode, by the rounds that are remembered."""
    left_out: dict[str, str]
    """Modes that were not to be had, or not any more, and why."""
    faults: tuple[str, ...] = ()
    """Of those: what went wrong on the way."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; `faults` are among `left_out`."""
        return {name: value for name, value in vars(self).items() if name != "faults"}


@dataclass
class _Stay:
    """Rounds of one mode in a row."""

    mode: str
    num_rounds: int = 0
    num_counted: int = 0

    @property
    def settles(self) -> bool:
        """Whether its next round is not one like those that follow: it opens a session, catches up,
        or has no draft yet."""
        return self.num_rounds == 0 and self.mode != PLAIN


@dataclass
class Chooser:
    """Chooses for one generation; `times` may be another's, too."""

    candidates: tuple[str, ...]
    """Modes besides plain, in the order in which they are tried."""
    times: ModeTimes = field(default_factory=ModeTimes)
    left_out: dict[str, str] = field(default_factory=dict)
    prefill: RoundCost = field(default_factory=lambda: RoundCost(0.0, 1.0))
    """Seconds that the target took for the prompts, and their tokens: what a drafter's own cache
    costs to fill is told by them."""

    def __post_init__(self) -> None:
        self.times.new_text()
        self._stay = _Stay(PLAIN)
        self._leader = PLAIN
        self._trial: str | None = None
        self._trial_rounds = 0
        self._seen_at = dict.fromkeys((PLAIN, *self.candidates), 0)
        self._num_rounds = 0
        self._next_check, self._interval = FIRST_CHECK, FIRST_CHECK
        self._debt_s = 0.0
        self._elapsed_s = self.prefill.seconds
        self._is_counting = False
        self._taken: dict[str, int] = {}
        self._faults: list[str] = []

    def choose(self, remaining: int, missing: Mapping[str, int]) -> str:
        """The mode of the next round. remaining: most tokens that may still come; missing: tokens
        that a mode's drafter would have to catch up with first."""
        mode = self._wanted(remaining, missing)
        if mode != self._stay.mode:
            self._stay = _Stay(mode)
        self._is_counting = True
        return mode

    def observe(self, seconds: float, tokens: float) -> None:
        """What the round came to that has been chosen last; a round that was not chosen here is
        left alone."""
        if not self._is_counting:
            return
        self._is_counting = False
        stay = self._stay
        settles, one = stay.settles, RoundCost(seconds, tokens)
        if not settles:
            self.times.add(stay.mode, one)
            stay.num_counted += 1
        stay.num_rounds += 1
        self._taken[stay.mode] = self._taken.get(stay.mode, 0) + 1
        self._num_rounds += 1
        self._seen_at[stay.mode] = self._num_rounds
        self._elapsed_s += seconds
        if stay.mode != PLAIN:
            plain = self.times.tpot_s(PLAIN) or 0.0
            excess = seconds - tokens * plain if settles else self.times.excess_s(stay.mode, one)
            self._debt_s = max(self._debt_s + excess, -CREDIT_ROUNDS * plain)

    def drop(self, mode: str, fault: str) -> None:
        """This mode is out of the question from now on; the round under way counts for none."""
        self.candidates = tuple(name for name in self.candidates if name != mode)
        self.left_out[mode] = fault
        self._faults.append(f"{mode}: {fault}")
        self._is_counting = False
        if self._leader == mode:
            self._leader = PLAIN
        if self._trial == mode:
            self._trial = None

    @property
    def report(self) -> AutoReport:
        tpot = {
            mode: seconds
            for mode in (PLAIN, *self.candidates)
            if (seconds := self.times.tpot_s(mode)) is not None
        }
        return AutoReport(
            self._leader,
            self._why(tpot),
            dict(self._taken),
            tpot,
            dict(self.left_out),
            tuple(self._faults),
        )

    # What is wanted

    def _wanted(self, remaining: int, missing: Mapping[str, int]) -> str:
        if not self.candidates or self.times.count(PLAIN) < PLAIN_ROUNDS:
            return PLAIN
        if self._trial is not None:
            if not self._trial_is_over():
                return self._trial
            self._trial = None
            self._next_check = self._num_rounds + self._interval
            self._find_leader(remaining, missing)
        if (mode := self._due(remaining, missing)) is not None:
            return self._begin_trial(mode)
        self._find_leader(remaining, missing)
        if self._debt_s <= self._limit_s:
            return self._leader
        self.times.shorten(self._leader, KEPT)  # it leads by what is not true any more
        return PLAIN

    def _due(self, remaining: int, missing: Mapping[str, int]) -> str | None:
        """A mode that was never tried, or the one that has not been looked at for the longest time
        where it is time to look."""
        for mode in self.candidates:
            if not self.times.count(mode) and self._is_affordable(mode, remaining, missing):
                return mode
        if self._num_rounds < self._next_check:
            return None
        others = [
            mode
            for mode in (PLAIN, *self.candidates)
            if mode != self._leader and self.times.count(mode)
        ]
        return min(
            (mode for mode in others if self._is_affordable(mode, remaining, missing)),
            key=lambda mode: self._seen_at[mode],
            default=None,
        )

    def _begin_trial(self, mode: str) -> str:
        known = self.times.count(mode)
        self._trial, self._trial_rounds = mode, CHECK_ROUNDS if known else TRIAL_ROUNDS
        if mode == PLAIN:
            self._trial_rounds = FEWEST_ROUNDS
        self.times.shorten(mode, KEPT // 2)
        if known:
            self._interval = min(2 * self._interval, LAST_INTERVAL)
        return mode

    def _trial_is_over(self) -> bool:
        stay = self._stay
        if stay.num_counted < FEWEST_ROUNDS:
            return False
        if stay.num_counted >= self._trial_rounds or self._debt_s > self._limit_s:
            return True
        others = {PLAIN, self._leader} - {stay.mode}
        best = min(
            (seconds for mode in others if (seconds := self.times.tpot_s(mode)) is not None),
            default=0.0,
        )
        lucky, unlucky = (
            self.times.tpot_s(stay.mode, luck=LUCK),
            self.times.tpot_s(stay.mode, luck=-1.0),
        )
        return lucky is None or unlucky is None or lucky >= best or unlucky < best

    def _find_leader(self, remaining: int, missing: Mapping[str, int]) -> None:
        ahead = min(remaining, LOOK_AHEAD)
        costs = {}
        for mode in (PLAIN, *self.candidates):
            tpot = self.times.tpot_s(mode)
            if tpot is not None:
                costs[mode] = tpot * ahead + (
                    0.0 if mode == self._stay.mode else self._entry_s(mode, missing)
                )
        best = min(costs, key=costs.__getitem__)
        if best != self._leader and costs[best] < NOT_FOR_LESS * costs.get(
            self._leader, float("inf")
        ):
            self._leader = best
            self._interval = FIRST_CHECK
            self._next_check = self._num_rounds + FIRST_CHECK

    @property
    def _limit_s(self) -> float:
        return ALLOWED_ROUNDS * (self.times.tpot_s(PLAIN) or 0.0) + ALLOWED_SHARE * self._elapsed_s

    def _is_affordable(self, mode: str, remaining: int, missing: Mapping[str, int]) -> bool:
        """Whether a look at it can't take the debt over its limit, as far as that is known. A mode
        that was never tried is taken to cost a plain round too many each time; it may have more."""
        if mode == PLAIN:
            return True
        plain, limit = self.times.tpot_s(PLAIN) or 0.0, self._limit_s
        excess = max(0.0, self.times.excess_s(mode))
        if not self.times.count(mode):
            excess = plain
            limit = max(
                limit, FIRST_SHARE * (self.prefill.seconds + plain * min(remaining, LOOK_AHEAD))
            )
        return self._debt_s + (1 + FEWEST_ROUNDS) * excess + self._entry_s(mode, missing) <= limit

    def _entry_s(self, mode: str, missing: Mapping[str, int]) -> float:
        # what a pass takes for its rows alone: any round has its pass
        rows_s = max(0.0, self.prefill.seconds - (self.times.tpot_s(PLAIN) or 0.0))
        return rows_s / max(1.0, self.prefill.tokens) * missing.get(mode, 0)

    def _why(self, tpot: Mapping[str, float]) -> str:
        parts = []
        if len(tpot) > 1:
            first, *others = sorted(tpot, key=lambda mode: (mode != self._leader, tpot[mode]))
            rest = ", ".join(f"{mode} {1000 * tpot[mode]:.1f}" for mode in others)
            parts.append(f"{first} took {1000 * tpot[first]:.1f} ms a token, {rest}")
            if self._leader == PLAIN:
                parts.append("drafting does not pay here")
        if untried := [mode for mode in self.candidates if mode not in tpot]:
            parts.append(
                f"{' and '.join(untried)} could not be tried: the answer was too short for it, or "
                "its text too long"
            )
        parts += [f"{mode} left out: {reason}" for mode, reason in self.left_out.items()]
        return "; ".join(parts)
