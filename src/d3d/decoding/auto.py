"""Auto mode behind the loop's Drafter protocol: each round goes through the mode that is fastest so
far.

A mode is a drafter here; plain is none. They are changed between rounds only, over one session of
the target, and what they draft is verified like any other draft, so the answer is the same whatever
is chosen."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import NamedTuple

from d3d.core.protocols import Closable, Drafter, DraftSession, SelfDrafter, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock, RoundStats
from d3d.decoding.mode_choice import PLAIN, Choice, Chooser, ModeTimes, Round
from d3d.drafting.fused import FusedDrafter, FusedDrafts, FusedSession


class Candidate(NamedTuple):
    """A mode that drafts."""

    drafter: Drafter
    draft_length: int


class AutoDrafter:
    """The drafters of several modes, for one generation."""

    def __init__(
        self,
        candidates: dict[str, Candidate],
        left_out: dict[str, str],
        times: dict[int, ModeTimes],
    ) -> None:
        """left_out: why other modes are not among them; times: what is known from earlier
        generations, by their number of sequences."""
        self.candidates = candidates
        self._times = times
        self.chooser = Chooser(tuple(candidates), left_out=left_out)
        self.target: TargetSession | None = None
        """That verifies; known once the prompts are read."""

    def report(self) -> Choice:
        """What the generation has come to so far."""
        return self.chooser.choice

    @property
    def block_size(self) -> int:
        """The longest draft of any mode; 0 where there is none but plain."""
        return max((candidate.draft_length for candidate in self.candidates.values()), default=0)

    def open(self, num_sequences: int, capacity: int) -> AutoSession:
        return AutoSession(self, num_sequences, capacity)

    def prefilled(self, target: TargetSession, seconds: float) -> None:
        self.target = target
        times = self._times.setdefault(len(target.lengths), ModeTimes())
        self.chooser = Chooser(
            tuple(self.candidates),
            times,
            self.chooser.left_out,
            Round(seconds, sum(target.lengths)),
        )

    def observe(self, rounds: ListLike[RoundStats]) -> None:
        tokens = sum(stats.num_committed for stats in rounds) / len(rounds)
        self.chooser.observe(rounds[0].t_draft + rounds[0].t_verify, tokens)


class AutoSession:
    """The sessions of the modes. What can't go on behind rounds of another mode, or holds something
    elsewhere, is opened at each turn of its mode and closed after it; a drafter's cache stays, and
    catches up."""

    def __init__(self, drafter: AutoDrafter, num_sequences: int, capacity: int) -> None:
        self._candidates = drafter.candidates
        self._chooser = drafter.chooser
        self._target = drafter.target
        self._num_sequences, self._capacity = num_sequences, capacity
        self._cached: dict[str, DraftSession] = {}
        """Sessions with a cache of their own, by mode."""
        self._shares = {mode: self._beside(mode) is not None for mode in self._candidates}
        """Whether a mode's drafter works on the target's own cache."""
        self._mode = PLAIN
        self._session: DraftSession | None = None
        """Of the mode whose turn it is."""

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        remaining = max(one.params.max_tokens - one.num_answer_tokens for one in sequences)
        missing = {mode: self._missing(mode, sequences) for mode in self._chooser.candidates}
        mode = self._chooser.choose(remaining, missing)
        try:
            if mode != self._mode:
                self._turn_to(mode)
            if self._session is None:
                return [DraftBlock() for _ in sequences]
            longest = self._candidates[mode].draft_length
            blocks = self._session.draft(sequences, [min(length, longest) for length in lengths])
        except Exception as error:  # whatever a drafter dies of, the other modes go on
            return self._drop(
                f"the drafter failed: {type(error).__name__}: {error}", len(sequences)
            )
        fault = next((block.fault for block in blocks if block.fault is not None), None)
        return blocks if fault is None else self._drop(fault, len(sequences))

    def keep(self, rows: list[int]) -> None:
        self._num_sequences = len(rows)
        for session in {
            id(one): one for one in (self._session, *self._cached.values()) if one is not None
        }.values():
            session.keep(rows)

    def join(self, count: int) -> None:
        raise ValueError(
            f"{count} sequences can't join: what auto mode measures is of those that it began with"
        )

    def close(self) -> None:
        self._turn_to(PLAIN)
        self._cached.clear()

    def _turn_to(self, mode: str) -> None:
        session, self._session, self._mode = self._session, None, mode
        if isinstance(session, Closable):
            session.close()
        if mode != PLAIN:
            self._session = self._cached.get(mode) or self._open(mode)

    def _open(self, mode: str) -> DraftSession:
        session = self._beside(mode) or self._candidates[mode].drafter.open(
            self._num_sequences, self._capacity
        )
        if not isinstance(
            session, Closable | FusedDrafts
        ):  # the one ends with its turn, the other knows of the last pass
            self._cached[mode] = session
        return session

    def _beside(self, mode: str) -> DraftSession | None:
        """A session on the target's own cache, if this mode's drafter can have one."""
        drafter, target = self._candidates[mode].drafter, self._target
        if target is None or not isinstance(drafter, SelfDrafter):
            return None
        if isinstance(target, FusedSession) and not isinstance(drafter, FusedDrafter):
            target = target.native
        return drafter.open_beside(target)

    def _missing(self, mode: str, sequences: ListLike[Sequence]) -> int:
        """Tokens that a turn of this mode begins with catching up on."""
        total = sum(map(len, sequences))
        if mode in self._cached:
            lengths: list[int] = getattr(self._cached[mode], "lengths", [total])
            return total - sum(lengths)
        return 0 if mode == self._mode or self._shares[mode] else total

    def _drop(self, fault: str, num_sequences: int) -> list[DraftBlock]:
        """The mode under way has failed. This round goes on without a draft, the next ones with
        what is left."""
        mode = self._mode
        self._chooser.drop(mode, fault)
        self._cached.pop(mode, None)
        self._turn_to(PLAIN)
        return [DraftBlock() for _ in range(num_sequences)]
