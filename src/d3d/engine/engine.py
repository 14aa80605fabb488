"""The decoding loop: requests in, rounds out. Start reading here.

Plain decoding is the same loop with a drafter that proposes nothing, so the output of every method
goes through the same few lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter, NoDrafter, Target, guarded
from d3d.engine.request import Request
from d3d.engine.round import Round, RoundTimes
from d3d.engine.sampling import AcceptanceRule, LogitRows, Verdict, sample_match
from d3d.errors import NotFinite

PREFILL_ROWS = 512
"""Maximum prompt tokens processed per step, so that a long prompt does not stall the others."""


class Engine:
    """Decodes an open set of requests: they join and leave at any round.

    `add` and `cancel` are safe from any thread; `step` from one at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_batch: int | None = None,
        prefill_rows: int = PREFILL_ROWS,
        accept: AcceptanceRule | None = None,
    ) -> None:
        """max_batch: maximum number of requests verified together; None for no limit. prefill_rows:
        see `PREFILL_ROWS`. Raises ValueError for numbers below 1."""
        if (max_batch is not None and max_batch < 1) or prefill_rows < 1:
            raise ValueError(
                f"max_batch and prefill_rows must be 1 or more, got {max_batch} and {prefill_rows}"
            )
        self.target = target
        self.drafter = guarded(
            drafter or NoDrafter(), target.vocab_size, trees=target.verifies_trees
        )
        self.max_batch, self.prefill_rows, self._accept = (
            max_batch,
            prefill_rows,
            accept or sample_match,
        )
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        """Requests in prefill."""
        self.running: list[Request] = []
        self._cancelled: deque[Request] = deque()
        self._prefill_s = 0.0

    def add(self, request: Request) -> None:
        """Add a request; it takes part from the next step on."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request before the next step; committed tokens stay."""
        self._cancelled.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.running or self._cancelled)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.reading) + len(self.running)

    def step(self) -> list[Round]:
        """Prefill a chunk of waiting prompts, and advance every running request by one round.

        If the target fails, the requests in that pass get the `error`, or the one whose logits
        allow no choice; the others go on."""
        self.drop_cancelled()
        running = list(self.running)
        rounds = self._prefill()
        if running:
            rounds += self._round(running)
        self._release()
        return rounds

    def run(self, requests: Iterable[Request]) -> Iterator[Round]:
        """Decode requests, each as if it were alone. Raises the error of a request that failed."""
        requests = list(requests)
        for request in requests:
            self.add(request)
        try:
            while any(not request.finished for request in requests):
                yield from self.step()
                for request in requests:
                    if request.error is not None:
                        raise request.error
        finally:
            for request in requests:
                if not request.finished:
                    self.cancel(request)
            self.drop_cancelled()

    def _round(self, running: Sequence[Request]) -> list[Round]:
        """Draft, verify, accept, commit."""
        started = time.perf_counter()
        drafts = self.drafter.propose(running)
        drafted = time.perf_counter()
        try:
            logits = self.target.verify(running, drafts)
            decided = [
                (request, draft, self._verdict(request, draft, rows))
                for request, draft, rows in zip(running, drafts, logits, strict=True)
            ]
            t_verify, span = time.perf_counter() - drafted, self.target.pass_span()
            times = RoundTimes(started, drafted - started, t_verify, span)
            for request, _, verdict in decided:
                if verdict is not None and verdict.path:
                    self.target.keep_path(request, verdict.path)
            rounds = [
                request.commit(draft, verdict, times)
                for request, draft, verdict in decided
                if verdict is not None
            ]
            self.target.rewind(running)
        except Exception as error:  # waiting requests go on
            return self._fail(running, error)
        if rounds:
            self.drafter.observe(rounds)
        return rounds

    def _verdict(self, request: Request, draft: Draft, rows: LogitRows) -> Verdict | None:
        """None if the request fails alone, because its logits are not finite."""
        try:
            return self._accept(rows, draft.token_ids, request, draft.parents)
        except NotFinite as error:
            problem = error
        try:
            if request.num_rounds:  # draft and padding are hidden, but 0 * NaN still reaches a row
                return self._accept(self.target.verify_again(request), (), request, None)
        except NotFinite as error:
            problem = error
        with suppress(Exception):  # a diagnosis must not end the others
            problem.cause = self.target.diagnose(request)
        self._fail([request], problem)
        return None

    def _prefill(self) -> list[Round]:
        """Prefill a chunk of prompts. The first token has no draft and belongs to no round."""
        while self.waiting and self._has_room:
            request = self.waiting.popleft()
            if not request.finished:  # cancelled before it was added
                self.reading.append(request)
        if not self.reading:
            return []
        started = time.perf_counter()
        try:
            logits = self.target.prefill(self.reading, self.prefill_rows)
            read = [
                (request, verdict)
                for request, rows in zip(self.reading, logits, strict=True)
                if rows is not None and (verdict := self._verdict(request, NO_DRAFT, rows))
            ]
            seconds = time.perf_counter() - started
            times = RoundTimes(started, 0.0, seconds)
            rounds = [request.commit(NO_DRAFT, verdict, times) for request, verdict in read]
        except Exception as error:
            return self._fail(self.reading, error)
        self._prefill_s += seconds
        if read:
            num_tokens = sum(request.prompt_length for request, _ in read)
            self.drafter.prefilled(self._prefill_s, num_tokens)
            self._prefill_s = 0.0
            self.running += [request for request, _ in read]
            self.reading = [request for request in self.reading if not request.num_rounds]
        return rounds

    @property
    def _has_room(self) -> bool:
        return self.max_batch is None or len(self.running) + len(self.reading) < self.max_batch

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[Round]:
        for request in requests:
            request.finish_reason, request.error = None, error
        return []

    def drop_cancelled(self) -> None:
        """Release cancelled requests; `step` begins with this."""
        if self._cancelled:
            self._mark_cancelled()
        self._release()

    def _mark_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.finished:
                request.finish_reason = "cancelled"
        for request in list(self.waiting):  # a copy, since other threads may add meanwhile
            if request.finished:
                self.waiting.remove(request)

    def _release(self) -> None:
        """Release ended requests in drafter and target. State ends nowhere else."""
        ended = [request for request in (*self.reading, *self.running) if request.finished]
        if not ended:
            return
        self.reading = [request for request in self.reading if not request.finished]
        self.running = [request for request in self.running if not request.finished]
        for request in ended:
            self.drafter.end(request)
            self.target.end(request)
