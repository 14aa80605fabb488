"""The worker's side: take requests, run the drafter, answer. It ends when it is told to, or when
the line does."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from d3d.engine.clock import PassClock, ProcessorClock, Stopwatch
from d3d.errors import Disconnected
from d3d.methods.async_.messages import (
    Drafted,
    DraftNow,
    Failed,
    Forget,
    Open,
    Prepare,
    Ready,
    Stop,
    Successors,
    Together,
    WorkRequest,
)
from d3d.methods.async_.preparer import DraftTask, Preparer, PrepareTask, PreparingSession
from d3d.methods.async_.transports import Transport

IDLE_S = 1.0
"""How long it listens before it looks whether the line is still there."""


@dataclass
class _Told:
    """What the worker knows of a sequence."""

    outcome_budget: int
    text: list[int] = field(default_factory=list)
    session: PreparingSession | None = None


class DraftWorker:
    """Answers every request for a sequence that it knows, drafts before preparations; others go
    unanswered. What waits together is done in one pass, if the drafter can do that."""

    def __init__(
        self, transport: Transport, preparer: Preparer, clock: PassClock | None = None
    ) -> None:
        """clock: of the drafter's passes; the processor's where there is no other."""
        self._stopwatch = Stopwatch(clock or ProcessorClock())
        self._transport = transport
        self._preparer = preparer
        self._known: dict[int, _Told] = {}
        self._waiting: list[WorkRequest] = []
        self._stopped = False

    def run(self) -> None:
        """Work until told to stop, or disconnected."""
        try:
            self._transport.send(Ready(os.getpid()))
            while not self._stopped:
                self._listen()
                if self._waiting and not self._stopped:
                    for answer in self._answers(self._next()):
                        self._transport.send(answer)
        except Disconnected:
            pass
        finally:
            self._transport.close()

    def _listen(self) -> None:
        """Take in all that has arrived; wait for it only where nothing is to be done."""
        message = self._transport.receive(0.0 if self._waiting else IDLE_S)
        while message is not None and not self._stopped:
            self._take(message)
            message = self._transport.receive(0.0)

    def _take(self, message: object) -> None:
        if isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, Open):
            self._known[message.sequence_id] = _Told(message.outcome_budget)
        elif isinstance(message, Forget):
            self._drop(message.sequence_id)
        elif isinstance(message, DraftNow | Prepare):
            self._waiting.append(message)
        elif isinstance(message, Together):
            self._waiting += message.requests

    def _drop(self, sequence_id: int) -> None:
        self._known.pop(sequence_id, None)
        self._waiting = [request for request in self._waiting if request.sequence_id != sequence_id]

    def _next(self) -> list[WorkRequest]:
        """The drafts, somebody waits for them; else the preparations. As many as share a pass."""
        first: dict[int, WorkRequest] = {}  # of each sequence
        for request in [
            request for request in self._waiting if isinstance(request, DraftNow)
        ] or self._waiting:
            first.setdefault(request.sequence_id, request)
        taken = list(first.values())[: self._preparer.most_together]
        self._waiting = [
            request for request in self._waiting if not any(request is one for one in taken)
        ]
        return taken

    def _answers(self, requests: list[WorkRequest]) -> list[Drafted | Successors | Failed]:
        """`requests` are all of one kind."""
        if len(requests) > 1:
            with suppress(Exception):  # then each by itself: only those fail that have to
                return self._answers_together(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request: WorkRequest) -> Drafted | Successors | Failed:
        try:
            self._stopwatch.begin()
            session, text = self._updated(request)
            if isinstance(request, DraftNow):
                block = session.draft(text, request.draft_length)
                return Drafted(
                    request.sequence_id, request.round_id, block, *self._stopwatch.stop()
                )
            outcomes = session.likely_outcomes(text, request.draft, request.outcome_budget)
            blocks = (
                session.prepare(text, request.draft, outcomes, request.draft_length)
                if outcomes
                else {}
            )
            return Successors(
                request.sequence_id,
                request.round_id,
                tuple(blocks.items()),
                *self._stopwatch.stop(),
            )
        except Exception as error:  # whatever a drafter dies of, the worker goes on, and says so
            self._drop(request.sequence_id)
            return Failed(request.sequence_id, request.round_id, f"{type(error).__name__}: {error}")

    def _answers_together(self, requests: list[WorkRequest]) -> list[Drafted | Successors | Failed]:
        self._stopwatch.begin()
        drafts = [each for each in requests if isinstance(each, DraftNow)]
        if drafts:
            blocks = self._preparer.draft_together(
                [DraftTask(*self._updated(each), each.draft_length) for each in drafts]
            )
            times = self._stopwatch.stop()
            return [
                Drafted(each.sequence_id, each.round_id, block, *times)
                for each, block in zip(drafts, blocks, strict=True)
            ]
        preparations = [each for each in requests if isinstance(each, Prepare)]
        found = self._preparer.prepare_together(
            [_task(each, *self._updated(each)) for each in preparations]
        )
        times = self._stopwatch.stop()
        answers = zip(preparations, found, strict=True)
        return [
            Successors(each.sequence_id, each.round_id, tuple(blocks.items()), *times)
            for each, blocks in answers
        ]

    def _updated(self, request: WorkRequest) -> tuple[PreparingSession, list[int]]:
        """The sequence's session, and its text with what the request brings. Raises LookupError
        where the worker lacks the rest of it."""
        told = self._known.get(request.sequence_id)
        if told is None or request.start > len(told.text):
            raise LookupError(
                f"the worker has not been told the first {request.start} tokens of sequence "
                f"{request.sequence_id}"
            )
        told.text[request.start :] = request.new_tokens
        if told.session is None:
            told.session = self._preparer.open(told.outcome_budget)
        return told.session, list(told.text)


def _task(request: Prepare, session: PreparingSession, text: list[int]) -> PrepareTask:
    outcomes = session.likely_outcomes(text, request.draft, request.outcome_budget)
    return PrepareTask(session, text, request.draft, outcomes, request.draft_length)
