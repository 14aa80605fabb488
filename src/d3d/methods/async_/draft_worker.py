"""The worker's side of async mode: receives requests, runs the drafter, answers. It ends when it is
told to, or when the connection does."""

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
"""Longest wait for a message before the connection is checked."""

Answer = Drafted | Successors | Failed


@dataclass
class _KnownSequence:
    """The worker's copy of a sequence."""

    outcome_budget: int
    text: list[int] = field(default_factory=list)
    session: PreparingSession | None = None


class DraftWorker:
    """Answers every request for a sequence that is open, drafts before preparations; requests for
    forgotten sequences go unanswered. Those that wait together share a pass if the drafter can do
    that."""

    def __init__(
        self, transport: Transport, preparer: Preparer, clock: PassClock | None = None
    ) -> None:
        """clock: of the drafter's passes; None for the processor's."""
        self._stopwatch = Stopwatch(clock or ProcessorClock())
        self._transport = transport
        self._preparer = preparer
        self._known: dict[int, _KnownSequence] = {}
        self._waiting: list[WorkRequest] = []
        self._stopped = False

    def run(self) -> None:
        """Work until told to stop, or disconnected."""
        try:
            self._transport.send(Ready(os.getpid()))
            while not self._stopped:
                self._receive_all()
                if self._waiting and not self._stopped:
                    for answer in self._answers(self._next_batch()):
                        self._transport.send(answer)
        except Disconnected:
            pass
        finally:
            self._transport.close()

    def _receive_all(self) -> None:
        """Handle the messages that have arrived; wait for one only if there is nothing to do."""
        message = self._transport.receive(0.0 if self._waiting else IDLE_S)
        while message is not None and not self._stopped:
            self._handle(message)
            message = self._transport.receive(0.0)

    def _handle(self, message: object) -> None:
        if isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, Open):
            self._known[message.sequence_id] = _KnownSequence(message.outcome_budget)
        elif isinstance(message, Forget):
            self._forget(message.sequence_id)
        elif isinstance(message, DraftNow | Prepare):
            self._waiting.append(message)
        elif isinstance(message, Together):
            self._waiting += message.requests

    def _forget(self, sequence_id: int) -> None:
        self._known.pop(sequence_id, None)
        self._waiting = [request for request in self._waiting if request.sequence_id != sequence_id]

    def _next_batch(self) -> list[WorkRequest]:
        """Take as many requests of one kind as share a pass, one a sequence. Drafts come first: the
        target waits for them."""
        drafts = [request for request in self._waiting if isinstance(request, DraftNow)]
        first: dict[int, WorkRequest] = {}
        for request in drafts or self._waiting:
            first.setdefault(request.sequence_id, request)
        batch = list(first.values())[: self._preparer.most_together]
        taken = set(map(id, batch))
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return batch

    def _answers(self, requests: list[WorkRequest]) -> list[Answer]:
        """`requests` are all of one kind."""
        if len(requests) > 1:
            with suppress(Exception):  # then one by one: only the faulty ones fail
                return self._answers_together(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request: WorkRequest) -> Answer:
        ids = request.sequence_id, request.round_id
        try:
            self._stopwatch.begin()
            session, text = self._session_and_text(request)
            if isinstance(request, DraftNow):
                block = session.draft(text, request.draft_length)
                return Drafted(*ids, block, *self._stopwatch.stop())
            task = _prepare_task(request, session, text)
            blocks = session.prepare(*task[1:]) if task.outcomes else {}
            return Successors(*ids, tuple(blocks.items()), *self._stopwatch.stop())
        except Exception as error:  # whatever a drafter raises, the worker reports it and goes on
            self._forget(request.sequence_id)
            return Failed(*ids, f"{type(error).__name__}: {error}")

    def _answers_together(self, requests: list[WorkRequest]) -> list[Answer]:
        self._stopwatch.begin()
        drafts = [request for request in requests if isinstance(request, DraftNow)]
        if drafts:
            blocks = self._preparer.draft_together(
                [
                    DraftTask(*self._session_and_text(request), request.draft_length)
                    for request in drafts
                ]
            )
            times = self._stopwatch.stop()
            return [
                Drafted(request.sequence_id, request.round_id, block, *times)
                for request, block in zip(drafts, blocks, strict=True)
            ]
        preparations = [request for request in requests if isinstance(request, Prepare)]
        prepared = self._preparer.prepare_together(
            [_prepare_task(request, *self._session_and_text(request)) for request in preparations]
        )
        times = self._stopwatch.stop()
        return [
            Successors(request.sequence_id, request.round_id, tuple(drafts_of.items()), *times)
            for request, drafts_of in zip(preparations, prepared, strict=True)
        ]

    def _session_and_text(self, request: WorkRequest) -> tuple[PreparingSession, list[int]]:
        """The request's session, and its text with the new tokens. Raises LookupError if the worker
        lacks the tokens before them."""
        known = self._known.get(request.sequence_id)
        if known is None or request.start > len(known.text):
            raise LookupError(
                f"the worker lacks the first {request.start} tokens of sequence "
                f"{request.sequence_id}"
            )
        known.text[request.start :] = request.new_tokens
        if known.session is None:
            known.session = self._preparer.open(known.outcome_budget)
        return known.session, list(known.text)


def _prepare_task(request: Prepare, session: PreparingSession, text: list[int]) -> PrepareTask:
    outcomes = session.likely_outcomes(text, request.draft, request.outcome_budget)
    return PrepareTask(session, text, request.draft, outcomes, request.draft_length)
