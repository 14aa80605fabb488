"""Batches in async mode: requests share a message and a pass, others join, and no answer
changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

from d3d.engine.drafter import Draft
from d3d.methods.async_.draft_worker import DraftWorker
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
)
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.async_.preparer import PrepareTask
from d3d.methods.async_.transports import in_process_pair
from d3d.methods.async_.worker_link import WorkerLink
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.async_runs import (
    async_drafter,
    causes,
    coordinating,
    decode,
    notes,
    preparations,
    readiness,
    rehearsed,
)
from support.drafters import text, tiny_drafter
from support.runs import SAMPLING, Run, make, run_all

WAYS = ("greedy", "hot", "everything", "greedy penalties", "temperature", "greedy", "bias", "top_p")
LIMITS = (30, 6, 17, 1, 24, 9, 12, 20)


def eight(target: NativeTarget) -> list[Run]:
    return [
        make(
            target,
            text(2 + 11 * (number % 4), seed=number),
            **SAMPLING[way] | {"max_tokens": limit},
        )
        for number, (way, limit) in enumerate(zip(WAYS, LIMITS, strict=True))
    ]


def plain(target: NativeTarget) -> list[Run]:
    return [run_all(target, None, [one])[0] for one in eight(target)]


def said_by(worker: PackedDrafter, *messages: object) -> list[Any]:
    """What a worker says to messages that are all there when it begins."""
    ours, theirs = in_process_pair()
    for message in messages:
        ours.send(message)
    thread = threading.Thread(target=DraftWorker(theirs, worker).run)
    thread.start()
    said = []
    while (message := ours.receive(2.0 if len(said) < 3 else 0.3)) is not None:
        said.append(message)
    ours.send(Stop())
    thread.join(5)
    assert isinstance(said[0], Ready)
    return said[1:]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the drafter's passes."""
    rows: list[int] = []
    original = DrafterModel.hidden

    def watch(self: DrafterModel, token_ids: Tensor, *rest: Any) -> Tensor:
        rows.append(token_ids.shape[1])
        return original(self, token_ids, *rest)

    monkeypatch.setattr(DrafterModel, "hidden", watch)
    return rows


@pytest.fixture
def drafter() -> PackedDrafter:
    return PackedDrafter(tiny_drafter(), 97)


OPENED = [Open(number, 4) for number in range(3)]
TEXTS = [tuple(text(5 + 9 * number, seed=number)) for number in range(3)]


def test_drafts_that_wait_together_share_a_pass_and_so_do_preparations(
    drafter: PackedDrafter, passes: list[int]
) -> None:
    drafts = [DraftNow(number, 1, 0, TEXTS[number], 5) for number in range(3)]
    alone = [drafter.open(4) for _ in range(3)]
    expected = [session.draft(list(known), 5) for session, known in zip(alone, TEXTS, strict=True)]
    prepares = [
        Prepare(number, 2, len(TEXTS[number]), (), block.token_ids, 5, 4)
        for number, block in enumerate(expected)
    ]
    successors = []
    for session, known, block in zip(alone, TEXTS, expected, strict=True):
        outcomes = session.likely_outcomes(list(known), block.token_ids, 4)
        successors.append(tuple(session.prepare(list(known), block.token_ids, outcomes, 5).items()))
    passes.clear()
    said = said_by(drafter, *OPENED, Together((*prepares[:2], *drafts)), prepares[2])
    assert [type(answer) for answer in said] == [Drafted] * 3 + [Successors] * 3
    assert [answer.block for answer in said[:3]] == expected
    assert [answer.blocks for answer in said[3:]] == successors
    assert [(answer.sequence_id, answer.round_id) for answer in said] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 2),
        (1, 2),
        (2, 2),
    ]
    assert len(passes) == 2
    assert len({(answer.started, answer.ended) for answer in said}) == 2, "each pass has its time"


def test_where_a_shared_pass_fails_only_those_fail_that_have_to(
    drafter: PackedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackedSession.branches

    def fail(self: PackedSession, task: PrepareTask) -> Any:
        if len(task.text) == len(TEXTS[1]) - 1:
            raise MemoryError("no room")
        return original(self, task)

    monkeypatch.setattr(PackedSession, "branches", fail)
    drafts = [DraftNow(number, 1, 0, TEXTS[number], 5) for number in range(3)]
    first, second, third = said_by(drafter, *OPENED, Together(tuple(drafts)))
    assert isinstance(second, Failed)
    assert second.error == "MemoryError: no room"
    for answer, known in ((first, TEXTS[0]), (third, TEXTS[2])):
        assert answer.block == drafter.open(4).draft(list(known), 5)
    assert first.block != Draft()


def test_a_text_with_a_hole_fails_alone(drafter: PackedDrafter) -> None:
    said = said_by(
        drafter,
        *OPENED,
        Together(
            (
                DraftNow(0, 1, 0, TEXTS[0], 5),
                DraftNow(1, 1, 3, (1, 2), 5),
                DraftNow(2, 1, 0, TEXTS[2], 5),
            )
        ),
    )
    assert [type(answer) for answer in said] == [Drafted, Failed, Drafted]


def test_forgotten_sequences_leave_those_that_wait(drafter: PackedDrafter) -> None:
    said = said_by(
        drafter,
        *OPENED,
        Together(tuple(DraftNow(number, 1, 0, TEXTS[number], 5) for number in range(3))),
        Forget(1),
    )
    assert [answer.sequence_id for answer in said] == [0, 2]


def test_a_batch_asks_in_one_message(
    drafter: PackedDrafter, target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    original = WorkerLink.send

    def watch(self: WorkerLink, message: Any) -> bool:
        sent.append(message)
        return original(self, message)

    monkeypatch.setattr(WorkerLink, "send", watch)
    with coordinating(lambda: drafter) as coordinator:
        together = run_all(
            target, async_drafter(coordinator, draft_length=5, patience_s=20.0), eight(target), 5
        )
    assert [one.ids for one in together] == [one.ids for one in plain(target)]
    asking = [message for message in sent if isinstance(message, DraftNow | Prepare | Together)]
    sizes = [len(message.requests) if isinstance(message, Together) else 1 for message in asking]
    assert sizes[:2] == [7, 7], "one has ended with its first token"
    rounds = max(len(one.rounds) for one in together)
    assert len(asking) <= 2 * rounds


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("miss_policy", ["draft_now", "bonus_only"])
def test_answers_are_plain_decodings_while_requests_come_and_go(
    max_batch: int, miss_policy: str, target: NativeTarget
) -> None:
    model = tiny_drafter(target.model, previous_token_width=8)
    with coordinating(lambda: PackedDrafter(model, 97)) as coordinator:
        drafter = async_drafter(
            coordinator, draft_length=5, outcome_budget=16, miss_policy=miss_policy, patience_s=20.0
        )
        together = run_all(target, drafter, eight(target), 5, max_batch)
        assert len(coordinator._sequences) == len(coordinator.cache) == 0
    assert [one.ids for one in together] == [one.ids for one in plain(target)]
    assert not any(one.faults for one in together)
    assert {"hit", "late"} & {way for one in together for way in readiness(one)}
    assert all(preparations(one)[0].readiness == "unprepared" for one in together if one.rounds), (
        "nobody has another's successors"
    )


@pytest.mark.parametrize("restarts", [0, 50])
def test_a_kill_while_requests_come_and_go_costs_speed_only(
    restarts: int, target: NativeTarget
) -> None:
    expected = plain(target)
    runs = eight(target)
    with coordinating(
        lambda: rehearsed([one.token_ids for one in expected], wrong=0.2), restarts=restarts
    ) as coordinator:
        drafter = async_drafter(coordinator)
        for number, _ in enumerate(decode(target, drafter, runs, max_batch=3)):
            if number % 11 == 5 and coordinator.link.worker is not None:
                coordinator.link.worker.kill()
        assert len(coordinator._sequences) == 0
    assert [one.ids for one in runs] == [one.ids for one in expected]
    assert [note for one in runs for note in notes(one)].count("the draft thread died") >= 1
    assert {cause for one in runs for cause in causes(one)} <= {"dead", "failed", "slow", "late"}


def test_one_that_raises_does_not_stop_its_batch_mates(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is the only one of 13 tokens."""
    original = PackedSession.branches

    def fail(self: PackedSession, task: PrepareTask) -> Any:
        if task.text[:13] == text(13, seed=1):
            raise RuntimeError("told to fail")
        return original(self, task)

    monkeypatch.setattr(PackedSession, "branches", fail)
    runs = [make(target, text(4 + 9 * number, seed=number), max_tokens=16) for number in range(3)]
    expected = [
        run_all(target, None, [make(target, text(4 + 9 * n, seed=n), max_tokens=16)])[0].ids
        for n in range(3)
    ]
    with coordinating(lambda: PackedDrafter(tiny_drafter(target.model), 97)) as coordinator:
        run_all(target, async_drafter(coordinator, draft_length=5, patience_s=20.0), runs, 5)
    assert [one.ids for one in runs] == expected
    assert set(causes(runs[1])) == {"failed"}
    assert not causes(runs[0])
    assert not causes(runs[2])
