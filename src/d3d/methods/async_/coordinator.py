"""The target's side of async mode: finds the successor of each verdict, and keeps the worker busy
while the target verifies.

Every wait is bounded, and a block that is late, lost or wrong costs speed, never a token."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
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
"""Failures in a row after which a sequence sends the worker no more requests."""


@dataclass(frozen=True)
class Policy:
    """Drafting policy of a request."""

    draft_length: int
    outcome_budget: int
    miss_policy: MissPolicy = "draft_now"
    patience_s: float = 1.0
    """Longest wait for the worker in a round."""
    hung_s: float = 120.0
    """Longest silence of a worker with an open request before it is ended. A long prompt takes it a
    while."""


@dataclass
class _SequenceState:
    """A sequence, and the part of it that the worker has."""

    sequence_id: int
    policy: Policy
    round_id: int = 0
    text_length: int = 0
    """Committed tokens when the last round began."""
    draft: tuple[int, ...] = ()
    """Verified in the last round."""
    generation: int = -1
    """Generation of the worker that knows the sequence."""
    num_sent: int = 0
    """Tokens of the text that this worker has been sent."""
    pending: WorkRequest | None = None
    """The request that is not answered yet; there is one at most."""
    sent_at: float = 0.0
    fresh: Draft | None = None
    """The answer to a `DraftNow`."""
    num_failures: int = 0
    passes: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class _RoundState:
    """A sequence's current round."""

    sequence: _SequenceState
    text: list[int]
    length: int
    verified_id: int
    """Id of the round whose verdict has just become known."""
    block: Draft | None = None
    readiness: Readiness = "unprepared"
    fitted: bool = False
    """True if `block` is a successor."""
    cause: str | None = None


class Coordinator:
    """One worker, and the sequences that it drafts for. Threads may share it; calls are
    serialized."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link
        self.cache = SpeculationCache(MOST_OUTCOMES)
        self._sequences: dict[int, _SequenceState] = {}
        self._lock = threading.RLock()
        # at the latest when the program ends, before its threads are torn down
        weakref.finalize(self, link.close)

    def ensure_worker(self) -> None:
        """Wait until a worker is ready. Raises WorkerFailed if none starts."""
        with self._lock:
            self.link.begin()
        while True:
            with self._lock:  # released in between: other requests go on
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
        """Begin a sequence."""
        with self._lock:
            self._sequences[sequence_id] = _SequenceState(sequence_id, policy)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._sequences

    def forget(self, sequence_id: int) -> None:
        """End a sequence; answers for it that still arrive are dropped."""
        with self._lock:
            sequence = self._sequences.pop(sequence_id, None)
            self.cache.forget(sequence_id)
            if sequence is not None and sequence.generation == self.link.generation:
                self.link.send(Forget(sequence_id))

    def close(self) -> None:
        """End the worker. A later request may start another."""
        with self._lock:
            self.link.close()

    def draft(
        self, sequence_ids: Sequence[int], texts: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[Draft]:
        """Begin a round of each sequence: the blocks to verify after `texts`, at most `lengths[i]`
        tokens each. On return, their successors have been requested from the worker."""
        with self._lock:
            rounds = [
                self._begin(self._sequences[sequence_id], text, length)
                for sequence_id, text, length in zip(sequence_ids, texts, lengths, strict=True)
            ]
            self._receive_all()
            self._take_successors([round_ for round_ in rounds if round_.length > 0])
            self._apply_miss_policy(
                [round_ for round_ in rounds if round_.length > 0 and round_.block is None]
            )
            self._request_successors(rounds)
            return [self._result(round_) for round_ in rounds]

    # The round's steps

    def _begin(self, sequence: _SequenceState, text: list[int], length: int) -> _RoundState:
        sequence.round_id += 1
        return _RoundState(sequence, text, length, sequence.round_id - 1)

    def _take_successors(self, rounds: list[_RoundState]) -> None:
        """Take the successors of the verdicts; wait for those under way."""
        awaited = []
        for round_ in rounds:
            sequence = round_.sequence
            if self.cache.has(sequence.sequence_id, round_.verified_id):
                round_.block = self._successor(round_)
                round_.readiness = "miss" if round_.block is None else "hit"
            elif _is_preparing(sequence, round_.verified_id):
                awaited.append(round_)
        self._wait_for(awaited)
        for round_ in awaited:
            round_.readiness, round_.block = "late", self._successor(round_)
            round_.cause = "late" if round_.sequence.pending is not None else None
        for round_ in rounds:
            round_.fitted = round_.block is not None

    def _successor(self, round_: _RoundState) -> Draft | None:
        sequence = round_.sequence
        new = round_.text[sequence.text_length :]
        num_accepted = len(new) - 1
        if num_accepted < 0 or tuple(new[:num_accepted]) != sequence.draft[:num_accepted]:
            return None  # no verdict on that draft leaves such a text behind
        outcome = Outcome(num_accepted, new[-1])
        return self.cache.take(sequence.sequence_id, round_.verified_id, outcome)

    def _apply_miss_policy(self, rounds: list[_RoundState]) -> None:
        """Draft now, or note why not, for rounds without a successor."""
        requests: list[tuple[_RoundState, WorkRequest]] = []
        for round_ in rounds:
            sequence = round_.sequence
            round_.cause = round_.cause or self._why_unavailable(sequence)
            if round_.cause is None and sequence.policy.miss_policy == "bonus_only":
                round_.cause = "unprepared" if round_.readiness == "unprepared" else "miss"
            if round_.cause is None:
                start = self._num_known(sequence)
                new = tuple(round_.text[start:])
                request = DraftNow(
                    sequence.sequence_id, sequence.round_id, start, new, round_.length
                )
                requests.append((round_, request))
        if self._send(requests):
            self._wait_for([round_ for round_, _ in requests])
        for round_, _ in requests:
            round_.block, round_.sequence.fresh = round_.sequence.fresh, None
            if round_.block is None:
                round_.cause = self._why_unavailable(round_.sequence) or "failed"

    def _request_successors(self, rounds: list[_RoundState]) -> None:
        """Request the successors of the blocks that are about to be verified."""
        requests = [(round_, self._preparation(round_)) for round_ in rounds]
        self._send([(round_, request) for round_, request in requests if request is not None])

    def _preparation(self, round_: _RoundState) -> Prepare | None:
        sequence, policy = round_.sequence, round_.sequence.policy
        sequence.text_length = len(round_.text)
        self.cache.expect(sequence.sequence_id, sequence.round_id)
        sequence.draft = () if round_.block is None else round_.block.token_ids[: round_.length]
        # a draft that the answer's end cuts to one token leaves no room for a successor
        is_last = round_.length < min(2, policy.draft_length)
        if round_.length < 1 or is_last or self._why_unavailable(sequence) is not None:
            return None
        start = self._num_known(sequence)
        return Prepare(
            sequence.sequence_id,
            sequence.round_id,
            start,
            tuple(round_.text[start:]),
            sequence.draft,
            round_.length,
            policy.outcome_budget,
        )

    def _result(self, round_: _RoundState) -> Draft:
        block = round_.block or Draft()
        if round_.length < 1:
            return block
        cause = round_.cause if round_.block is None else None
        if round_.block is not None and not block.token_ids:
            cause = "empty" if block.fault is None else "fault"
        passes, round_.sequence.passes = tuple(round_.sequence.passes), []
        notes, self.link.notes = tuple(self.link.notes), []
        preparation = Preparation(round_.readiness, cause, passes, notes, round_.fitted)
        return block._replace(token_ids=block.token_ids[: round_.length], preparation=preparation)

    # Messages to and from the worker

    def _why_unavailable(self, sequence: _SequenceState) -> str | None:
        """Why the worker can take no request for a sequence now; None if it can."""
        if self.link.state != "up":
            return self.link.cause
        if sequence.num_failures >= MOST_FAILURES:
            return "failed"
        return "slow" if sequence.pending is not None else None

    def _num_known(self, sequence: _SequenceState) -> int:
        """Tokens of its text that the worker has; opens the sequence if it is new to the worker."""
        if sequence.generation != self.link.generation:
            sequence.generation, sequence.num_sent = self.link.generation, 0
            self.link.send(Open(sequence.sequence_id, sequence.policy.outcome_budget))
        return sequence.num_sent

    def _send(self, requests: Sequence[tuple[_RoundState, WorkRequest]]) -> bool:
        """Send requests as one message, so that the worker may do them in one pass. False if it is
        gone."""
        messages = tuple(request for _, request in requests)
        if not messages:
            return True
        if not self.link.send(messages[0] if len(messages) == 1 else Together(messages)):
            self._drop_unanswerable()
            return False
        for round_, request in requests:
            sequence = round_.sequence
            sequence.pending, sequence.sent_at = request, time.perf_counter()
            sequence.num_sent = len(round_.text)
        return True

    def _wait_for(self, rounds: list[_RoundState]) -> None:
        """Until all are answered, the worker is gone, or patience ends."""
        if not rounds:
            return
        longest = max(round_.sequence.policy.patience_s for round_ in rounds)
        deadline = time.perf_counter() + longest
        while (
            any(round_.sequence.pending is not None for round_ in rounds)
            and (left := deadline - time.perf_counter()) > 0
        ):
            self._handle(self.link.receive(left))

    def _receive_all(self) -> None:
        """Handle the messages that have arrived, without waiting; end a worker that hangs."""
        while self.link.worker is not None:
            message = self.link.receive(0.0)
            if message is None:
                break
            self._handle(message)
        for sequence in self._sequences.values():
            # the worker may have been busy with other sequences before
            silent_since = max(sequence.sent_at, self.link.received_at)
            is_silent = time.perf_counter() - silent_since > sequence.policy.hung_s
            if sequence.pending is not None and is_silent:
                self.link.end_hung(sequence.policy.hung_s)
                break
        self._drop_unanswerable()

    def _handle(self, message: FromWorker | None) -> None:
        self._drop_unanswerable()
        if message is None or isinstance(message, Ready):
            return
        sequence = None
        if message.sequence_id is not None:
            sequence = self._sequences.get(message.sequence_id)
        pending = None if sequence is None else sequence.pending
        if sequence is None or pending is None or pending.round_id != message.round_id:
            self.cache.num_stale += 1
            return
        sequence.pending = None
        if isinstance(message, Failed):
            sequence.num_failures += 1
            sequence.generation = -1
            self.link.notes.append(f"the draft worker failed: {message.error}")
            return
        sequence.num_failures = 0
        sequence.passes.append((message.started, message.ended))
        if isinstance(message, Successors):
            self.cache.put(message)
        elif message.round_id == sequence.round_id:
            sequence.fresh = message.block
        else:
            self.cache.num_stale += 1

    def _drop_unanswerable(self) -> None:
        """Drop requests to a worker that has ended: nobody answers them."""
        for sequence in self._sequences.values():
            if sequence.generation != self.link.generation or self.link.worker is None:
                sequence.pending = None


def _is_preparing(sequence: _SequenceState, round_id: int) -> bool:
    pending = sequence.pending
    return isinstance(pending, Prepare) and pending.round_id == round_id
