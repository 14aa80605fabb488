"""`Model.add`: requests that come and go while others run."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import d3d
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.errors import InvalidRequest

LONG = {"max_tokens": 60, "ignore_eos": True}
PROMPTS = [[5 + place, 17, 80, 3 + place] for place in range(6)]


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> Iterator[d3d.Model]:
    with d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def _nothing_is_left(model: d3d.Model) -> Iterator[None]:
    yield
    assert model.parts.target.num_held == 0
    assert all(not built.drafter or not built.drafter.num_held for built in model._built.values())


def plain(model: d3d.Model, prompt: list[int], **options: Any) -> tuple[int, ...]:
    return model.generate(prompt, method="plain", **{**LONG, **options}).token_ids


@pytest.mark.parametrize("method", ["plain", "serial", "fused", "async", "auto", "ngram"])
def test_requests_join_at_any_round_and_are_answered_as_if_alone(
    model: d3d.Model, method: str
) -> None:
    handles = []
    for prompt in PROMPTS:
        handles.append(model.add(prompt, method=method, **LONG))
        for _ in range(3):
            assert model.step()
    results = [handle.result() for handle in handles]
    assert [result.token_ids for result in results] == [plain(model, p) for p in PROMPTS]
    assert not model.step(), "there is nothing left to do"


def test_iterating_one_handle_brings_the_others_on(model: d3d.Model) -> None:
    first, second = (model.add(prompt, **LONG) for prompt in PROMPTS[:2])
    chunks = list(first)
    assert [i for chunk in chunks for i in chunk.token_ids] == list(plain(model, PROMPTS[0]))
    assert chunks[-1].result is not None
    assert chunks[-1].result == first.result()
    assert second.request.num_answer_tokens > 1
    assert second.result().token_ids == plain(model, PROMPTS[1])


def test_chunks_can_be_awaited(model: d3d.Model) -> None:
    async def answer(prompt: list[int]) -> list[int]:
        handle = model.add(prompt, **LONG)
        return [token_id async for chunk in handle for token_id in chunk.token_ids]

    async def answers() -> list[list[int]]:
        return list(await asyncio.gather(*map(answer, PROMPTS[:3])))

    found = asyncio.run(answers())
    assert [tuple(ids) for ids in found] == [plain(model, prompt) for prompt in PROMPTS[:3]]


def test_a_cancelled_request_returns_what_it_has(model: d3d.Model) -> None:
    whole = plain(model, PROMPTS[0])
    handle, other = model.add(PROMPTS[0], **LONG), model.add(PROMPTS[1], **LONG)
    model.step()
    model.step()
    handle.cancel()
    result = handle.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < len(whole)
    assert result.token_ids == whole[: len(result.token_ids)]
    assert other.result().token_ids == plain(model, PROMPTS[1])
    handle.cancel()
    assert other.result().finish_reason == "length"


def test_one_that_is_cancelled_before_its_first_token_is_empty(model: d3d.Model) -> None:
    handle = model.add(PROMPTS[0], **LONG)
    handle.cancel()
    result = handle.result()
    assert (result.token_ids, result.text, result.finish_reason) == ((), "", "cancelled")
    assert list(handle) == []


def test_close_cancels_all_and_the_model_stays_of_use(model: d3d.Model) -> None:
    handles = [model.add(prompt, **LONG) for prompt in PROMPTS[:3]]
    model.step()
    model.close()
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 3
    assert model.generate(PROMPTS[0], **LONG).token_ids == plain(model, PROMPTS[0])


def test_a_request_that_the_target_fails_on_raises_from_result(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[LogitRows]:
        raise RuntimeError("out of luck")

    handle = model.add(PROMPTS[0], method="plain", **LONG)
    model.step()
    monkeypatch.setattr(model.parts.target, "verify", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        handle.result()
    with pytest.raises(RuntimeError, match="out of luck"):
        list(handle)


def test_impossible_requests_are_refused_when_they_are_added(model: d3d.Model) -> None:
    with pytest.raises(InvalidRequest, match="rows: method serial has no such option"):
        model.add(PROMPTS[0], method="serial", rows=8)
    with pytest.raises(InvalidRequest, match="prompt: it is empty"):
        model.add("")
    with pytest.raises(InvalidRequest, match=r"messages .* or token ids, nothing else"):
        model.add([True, False])


def test_threads_add_iterate_and_cancel_while_others_step(model: d3d.Model) -> None:
    whole = [plain(model, prompt) for prompt in PROMPTS]
    found: dict[int, tuple[int, ...]] = {}

    def answer(place: int) -> None:
        handle = model.add(
            PROMPTS[place % 6], method=("plain", "serial", "fused")[place % 3], **LONG
        )
        if place % 4 == 3:
            next(iter(handle))
            handle.cancel()
        found[place] = handle.result().token_ids

    threads = [threading.Thread(target=answer, args=(place,)) for place in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 18
    for place, ids in found.items():
        expected = whole[place % 6]
        assert ids == (expected[: len(ids)] if place % 4 == 3 else expected)


def test_a_reader_waits_for_the_last_chunk_of_an_answer_that_the_engine_has_ended(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = model.add(PROMPTS[0], method="plain", max_tokens=2, ignore_eos=True)
    assert model.step()
    committed, read = threading.Event(), threading.Event()
    rewind = model.parts.target.rewind

    def linger(requests: Sequence[Request]) -> None:
        rewind(requests)
        committed.set()
        read.wait(0.5)

    monkeypatch.setattr(model.parts.target, "rewind", linger)
    stepping = threading.Thread(target=model.step)
    stepping.start()
    assert committed.wait(60)
    assert handle.request.finished
    assert not handle.finished
    result = handle.result()
    read.set()
    stepping.join(60)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 2)
    assert [len(chunk.token_ids) for chunk in handle] == [1, 1]


def test_no_chunk_is_lost_while_threads_add(model: d3d.Model) -> None:
    found = []

    def answer(place: int) -> None:
        for _ in range(15):
            handle = model.add(PROMPTS[place], method="plain", max_tokens=3, ignore_eos=True)
            found.append((handle.result().finish_reason, len(handle.result().token_ids)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=answer, args=(place,)) for place in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert found == [("length", 3)] * 90


def test_an_abandoned_handle_is_forgotten_at_once(model: d3d.Model) -> None:
    next(model.stream(PROMPTS[0], method="plain", **LONG))
    assert not any(stepper._handles for stepper in model._steppers.values())


def test_a_reader_that_goes_away_leaves_nothing_behind(model: d3d.Model) -> None:
    chunks = model.stream(PROMPTS[0], **LONG)
    next(chunks)
    assert model.parts.target.num_held == 1
    chunks.close()  # type: ignore[attr-defined]
    assert model.parts.target.num_held == 0


def test_an_answer_that_ends_in_a_step_under_way_is_whole(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plain(model, PROMPTS[0], max_tokens=2)
    handle = model.add(PROMPTS[0], method="plain", max_tokens=2, ignore_eos=True)
    model.step()
    committed, go_on = threading.Event(), threading.Event()
    rewind = model.parts.target.rewind

    def wait(requests: Any) -> None:
        committed.set()
        assert go_on.wait(60)
        rewind(requests)

    monkeypatch.setattr(model.parts.target, "rewind", wait)
    found = []
    step = threading.Thread(target=model.step)
    step.start()
    assert committed.wait(60)
    reader = threading.Thread(target=lambda: found.append(handle.result()))
    reader.start()
    reader.join(0.2)
    go_on.set()
    step.join(60)
    reader.join(60)
    assert (found[0].finish_reason, found[0].token_ids) == ("length", whole)


def test_one_that_joins_while_a_step_ends_is_not_forgotten(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model.add(PROMPTS[0], method="plain", max_tokens=1, ignore_eos=True)
    others = []

    class Joins(dict[Any, Any]):
        """A request joins while it is looped over."""

        def items(self) -> Any:
            yield from list(super().items())
            if not others:
                others.append(model.add(PROMPTS[1], method="plain", **LONG))

        def values(self) -> Any:
            return [handle for _, handle in self.items()]

    stepper = next(s for c, s in model._steppers.items() if c.method == "plain")
    monkeypatch.setattr(stepper, "_handles", Joins(stepper._handles))
    assert len(first.result().token_ids) == 1
    assert others[0].result().token_ids == plain(model, PROMPTS[1])


def test_threads_that_use_a_method_first_share_its_stepper(model: d3d.Model) -> None:
    fresh, barrier = d3d.Model(model.parts), threading.Barrier(4)
    handles = []

    def begin(place: int) -> None:
        barrier.wait()
        handles.append(fresh.add(PROMPTS[place], method="serial", **LONG))

    threads = [threading.Thread(target=begin, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while fresh.step():
        pass
    assert [handle.finished for handle in handles] == [True] * 4
    assert len(fresh._built) == 1


@pytest.mark.parametrize("call", ["stream", "stream_many"])
def test_a_reader_that_is_collected_in_a_step_leaves_nothing_behind(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    prompt: Any = PROMPTS[0] if call == "stream" else PROMPTS[:2]
    readers = [getattr(model, call)(prompt, method="serial", **LONG)]
    next(readers[0])
    verify = model.parts.target.verify

    def collect(*arguments: Any) -> list[LogitRows]:
        readers.clear()
        return verify(*arguments)

    monkeypatch.setattr(model.parts.target, "verify", collect)
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: found.append(plain(model, PROMPTS[1])), daemon=True)
    thread.start()
    thread.join(60)
    gc.collect()
    assert found, "the step waits for nobody"
    assert model.parts.target.num_held == 0


def test_close_ends_answers_to_many_prompts(model: d3d.Model) -> None:
    chunks = model.stream_many(PROMPTS[:3], **LONG)
    next(chunks)
    model.close()
    assert model.parts.target.num_held == 0
    results = {index: chunk.result for index, chunk in chunks if chunk.result is not None}
    assert [results[index].finish_reason for index in range(3)] == ["cancelled"] * 3


def test_an_interrupted_step_cancels_what_it_has_left_half_done(
    model: d3d.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [model.add(PROMPTS[n], method=("plain", "serial")[n == 2], **LONG) for n in range(3)]
    for _ in range(3):
        model.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.parts.target, "rewind", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(handles[0])
    results = [handle.result() for handle in handles]
    assert [result.finish_reason for result in results] == ["cancelled", "cancelled", "length"]
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert result.token_ids == plain(model, prompt)[: len(result.token_ids)]


def test_an_async_reader_that_is_cancelled_can_go_on(model: d3d.Model) -> None:
    async def answer() -> list[int]:
        handle, ids = model.add(PROMPTS[0], **LONG), []

        async def read() -> None:
            async for chunk in handle:
                ids.extend(chunk.token_ids)

        while not handle.finished:
            reader = asyncio.create_task(read())
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            await asyncio.sleep(0.001)
        await read()
        return ids

    assert tuple(asyncio.run(answer())) == plain(model, PROMPTS[0])


def test_vllms_and_transformers_names_are_understood(model: d3d.Model) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    result = model.generate(PROMPTS[0], speculative_config=config, **LONG)
    assert result.token_ids == plain(model, PROMPTS[0])
    assert result.speculation is not None
    assert (result.speculation.mode, result.speculation.draft_length) == ("ngram", 4)
    assert result.speculation.lookup_rounds > 0
    for options in ({"num_assistant_tokens": 3}, {"num_speculative_tokens": 3}):
        speculation = model.generate(PROMPTS[0], **options, **LONG).speculation
        assert speculation is not None
        assert speculation.draft_length == 3
    unset = model.config(speculative_config={"num_speculative_tokens": None}, draft_length=3)
    assert unset.max_draft_length == 3
    looked_up = model.generate(PROMPTS[0], prompt_lookup_num_tokens=2, **LONG).speculation
    assert looked_up is not None
    assert (looked_up.mode, looked_up.draft_length) == ("ngram", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 10**30}, "less than or equal to 1024"),
        ({"method": "ngram", "prompt_lookup_max": 10**30}, "less than or equal to 1024"),
        ({"speculative_config": {"metod": "ngram"}}, "there is no key 'metod'; there are: method"),
        ({"speculative_config": {"num_speculative_token": 5}}, "'num_speculative_tokens'?"),
        ({"speculative_config": "{"}, "speculative_config: it is not JSON"),
        ({"speculative_config": {"model": "x"}}, "the drafter is named when the model is loaded"),
        ({"method": "serial", "mode": "plain"}, "'serial' and 'plain' are both asked for"),
        ({"draft_length": 3, "num_assistant_tokens": 4}, "are one option"),
        (
            {"draft_length": 3, "speculative_config": {"num_speculative_tokens": 2}},
            "draft_length: 2 in speculative_config and 3",
        ),
        ({"method": "serial", "prompt_lookup_num_tokens": 2}, "'serial' and 'ngram' are both"),
        ({"draft_length": 3, "prompt_lookup_num_tokens": 2}, "draft_length: 2 in"),
        ({"method": ""}, "method: '' is not one of"),
        ({"method": ["serial"]}, "method: ['serial'] is not a name"),
        ({"speculative_config": {"method": " "}}, "method: ' ' is not a name"),
        ({"speculative_config": "[" * 100_000}, "speculative_config: it is not JSON"),
        (
            {"speculative_config": {"prompt_lookup_min": 4, "prompt_lookup_max": 2}},
            "prompt_lookup_min",
        ),
    ],
)
def test_contradictions_and_typos_are_named(
    model: d3d.Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model.add(PROMPTS[0], **options)
    assert message in str(caught.value)


def test_every_option_of_a_request_is_typed() -> None:
    from d3d.config import OPTION_ALIASES, OPTIONS
    from d3d.request_options import RequestOptions, SamplingOptions, SpeculationOptions

    assert SamplingOptions.__annotations__.keys() == d3d.SamplingParams.model_fields.keys()
    extra = {"method", "mode", "prompt_lookup_num_tokens", "speculative_config"}
    names = OPTIONS.keys() | OPTION_ALIASES.keys() | extra
    assert SpeculationOptions.__annotations__.keys() == names
    assert RequestOptions.__annotations__.keys() >= names | {"raw", "thinking"}
