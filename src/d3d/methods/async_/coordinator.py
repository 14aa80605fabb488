"""The target's side of async mode: successors in hand when a verdict is known, and the worker busy
while the next block is verified.

Nothing here waits without a bound, and nothing here can change a token: a block that is late, lost
or wrong costs speed only."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from d3d.engine.drafter import Draft
from d3d.engine.round import Preparation, Readiness
from d3d.errors import WorkerFailed
from d3d.methods.async_.config import MissPolicy
from d3d.methods.async_.messages import (
    DraftNow,
    Failed,
    Forget,
    FromWorker,
    Open,
    Prepare,
    Ready,
    Successors,
    Together,
    WorkRequest,
)
from d3d.methods.async_.outcomes import MOST_OUTCOMES, Outcome
from d3d.methods.async_.speculation_cache import SpeculationCache
from d3d.methods.async_.worker_link import WorkerLink

MOST_FAILURES = 3
"""After so many failures in a row a sequence asks the worker no more."""


@dataclass(frozen=True)
class Policy:
    """How a request drafts."""

    draft_length: int
    outcome_budget: int
    miss_policy: MissPolicy = "draft_now"
    patience_s: float = 1.0
    """Longest wait for the worker in a round."""
    hung_s: float = 120.0
    """A worker that says nothing for so long, though it has been asked, is ended. A long prompt
    takes it a while."""


@dataclass
class _Member:
    """A sequence and what has been said about it."""

    sequence_id: int
    policy: Policy
    round_id: int = 0
    text_length: int = 0
    """Committed tokens when the last round began."""
    draft: tuple[int, ...] = ()
    """Verified in the last round."""
    generation: int = -1
    """Of the worker that knows the sequence."""
    told: int = 0
    """Tokens of the text that this worker has been sent."""
    pending: WorkRequest | None = None
    """The one request that is not answered yet."""
    sent_at: float = 0.0
    fresh: Draft | None = None
    """The answer to a `DraftNow`."""
    num_failures: int = 0
    passes: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class _Round:
    """What is known of a member's present round."""

    member: _Member
    text: list[int]
    length: int
    verified: int
    """The round whose verdict has just become known."""
    block: Draft | None = None
    readiness: Readiness = "unprepared"
    fitted: bool = False
    """Whether `block` is a successor."""
    cause: str | None = None


class Coordinator:
    """One worker, and the sequences that it drafts for. May be used by several threads; each waits
    its turn."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link
        self.cache = SpeculationCache(MOST_OUTCOMES)
        self._members: dict[int, _Member] = {}
        self._lock = threading.RLock()
        weakref.finalize(
            self, link.close
        )  # at the latest when the program ends, before its threads are torn down

    def ensure_worker(self) -> None:
        """Wait until a worker is ready. Raises WorkerFailed where none comes up."""
        with self._lock:
            self.link.begin()
        while True:
            with self._lock:  # let go in between: other requests go on
                if self.link.state == "starting":
                    self.link.receive(0.02)
                if self.link.state == "up":
                    return
                if self.link.state == "absent":
                    why = self.link.notes[-1] if self.link.notes else self.link.cause
                    raise WorkerFailed(
                        f"the draft worker could not be started: {why}; modes serial and plain "
                        "need none"
                    )
            time.sleep(0.001)

    def open(self, sequence_id: int, policy: Policy) -> None:
        """A sequence begins."""
        with self._lock:
            self._members[sequence_id] = _Member(sequence_id, policy)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._members

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended; what still comes for it is dropped."""
        with self._lock:
            member = self._members.pop(sequence_id, None)
            self.cache.forget(sequence_id)
            if member is not None and member.generation == self.link.generation:
                self.link.send(Forget(sequence_id))

    @property
    def num_sequences(self) -> int:
        return len(self._members)

    def close(self) -> None:
        """End the worker. A later request may start another."""
        with self._lock:
            self.link.close()

    def draft(
        self, sequence_ids: ListLike[int], texts: ListLike[list[int]], lengths: ListLike[int]
    ) -> list[Draft]:
        """Begin a round of each sequence: the blocks to verify behind `texts`, at most `lengths[i]`
        tokens. When this returns, the worker has been asked for their successors."""
        with self._lock:
            triples = zip(sequence_ids, texts, lengths, strict=True)
            rounds = [
                self._begin(self._members[sequence_id], text, length)
                for sequence_id, text, length in triples
            ]
            self._hear()
            self._look_up([one for one in rounds if one.length > 0])
            self._draft_now([one for one in rounds if one.length > 0 and one.block is None])
            self._prepare_next(rounds)
            return [self._result(one) for one in rounds]

    # The round's steps

    def _begin(self, member: _Member, text: list[int], length: int) -> _Round:
        member.round_id += 1
        return _Round(member, text, length, member.round_id - 1)

    def _look_up(self, rounds: list[_Round]) -> None:
        """Take the successors of the verdicts; wait for those that are on their way."""
        awaited = []
        for one in rounds:
            member = one.member
            if self.cache.has(member.sequence_id, one.verified):
                one.block = self._take(one)
                one.readiness = "miss" if one.block is None else "hit"
            elif isinstance(member.pending, Prepare) and member.pending.round_id == one.verified:
                awaited.append(one)
        self._wait_for(awaited)
        for one in awaited:
            one.readiness, one.block = "late", self._take(one)
            one.cause = "late" if one.member.pending is not None else None
        for one in rounds:
            one.fitted = one.block is not None

    def _draft_now(self, rounds: list[_Round]) -> None:
        """What a miss policy does for rounds without a successor."""
        asked: list[tuple[_Round, WorkRequest]] = []
        for one in rounds:
            member = one.member
            one.cause = one.cause or self._hindrance(member)
            if one.cause is None and member.policy.miss_policy == "bonus_only":
                one.cause = "unprepared" if one.readiness == "unprepared" else "miss"
            if one.cause is None:
                start = self._introduce(member)
                new = tuple(one.text[start:])
                asked.append(
                    (one, DraftNow(member.sequence_id, member.round_id, start, new, one.length))
                )
        is_sent = self._ask(asked)
        if is_sent:
            self._wait_for([one for one, _ in asked])
        for one, _ in asked:
            one.block, one.member.fresh = one.member.fresh, None
            if one.block is None:
                one.cause = self._hindrance(one.member) or "failed"

    def _prepare_next(self, rounds: list[_Round]) -> None:
        """Ask for the successors of the blocks that are about to be verified."""
        requests = [(one, self._preparation(one)) for one in rounds]
        self._ask([(one, request) for one, request in requests if request is not None])

    def _preparation(self, one: _Round) -> Prepare | None:
        member = one.member
        member.text_length = len(one.text)
        self.cache.expect(member.sequence_id, member.round_id)
        member.draft = () if one.block is None else one.block.token_ids[: one.length]
        near_end = (
            one.length < member.policy.draft_length
        )  # a draft that is cut short leaves no more room than that
        if one.length < 1 or (near_end and one.length < 2) or self._hindrance(member) is not None:
            return None
        start = self._introduce(member)
        new, budget = tuple(one.text[start:]), member.policy.outcome_budget
        return Prepare(
            member.sequence_id, member.round_id, start, new, member.draft, one.length, budget
        )

    def _result(self, one: _Round) -> Draft:
        block = one.block or Draft()
        if one.length < 1:
            return block
        cause = one.cause if one.block is None else None
        if one.block is not None and not block.token_ids:
            cause = "empty" if block.fault is None else "fault"
        passes, one.member.passes = tuple(one.member.passes), []
        notes, self.link.notes = tuple(self.link.notes), []
        preparation = Preparation(one.readiness, cause, passes, notes, one.fitted)
        return block._replace(token_ids=block.token_ids[: one.length], preparation=preparation)

    def _take(self, one: _Round) -> Draft | None:
        member = one.member
        new = one.text[member.text_length :]
        num_accepted = len(new) - 1
        if num_accepted < 0 or tuple(new[:num_accepted]) != member.draft[:num_accepted]:
            return None  # not what a verdict on that draft can leave behind
        return self.cache.take(member.sequence_id, one.verified, Outcome(num_accepted, new[-1]))

    # Talking to the worker

    def _hindrance(self, member: _Member) -> str | None:
        """Why the worker can't be asked about a sequence now."""
        if self.link.state != "up":
            return self.link.cause
        if member.num_failures >= MOST_FAILURES:
            return "failed"
        return "slow" if member.pending is not None else None

    def _introduce(self, member: _Member) -> int:
        """How much of its text the worker knows; one that does not know the sequence is told of
        it."""
        if member.generation != self.link.generation:
            member.generation, member.told = self.link.generation, 0
            self.link.send(Open(member.sequence_id, member.policy.outcome_budget))
        return member.told

    def _ask(self, asked: ListLike[tuple[_Round, WorkRequest]]) -> bool:
        """Whether the requests are on their way: as one message, for the worker may do them in one
        pass."""
        requests = tuple(request for _, request in asked)
        if not requests:
            return True
        if not self.link.send(requests[0] if len(requests) == 1 else Together(requests)):
            self._worker_is_gone()
            return False
        for one, request in asked:
            member = one.member
            member.pending, member.sent_at, member.told = (
                request,
                time.perf_counter(),
                len(one.text),
            )
        return True

    def _wait_for(self, rounds: list[_Round]) -> None:
        """Until all are answered, the worker is gone, or patience ends."""
        if not rounds:
            return
        deadline = time.perf_counter() + max(one.member.policy.patience_s for one in rounds)
        while (
            any(one.member.pending is not None for one in rounds)
            and (left := deadline - time.perf_counter()) > 0
        ):
            self._handle(self.link.receive(left))

    def _hear(self) -> None:
        """Take in all that has come, without waiting."""
        while self.link.worker is not None:
            message = self.link.receive(0.0)
            if message is None:
                break
            self._handle(message)
        for member in self._members.values():
            silent_since = max(
                member.sent_at, self.link.heard_at
            )  # others may have had their turn before
            if (
                member.pending is not None
                and time.perf_counter() - silent_since > member.policy.hung_s
            ):
                self.link.declare_hung(member.policy.hung_s)
                break
        self._worker_is_gone()

    def _handle(self, message: FromWorker | None) -> None:
        self._worker_is_gone()
        if message is None or isinstance(message, Ready):
            return
        member = None if message.sequence_id is None else self._members.get(message.sequence_id)
        pending = None if member is None else member.pending
        if member is None or pending is None or pending.round_id != message.round_id:
            self.cache.num_stale += 1
            return
        member.pending = None
        if isinstance(message, Failed):
            member.num_failures += 1
            member.generation = -1
            self.link.notes.append(f"the draft worker failed: {message.error}")
            return
        member.num_failures = 0
        member.passes.append((message.started, message.ended))
        if isinstance(message, Successors):
            self.cache.put(message)
        elif message.round_id == member.round_id:
            member.fresh = message.block
        else:
            self.cache.num_stale += 1

    def _worker_is_gone(self) -> None:
        """Nobody answers what a worker was asked that is not there any more."""
        for member in self._members.values():
            if member.generation != self.link.generation or self.link.worker is None:
                member.pending = None
