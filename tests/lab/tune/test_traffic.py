"""Recorded traffic: what a line holds and what it does not, several writers, damage, and failures
that no answer suffers from."""

from __future__ import annotations

import json
import multiprocessing
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest
from d3d.lab.tune.traffic import ids_sha256, is_traffic, read_traffic, traffic_journal
from support.command import Outcome, d3d


@pytest.fixture
def given(tiny_target: Path, tiny_drafter: Path) -> tuple[object, ...]:
    return (
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--dtype",
        "float32",
        "--max-tokens",
        12,
    )


@pytest.fixture
def generate(given: tuple[object, ...]) -> Any:
    def run(*arguments: object, prompt: str = "a secret question") -> Outcome:
        target, drafter, rest = given[:2], given[2:4], given[4:]
        return d3d(
            "generate",
            "--prompt",
            prompt,
            *target,
            *(() if "plain" in arguments else drafter),
            *rest,
            "--json",
            *arguments,
        )

    return run


def test_a_line_tells_what_drafting_did_and_not_what_was_asked(
    generate: Any, tmp_path: Path
) -> None:
    log = tmp_path / "traffic.jsonl"
    first = generate(
        "--record", log, "--temperature", 0.5, "--seed", 1, "--stop", "private", "--draft-length", 4
    )
    second = generate("--record", log, "--mode", "plain")
    assert first.code == second.code == 0, first.err
    (serial, plain), damaged = read_traffic(log)
    assert damaged == 0
    assert (serial.mode, serial.kind, serial.options) == ("serial", "chat", {"draft_length": 4})
    assert serial.sampling == {"temperature": 0.5, "seed": 1, "stop": 1, "max_tokens": 12}
    assert serial.committed == first.record["usage"]["completion_tokens"] - 1
    assert len(serial.rounds) == first.record["speculation"]["rounds"]
    assert all(drafted >= kept for drafted, kept, _ in serial.rounds)
    assert serial.ms_per_token == pytest.approx(1000 * first.record["timing"]["tpot_s"])
    assert serial.prompt_tokens == first.record["usage"]["prompt_tokens"]
    assert serial.drafter is not None
    assert (plain.mode, plain.drafter, plain.options) == ("plain", None, {})
    assert plain.prompt_sha256 == serial.prompt_sha256
    assert plain.target == serial.target
    content = log.read_text()
    assert "secret" not in content
    assert "private" not in content
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_text_comes_along_only_where_it_was_asked_for(generate: Any, tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    generate("--record", log, "--record-text")
    generate("--record", log, "--record-text", "--raw", prompt="as it is")
    (chat, raw), _ = read_traffic(log)
    assert chat.messages == [{"role": "user", "content": "a secret question"}]
    assert (raw.kind, raw.text, raw.messages) == ("raw", "as it is", None)


def test_chat_records_each_turn(given: tuple[object, ...], tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    outcome = d3d(
        "chat",
        *given,
        "--record",
        log,
        "--record-text",
        "--system",
        "be brief",
        stdin="one\ntwo\n/new\nthree\n",
    )
    assert outcome.code == 0, outcome.err
    records, _ = read_traffic(log)
    assert [record.kind for record in records] == ["chat", "later turn", "chat"]
    assert [message["role"] for message in records[1].messages or ()] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_records_of_a_preset_file_have_its_options(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"target: {tiny_target}\ndrafter: {tiny_drafter}\nmode: serial\ndraft_confidence: 0.3\n"
    )
    d3d(
        "generate",
        "--model",
        tmp_path / "mine.yaml",
        "--prompt",
        "hello",
        "--max-tokens",
        4,
        "--record",
        tmp_path / "log.jsonl",
    )
    ((record,), _) = read_traffic(tmp_path / "log.jsonl")
    assert record.options == {"draft_length": 5, "draft_confidence": 0.3}


def test_a_file_that_can_not_be_written_costs_a_warning_and_no_answer(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr("d3d.files.os.write", full)
    outcome = generate("--record", tmp_path / "traffic.jsonl")
    assert outcome.code == 0
    assert outcome.record["usage"]["completion_tokens"] > 0
    assert "warning: the request was not recorded" in outcome.err
    assert "no space left" in outcome.err


def test_impossible_places_are_refused_before_the_model_is_loaded(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3d.loader.open_model", lambda *_, **__: pytest.fail("loaded"))
    assert generate("--record", tmp_path).is_refusal("--record", "directory")
    assert generate("--record", tmp_path / "no" / "such.jsonl").is_refusal("--record", "directory")
    assert generate("--record-text").is_refusal("--record-text", "--record")


def write_many(path: Path, name: str) -> None:
    for number in range(200):
        row = {"traffic": 1, "writer": name, "number": number, "padding": "x" * (number % 97) * 31}
        traffic_journal(path).append(json.dumps(row))


def test_writers_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    context = multiprocessing.get_context("spawn")
    writers: list[Any] = [context.Process(target=write_many, args=(log, "process"))]
    writers += [
        threading.Thread(target=write_many, args=(log, f"thread {number}")) for number in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # who looks at the end while another writes may take its line for torn, and ends it with a line
    # that is empty
    rows = [json.loads(line) for line in log.read_text().splitlines() if line]
    for name in ("process", "thread 0", "thread 1", "thread 2"):
        assert [row["number"] for row in rows if row["writer"] == name] == list(range(200))


def test_a_torn_line_costs_itself_only(generate: Any, tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    generate("--record", log)
    with log.open("a") as file:
        file.write('{"traffic": 1, "date": "2026')
    generate("--record", log)
    records, damaged = read_traffic(log)
    assert (len(records), damaged) == (2, 1)


def test_files_of_another_kind_are_told(tmp_path: Path) -> None:
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"prompt": "hello"}\n')
    assert not is_traffic(other)
    assert not is_traffic(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="no recorded request"):
        read_traffic(other)
    with pytest.raises(InvalidRequest, match="--record"):
        read_traffic(tmp_path / "nothing")


def test_a_prompts_hash_is_of_its_ids() -> None:
    assert ids_sha256([1, 23]) != ids_sha256([12, 3])
