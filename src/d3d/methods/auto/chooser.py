"""Chooses the mode of the next round from the times of earlier rounds: arithmetic only, no models
and no clock.

Two rules. The mode of least time per token leads, and the others are tried again at growing
intervals. And a debt is kept: the time that drafted rounds have taken beyond plain rounds of as
many tokens. It is limited to a few plain rounds and a small share of the total time, so decoding is
never much slower than plain, whatever the drafter does."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

PLAIN = "plain"

# The limits below count rounds, or shares of time, that are measured as decoding goes on, so they
# mean the same on every machine.

PLAIN_ROUNDS = 4
"""Plain rounds before a mode is tried."""

TRIAL_ROUNDS, CHECK_ROUNDS, FEWEST_ROUNDS = 24, 12, 2
"""Most counted rounds of a first trial and of a later one, and the fewest of any. In between, a
trial ends once more rounds would hardly change which mode is faster."""

LUCK = 1.5
"""A trial goes on if the mode would be the fastest with this many standard errors more tokens."""

NOT_FOR_LESS = 0.97
"""Another mode takes the lead if it needs less than this share of the leader's time per token."""

FIRST_CHECK, LAST_INTERVAL = 24, 256
"""Rounds until the other modes are tried again, first and at most; the interval doubles each time
that the leader stays."""

ALLOWED_ROUNDS, ALLOWED_SHARE = 4.0, 0.03
"""Limit of the debt: so many plain rounds, plus this share of the elapsed time."""

FIRST_SHARE = 0.08
"""Limit of the cost of a mode's first trial, as a share of the time of the prompt and the next
LOOK_AHEAD tokens, if so many may come."""

CREDIT_ROUNDS = 16.0
"""Most time saved by drafting that offsets later debt, in plain rounds: a drafter that was good may
not be bad for long."""

LOOK_AHEAD = 128
"""Tokens over which a mode must earn the cost of entering it, if so many may still come."""

WINDOW, KEPT = 32, 8
"""Rounds of a mode that are remembered; and how many of them are kept when the text may have become
easier or harder."""


class RoundCost(NamedTuple):
    """Seconds that a round took, and tokens that it committed per request."""

    seconds: float
    tokens: float


class _ModeSummary(NamedTuple):
    """Means over a mode's remembered rounds, the standard error of their tokens, and the cap on a
    round's seconds, since delays by other work meet every mode alike."""

    seconds: float
    tokens: float
    error: float
    most: float


class ModeTimes:
    """Times of each mode's last rounds, kept over many requests."""

    def __init__(self) -> None:
        self._rounds: dict[str, deque[RoundCost]] = {}
        self._summaries: dict[str, _ModeSummary] = {}
        """Summaries of modes whose rounds have not changed since."""

    def add(self, mode: str, cost: RoundCost) -> None:
        self._rounds.setdefault(mode, deque(maxlen=WINDOW)).append(cost)
        self._summaries.pop(mode, None)

    def count(self, mode: str) -> int:
        return len(self._rounds.get(mode, ()))

    def shorten(self, mode: str, kept: int) -> None:
        """Forget all but the last rounds."""
        rounds = self._rounds.get(mode, deque())
        while len(rounds) > kept:
            rounds.popleft()
            self._summaries.pop(mode, None)

    def new_text(self) -> None:
        """A request begins, so the tokens of a round may change: keep the last rounds only."""
        for mode in self._rounds:
            self.shorten(mode, KEPT)

    def tpot_s(self, mode: str, luck: float = 0.0) -> float | None:
        """Seconds per token; None if no round is known.

        A delayed round counts as two rounds at most. No round counts as shorter than a plain one,
        whose pass it contains: if it was, other work slowed the plain rounds down. luck: standard
        errors to add to the mean tokens of a round."""
        summary, plain = self._summary(mode), self._summary(PLAIN)
        if summary is None:
            return None
        if plain is None or mode == PLAIN:
            return summary.seconds / summary.tokens
        return max(summary.seconds, plain.seconds) / max(1.0, summary.tokens + luck * summary.error)

    def excess_s(self, mode: str, cost: RoundCost | None = None) -> float:
        """Seconds that a round takes beyond plain rounds of as many tokens: a given round, or the
        mean one. 0 if no plain round is known."""
        plain, summary = self.tpot_s(PLAIN), self._summary(mode)
        if cost is None:
            none = RoundCost(0.0, 0.0)
            cost = none if summary is None else RoundCost(summary.seconds, summary.tokens)
        seconds = cost.seconds if summary is None else min(cost.seconds, summary.most)
        return 0.0 if plain is None else max(seconds, plain) - cost.tokens * plain

    def _summary(self, mode: str) -> _ModeSummary | None:
        rounds = self._rounds.get(mode)
        if not rounds:
            return None
        if mode not in self._summaries:
            count, most = len(rounds), 2 * median(cost.seconds for cost in rounds)
            seconds = sum(min(cost.seconds, most) for cost in rounds) / count
            tokens = sum(cost.tokens for cost in rounds) / count
            # plus 1, since two equal rounds prove little
            error = (sum((cost.tokens - tokens) ** 2 for cost in rounds) + 1) ** 0.5 / count
            self._summaries[mode] = _ModeSummary(seconds, tokens, error, most)
        return self._summaries[mode]


@dataclass(frozen=True)
class AutoReport:
    """The outcome of auto mode."""

    mode: str
    """The mode that led in the end."""
    why: str
    rounds: dict[str, int]
    """Rounds by mode."""
    tpot_s: dict[str, float]
    """Seconds per token by mode, over the remembered rounds."""
    left_out: dict[str, str]
    """Modes that could not be tried, or have failed, and why."""
    faults: tuple[str, ...] = ()
    """Failures during decoding, as `mode: reason`."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, without `faults`, which are among `left_out`."""
        return {name: value for name, value in vars(self).items() if name != "faults"}


@dataclass
class _ModeTurn:
    """Rounds of one mode in a row."""

    mode: str
    num_rounds: int = 0
    num_counted: int = 0

    @property
    def is_warm_up(self) -> bool:
        """True if the next round is a warm-up round and must not be timed."""
        return self.num_rounds == 0 and self.mode != PLAIN


@dataclass
class Chooser:
    """Chooses for the requests of one busy period; `times` may be shared with others."""

    candidates: tuple[str, ...]
    """Modes besides plain, in the order of trial."""
    times: ModeTimes = field(default_factory=ModeTimes)
    left_out: dict[str, str] = field(default_factory=dict)
    prefill: RoundCost = field(default_factory=lambda: RoundCost(0.0, 1.0))
    """Seconds that the target took for the prompts, and their tokens: an estimate of the cost of
    filling a drafter's own cache."""

    def __post_init__(self) -> None:
        self.times.new_text()
        self._turn = _ModeTurn(PLAIN)
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
        that each mode's drafter would have to compute first."""
        mode = self._wanted(remaining, missing)
        if mode != self._turn.mode:
            self._turn = _ModeTurn(mode)
        self._is_counting = True
        return mode

    def observe(self, seconds: float, tokens: float) -> None:
        """Record the round that was chosen last; rounds that were not chosen here are ignored."""
        if not self._is_counting:
            return
        self._is_counting = False
        turn = self._turn
        is_warm_up, cost = turn.is_warm_up, RoundCost(seconds, tokens)
        if not is_warm_up:
            self.times.add(turn.mode, cost)
            turn.num_counted += 1
        turn.num_rounds += 1
        self._taken[turn.mode] = self._taken.get(turn.mode, 0) + 1
        self._num_rounds += 1
        self._seen_at[turn.mode] = self._num_rounds
        self._elapsed_s += seconds
        if turn.mode != PLAIN:
            plain = self.times.tpot_s(PLAIN) or 0.0
            excess = (
                seconds - tokens * plain if is_warm_up else self.times.excess_s(turn.mode, cost)
            )
            self._debt_s = max(self._debt_s + excess, -CREDIT_ROUNDS * plain)

    def drop(self, mode: str, fault: str) -> None:
        """Leave a mode out from now on. The current round is not counted."""
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

    # The next mode

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
        self.times.shorten(self._leader, KEPT)  # its older rounds mislead
        return PLAIN

    def _due(self, remaining: int, missing: Mapping[str, int]) -> str | None:
        """The mode to try now: one that was never tried, or at the end of an interval the one that
        was tried longest ago; None if none is due."""
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
        turn = self._turn
        if turn.num_counted < FEWEST_ROUNDS:
            return False
        if turn.num_counted >= self._trial_rounds or self._debt_s > self._limit_s:
            return True
        others = {PLAIN, self._leader} - {turn.mode}
        best = min(
            (seconds for mode in others if (seconds := self.times.tpot_s(mode)) is not None),
            default=0.0,
        )
        lucky, unlucky = (
            self.times.tpot_s(turn.mode, luck=LUCK),
            self.times.tpot_s(turn.mode, luck=-1.0),
        )
        return lucky is None or unlucky is None or lucky >= best or unlucky < best

    def _find_leader(self, remaining: int, missing: Mapping[str, int]) -> None:
        ahead = min(remaining, LOOK_AHEAD)
        costs = {}
        for mode in (PLAIN, *self.candidates):
            tpot = self.times.tpot_s(mode)
            if tpot is not None:
                costs[mode] = tpot * ahead + (
                    0.0 if mode == self._turn.mode else self._entry_s(mode, missing)
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
        """True if a trial should keep the debt within its limit. Each round of a mode that was
        never tried is assumed to cost one plain round too many; its limit is higher."""
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
        # the time of the rows alone, since every round has a pass
        rows_s = max(0.0, self.prefill.seconds - (self.times.tpot_s(PLAIN) or 0.0))
        return rows_s / max(1.0, self.prefill.tokens) * missing.get(mode, 0)

    def _why(self, tpot: Mapping[str, float]) -> str:
        parts = []
        if len(tpot) > 1:
            first, *others = sorted(tpot, key=lambda mode: (mode != self._leader, tpot[mode]))
            rest = ", ".join(f"{mode} {1000 * tpot[mode]:.1f}" for mode in others)
            parts.append(f"{first} took {1000 * tpot[first]:.1f} ms a token, {rest}")
            if self._leader == PLAIN:
                pays = tpot[others[0]] < tpot[PLAIN]
                parts.append("too little to change for" if pays else "drafting does not pay here")
        if untried := [mode for mode in self.candidates if mode not in tpot]:
            parts.append(
                f"{' and '.join(untried)} could not be tried: the answer was too short for it, "
                "or its text too long"
            )
        parts += [f"{mode} left out: {reason}" for mode, reason in self.left_out.items()]
        return "; ".join(parts)
