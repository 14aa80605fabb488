"""Other programs answer through their public interface, and their answers are timed as they
come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import d3d
from d3d.errors import InvalidCheckpoint, InvalidRequest, MissingExtra
from d3d.lab.bench import peers
from d3d.lab.bench.answers import MethodOptions, Question, Sampling, Setting, TimedAnswer
from d3d.lab.bench.methods import make_methods
from d3d.lab.bench.own import answer_together
from d3d.lab.bench.peers.llama_cpp import LlamaCpp, gguf_file
from d3d.lab.bench.peers.openai_server import OpenAIServer, spread
from d3d.lab.bench.peers.transformers import TransformersPeer
from support.tiny_model import write_tiny_target

SETTING = Setting(max_tokens=10)
DRAFTED = Setting(max_tokens=10, draft_length=3)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> d3d.Model:
    return d3d.load(str(tiny_target), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def question(model: d3d.Model) -> Question:
    messages = [{"role": "user", "content": "the cat sat on the mat the cat"}]
    return Question(model.encode(messages), messages)


@pytest.fixture(scope="module")
def plain(model: d3d.Model, question: Question) -> TimedAnswer:
    return answer_together(
        model, model.built(model.config(method="plain")), [question], SETTING, Sampling()
    )[0]


def check_deliveries(answer: TimedAnswer) -> None:
    times = [delivery.at_s for delivery in answer.deliveries]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] <= answer.wall_s
    assert sum(delivery.num_tokens for delivery in answer.deliveries) == answer.num_tokens


@pytest.mark.parametrize(
    ("kind", "setting"), [("plain", SETTING), ("lookup", DRAFTED), ("assistant", DRAFTED)]
)
def test_transformers_answers_like_plain(
    model: d3d.Model, question: Question, plain: TimedAnswer, kind: str, setting: Setting
) -> None:
    peer = TransformersPeer(model.target, kind, str(model.target.path))
    answer = peer.answer(question, setting)
    assert answer.token_ids == plain.token_ids
    assert answer.text == plain.text
    assert answer.finish_reason == plain.finish_reason
    check_deliveries(answer)
    if kind == "assistant":
        assert max(delivery.num_tokens for delivery in answer.deliveries) > 1
    assert peer.describe()["transformers"]
    peer.close()


def test_transformers_ends_where_plain_ends(
    model: d3d.Model, question: Question, plain: TimedAnswer
) -> None:
    from dataclasses import replace

    assert plain.token_ids is not None
    end = plain.token_ids[4]
    cut = plain.token_ids[: plain.token_ids.index(end) + 1]
    target = replace(model.target, eos_token_ids=frozenset({end}))
    answer = TransformersPeer(target, "plain").answer(question, SETTING)
    assert (answer.token_ids, answer.finish_reason) == (cut, "stop")
    assert (
        TransformersPeer(target, "plain", ignore_eos=True).answer(question, SETTING).token_ids
        == plain.token_ids
    )


def test_an_assistant_of_another_tokenizer_is_refused(model: d3d.Model, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", texts=["zigzag zebra zoo"] * 9)
    with pytest.raises(InvalidCheckpoint, match="tokenizers differ"):
        TransformersPeer(model.target, "assistant", str(other))
    with pytest.raises(InvalidCheckpoint, match="tokenizers differ"):
        make_methods(
            ["draft_model"],
            model,
            MethodOptions(draft_model=str(other), dtype="float32"),
            Sampling(),
        )


Handler = Callable[[Any], Any]


def server(
    chunks: list[dict[str, Any]], *, status: int = 200, seen: list[dict[str, Any]] | None = None
) -> OpenAIServer:
    """One that answers with these chunks."""
    http = pytest.importorskip("httpx2")

    def handle(request: Any) -> Any:
        if request.url.path == "/v1/models":
            return http.Response(200, json={"data": [{"id": "served"}]})
        if seen is not None:
            seen.append(json.loads(request.content))
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + [
            ": ping\n\n",
            "data: [DONE]\n\n",
        ]
        return http.Response(status, text="".join(lines) if status == 200 else "out of order")

    return OpenAIServer("http://test/v1/", transport=http.MockTransport(handle))


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


def test_a_server_streams(question: Question) -> None:
    seen: list[dict[str, Any]] = []
    chunks = [
        delta(role="assistant"),
        delta(reasoning_content="hmm "),
        delta(content="four"),
        delta(content="teen"),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 6}},
    ]
    answer = server(chunks, seen=seen).answer(question, SETTING)
    assert (answer.text, answer.num_tokens, answer.finish_reason, answer.token_ids) == (
        "hmm fourteen",
        6,
        "stop",
        None,
    )
    assert [delivery.num_tokens for delivery in answer.deliveries] == [2, 2, 2]
    check_deliveries(answer)
    assert seen[0]["messages"] == question.messages
    assert (seen[0]["model"], seen[0]["max_tokens"], seen[0]["temperature"]) == ("served", 10, 0.0)


ENDED = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([delta(content="a"), {"error": {"message": "out of pages", "code": 500}}], "out of pages"),
        ([{"error": "busy"}, ENDED], "busy"),
        ([delta(content="a"), {"object": "error", "message": "overloaded"}], "overloaded"),
        ([delta(content="a")], "ended without a finish_reason"),
        ([], "ended without a finish_reason"),
        ([{"choices": [{"delta": {}, "finish_reason": "abort"}]}], "finish_reason abort"),
        ([delta(content="a"), [1]], "[1]"),
    ],
)
def test_an_answer_that_breaks_off_is_marked(
    chunks: list[Any], words: str, question: Question
) -> None:
    answer = server(chunks).answer(question, SETTING)
    assert answer.error is not None
    assert words in answer.error
    assert server([delta(content="a"), ENDED]).answer(question, SETTING).error is None


def test_a_connection_that_breaks_in_an_answer_is_marked(question: Question) -> None:
    http = pytest.importorskip("httpx2")

    class Breaking(http.SyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[bytes]:
            yield f"data: {json.dumps(delta(content='a'))}\n\n".encode()
            raise http.ReadError("reset by peer")

    transport = http.MockTransport(lambda _: http.Response(200, stream=Breaking()))
    answer = OpenAIServer("http://test/v1", "m", transport=transport).answer(question, SETTING)
    assert (answer.text, answer.error) == ("a", "the server broke off: ReadError: reset by peer")


def test_llama_cpps_answer_that_breaks_off_is_marked(
    monkeypatch: pytest.MonkeyPatch, question: Question, model: d3d.Model
) -> None:
    piece = {"choices": [{"text": "a", "finish_reason": None}], "timings": {"predicted_n": 1}}
    peer = object.__new__(LlamaCpp)
    peer._ignore_eos, peer._line = False, SimpleNamespace(send=lambda _: None)

    def told(*messages: Any) -> TimedAnswer:
        left = iter(messages)
        monkeypatch.setattr(peer, "_receive", lambda: next(left))
        return peer.answer(question, SETTING)

    assert "no slot" in (told(piece, {"error": {"message": "no slot"}}, None).error or "")
    assert "without a finish_reason" in (told(piece, None).error or "")
    end = {"choices": [{"text": "", "finish_reason": "stop"}]}
    assert told(piece, end, None).error is None
    with pytest.raises(InvalidRequest, match="refuses a prompt"):
        told({"error": "too long"}, None)


def test_tokens_are_shared_out_by_characters() -> None:
    assert [one.num_tokens for one in spread([(0.1, "a"), (0.2, "bbbbb"), (0.3, "cc")], 4)] == [
        1,
        2,
        1,
    ]
    assert [one.num_tokens for one in spread([(0.1, "aaaa"), (0.2, "b")], 1)] == [1]
    assert list(spread([], 0)) == []


def test_a_server_that_fails_is_told(question: Question) -> None:
    http = pytest.importorskip("httpx2")
    with pytest.raises(InvalidRequest, match="answers 500: out of order"):
        server([], status=500).answer(question, SETTING)

    def refuse(_: Any) -> Any:
        raise http.ConnectError("nobody there")

    with pytest.raises(InvalidRequest, match="nobody there"):
        OpenAIServer("http://test/v1", transport=http.MockTransport(refuse))
    with pytest.raises(InvalidRequest, match="names no model"):
        OpenAIServer(
            "http://test/v1",
            transport=http.MockTransport(lambda _: http.Response(200, json={"data": []})),
        )


def test_an_absent_library_is_told_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, model: d3d.Model
) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(peers, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"pip install 'd3d-decoding\[bench\]'"):
        LlamaCpp(Path("x.gguf"), model.target)
    with pytest.raises(MissingExtra, match="httpx2"):
        OpenAIServer("http://test/v1")


def test_the_gguf_file_is_the_targets_own_or_the_one_that_was_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert gguf_file(str(file), None) == gguf_file("org/name", str(file)) == file
    with pytest.raises(InvalidRequest, match="--gguf"):
        gguf_file("org/name", None)


@pytest.mark.real_model
def test_llama_cpp_runs_the_presets_own_file(smollm2: Path) -> None:
    pytest.importorskip("xllamacpp")
    model = d3d.load("smollm2-135m", plain=True, dtype="float32")
    messages = [{"role": "user", "content": "Write the word yes."}]
    question = Question(model.encode(messages), messages)
    peer = LlamaCpp(gguf_file("smollm2-135m", None), model.target)
    answer = peer.answer(question, Setting(max_tokens=6))
    assert answer.text.strip()
    assert 0 < answer.num_tokens <= 6
    check_deliveries(answer)
    with pytest.raises(InvalidRequest, match="refuses a prompt"):
        peer.answer(Question([5] * 9000, messages), SETTING)
    assert peer.describe()["sha256"]
    peer.close()
