"""Runs are fair, resumable and comparable, and what does not fit is refused before anything is
measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import d3d
from d3d.config import METHODS
from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import (
    Delivery,
    MethodOptions,
    Question,
    Sampling,
    Setting,
    TimedAnswer,
)
from d3d.lab.bench.harness import Benchmark, BenchPlan
from d3d.lab.bench.methods import Method, make_methods
from d3d.lab.bench.prompt_sets import read_set
from d3d.lab.bench.results import BenchRun, load_run, read_provenance
from d3d.lab.bench.rows import Row, append_rows, read_rows
from d3d.lab.report.benchmark import warnings

NAMES = ("serial", "ngram", "draft_model")


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> d3d.Model:
    return d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")


def written(directory: Path) -> str:
    file = directory / "mine.jsonl"
    rows = [
        {"id": "a", "prompt": "the cat"},
        {"id": "b", "turns": ["how much?", "and two?"]},
        {"id": "c", "prompt": "hello world"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return written(tmp_path)


@pytest.fixture
def plan(tmp_path: Path, prompts: str) -> BenchPlan:
    return BenchPlan(tmp_path / "run", (read_set(prompts),), max_tokens=(12,), draft_lengths=(3,))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, model: d3d.Model) -> Path:
    """Directory of a whole run of all methods; not to be changed."""
    directory = tmp_path_factory.mktemp("once")
    run(
        BenchPlan(
            directory / "run", (read_set(written(directory)),), max_tokens=(12,), draft_lengths=(3,)
        ),
        model,
    )
    return directory / "run"


@pytest.fixture
def finished(once: Path, plan: BenchPlan) -> BenchPlan:
    """A plan whose directory holds that run."""
    shutil.copytree(once, plan.directory)
    return plan


def bench(
    plan: BenchPlan,
    model: d3d.Model,
    names: Sequence[str] = NAMES,
    options: MethodOptions | None = None,
) -> Benchmark:
    return Benchmark(
        plan, model, make_methods(names, model, options or MethodOptions(), plan.sampling)
    )


def run(plan: BenchPlan, model: d3d.Model, names: Sequence[str] = NAMES) -> list[Row]:
    return bench(plan, model, names).run(lambda *_: None)


def watched(methods: list[Method], calls: list[tuple[str, tuple[int, ...], int]]) -> list[Method]:
    def watch(method: Method) -> Method:
        def answer(questions: Sequence[Question], setting: Setting) -> list[TimedAnswer]:
            calls.append(
                (
                    method.name,
                    tuple(len(question.token_ids) for question in questions),
                    setting.max_tokens,
                )
            )
            return method.answer(questions, setting)

        return replace(method, answer=answer)

    return [watch(method) for method in methods]


def test_every_method_answers_every_prompt_and_in_float32_like_plain(once: Path) -> None:
    rows = read_rows(once / "results.jsonl")
    assert len(rows) == 4 * 4
    plain = {(row.prompt_id, row.turn): row for row in rows if row.method == "plain"}
    assert sorted(plain) == [("a", 0), ("b", 0), ("b", 1), ("c", 0)]
    for row in rows:
        reference = plain[row.prompt_id, row.turn]
        assert row.token_ids == reference.token_ids
        assert row.prompt_tokens == reference.prompt_tokens
        assert (
            row.completion_tokens
            == len(row.token_ids or ())
            == sum(count for _, count in row.timing.deliveries)
        )
        assert (row.identity is None) == (row.acceptance is None) == (row.method == "plain")
        if row.identity is not None and row.acceptance is not None:
            assert row.identity.identical
            assert row.identity.plain_tokens == reference.completion_tokens
            assert row.setting.draft_length == 3
            committed = sum(one.num_committed for one in row.acceptance.each_round)
            assert committed == row.completion_tokens - 1
            assert row.acceptance.rounds > 0
        assert 0 < row.timing.ttft_s <= row.timing.total_s <= row.timing.batch_s
        assert (row.peak_memory_bytes or 0) > 1 << 20
    # one JSON object a line, with the names that readers look for
    first = json.loads((once / "results.jsonl").read_text().splitlines()[0])
    assert {
        "method",
        "set",
        "prompt_id",
        "prompt_tokens",
        "completion_tokens",
        "timing",
        "acceptance",
        "identity",
    } <= first.keys()


def test_methods_alternate_prompt_by_prompt_and_warm_up_unmeasured(
    plan: BenchPlan, model: d3d.Model
) -> None:
    calls: list[tuple[str, tuple[int, ...], int]] = []
    methods = watched(make_methods(NAMES, model, MethodOptions(), plan.sampling), calls)
    Benchmark(plan, model, methods).run(lambda *_: None)
    measured = [name for name, _, tokens in calls if tokens == 12]
    warm = [name for name, _, tokens in calls if tokens == 8]
    assert sorted(warm) == sorted(["plain", *NAMES])
    assert measured == [
        "plain",
        *NAMES,
        "plain",
        *NAMES[1:],
        *NAMES[:1],
        "plain",
        *NAMES[2:],
        *NAMES[:2],
        "plain",
        *NAMES,
    ]
    warm_up = (len(model.encode("Count from one to ten.")),)
    assert calls[0] == ("plain", warm_up, 8)
    assert calls[1][2] == 12
    assert all(lengths == warm_up for _, lengths, tokens in calls if tokens == 8)


def test_the_second_turn_goes_on_from_plains_answer(once: Path, model: d3d.Model) -> None:
    rows = [row for row in read_rows(once / "results.jsonl") if row.prompt_id == "b"]
    first = next(row for row in rows if row.turn == 0)
    conversation = [
        {"role": "user", "content": "how much?"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and two?"},
    ]
    assert {row.prompt_tokens for row in rows if row.turn == 1} == {len(model.encode(conversation))}


@pytest.mark.parametrize("torn", [0, 1, 40])
def test_a_run_that_was_killed_goes_on_behind_its_last_whole_row(
    finished: BenchPlan, model: d3d.Model, torn: int
) -> None:
    plan, file = finished, finished.directory / "results.jsonl"
    whole = read_rows(file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:7]) + lines[7][:torn])
    calls: list[tuple[str, tuple[int, ...], int]] = []
    methods = watched(make_methods(NAMES, model, MethodOptions(), plan.sampling), calls)
    progress: list[int] = []
    resumed = Benchmark(plan, model, methods)
    rows = resumed.run(lambda done, _: progress.append(done))
    assert file.read_bytes().startswith(b"".join(lines[:7]))
    assert [(row.key, row.token_ids) for row in rows] == [(row.key, row.token_ids) for row in whole]
    assert [row.key for row in read_rows(file)] == [row.key for row in whole]
    assert sum(tokens == 12 for _, _, tokens in calls) == 16 - 7
    assert progress[-1] == resumed.total == 16
    assert len(read_provenance(plan.directory)["sessions"]) == 2


def test_a_failed_answer_is_counted_is_in_no_figure_and_is_asked_again(
    plan: BenchPlan, model: d3d.Model
) -> None:
    fails = {"a": "out of pages"}

    def failing(question: Question, setting: Setting) -> TimedAnswer:
        is_a = "the cat" in question.messages[0]["content"]
        error = fails.get("a") if is_a or (setting.max_tokens < 12 and "warm" in fails) else None
        timed = (Delivery(0.1, 1), Delivery(0.2, 400))
        return TimedAnswer("x", None, 401, "stop", timed, wall_s=0.2, error=error)

    def go() -> BenchRun:
        plain, other = make_methods(["serial"], model, MethodOptions(), plan.sampling)
        peer = replace(
            other, name="server", answer=lambda asked, setting: [failing(q, setting) for q in asked]
        )
        Benchmark(plan, model, [plain, peer]).run(lambda *_: None)
        return load_run(plan.directory)

    fails["warm"] = ""
    with pytest.raises(InvalidRequest, match="method server: out of pages"):
        go()
    del fails["warm"]
    first = go()
    (row,) = [row for row in first.rows if row.error is not None]
    assert (row.prompt_id, row.identity, row.error) == ("a", None, "out of pages")
    (rows,) = [rows for group, rows in first.groups.items() if group.method == "server"]
    assert [row.prompt_id for row in rows] == ["b", "b", "c"]
    assert any("1 answers failed and are in no figure" in told for told in warnings(first))
    fails.clear()
    second = go()
    assert len(second.rows) == len(first.rows)
    assert not any(row.error for row in second.rows)


def test_a_finished_run_measures_nothing_and_more_may_be_added(
    plan: BenchPlan, model: d3d.Model
) -> None:
    run(plan, model, ["serial"])
    before = (plan.directory / "results.jsonl").read_bytes()
    run(plan, model, ["serial"])
    assert (plan.directory / "results.jsonl").read_bytes() == before
    rows = run(replace(plan, draft_lengths=(2, 3)), model, ["serial", "ngram"])
    assert (plan.directory / "results.jsonl").read_bytes().startswith(before)
    assert len(rows) == 4 * (1 + 2 + 2)


def test_batches_answer_like_single_prompts(plan: BenchPlan, model: d3d.Model) -> None:
    single = {(row.prompt_id, row.turn): row.token_ids for row in run(plan, model, ["serial"])}
    rows = run(
        replace(plan, directory=plan.directory.with_name("batch"), batches=(2,)), model, ["serial"]
    )
    assert {(row.prompt_id, row.turn, row.method): row.token_ids for row in rows} == {
        (*key, method): ids for key, ids in single.items() for method in ("plain", "serial")
    }
    sizes = {(row.prompt_id, row.turn): row.timing.batch_size for row in rows}
    assert sizes == {("a", 0): 2, ("b", 0): 2, ("b", 1): 1, ("c", 0): 1}
    assert {row.setting.batch for row in rows} == {2}


def test_sampled_answers_are_compared_too(plan: BenchPlan, model: d3d.Model) -> None:
    rows = run(replace(plan, sampling=Sampling(temperature=0.9, seed=5)), model)
    assert all(row.identity.identical for row in rows if row.identity is not None)
    greedy = run(replace(plan, directory=plan.directory.with_name("greedy")), model, [])
    assert [row.token_ids for row in rows if row.method == "plain"] != [
        row.token_ids for row in greedy
    ]


def test_provenance_tells_what_was_asked_and_where(once: Path, model: d3d.Model) -> None:
    known = read_provenance(once)
    assert known["fixed"]["target_fingerprint"] == model.target.fingerprint
    assert known["fixed"]["dtype"] == "float32"
    assert known["sets"]["mine"]["asked"] == 3
    (session,) = known["sessions"]
    assert session["versions"].keys() >= {"d3d", "python", "torch", "transformers"}
    assert session["machine"]["cores"] >= 1
    assert session["methods"]["serial"]["block_size"] == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": Sampling(temperature=0.5)}, "another temperature"),
        ({"sampling": Sampling(seed=1)}, "another seed"),
        ({"thinking": True}, "another thinking"),
    ],
    ids=str,
)
def test_another_run_in_the_same_directory_is_refused(
    finished: BenchPlan, model: d3d.Model, change: dict[str, Any], words: str
) -> None:
    plan = finished
    before = (plan.directory / "provenance.json").read_bytes()
    with pytest.raises(InvalidRequest, match=words):
        run(replace(plan, **change), model, ["serial"])
    assert (plan.directory / "provenance.json").read_bytes() == before


def test_another_drafter_and_another_version_of_a_set_are_refused(
    finished: BenchPlan, model: d3d.Model, prompts: str
) -> None:
    plan = finished
    with pytest.raises(InvalidRequest, match="another method draft_model"):
        bench(
            plan,
            model,
            ["draft_model"],
            MethodOptions(draft_model=str(model.target.path), dtype="float32"),
        ).run(lambda *_: None)
    Path(prompts).write_text('{"prompt": "other"}\n')
    with pytest.raises(InvalidRequest, match="another set mine"):
        run(replace(plan, sets=(read_set(prompts),)), model, [])


def test_two_runs_do_not_write_to_one_directory(plan: BenchPlan, model: d3d.Model) -> None:
    inner: list[str] = []

    def show(done: int, text: str) -> None:
        if not inner:
            with pytest.raises(InvalidRequest, match="another benchmark is at work"):
                run(plan, model, [])
            inner.append(text)

    bench(plan, model, []).run(show)
    assert inner


@pytest.mark.parametrize(
    ("names", "options", "sampling", "words"),
    [
        (["nope"], MethodOptions(), Sampling(), "there are plain, serial"),
        (["transformers"], MethodOptions(), Sampling(temperature=1.0), "compared greedily"),
        (["transformers_assistant"], MethodOptions(), Sampling(), "--draft-model"),
        (["server"], MethodOptions(), Sampling(), "--server-url"),
        (
            ["server"],
            MethodOptions(server_url="http://x/v1"),
            Sampling(ignore_eos=True),
            "--ignore-eos",
        ),
        (["llama_cpp"], MethodOptions(), Sampling(), "--gguf"),
        (["llama_cpp"], MethodOptions(gguf="missing.gguf"), Sampling(), "no file"),
    ],
    ids=str,
)
def test_what_a_method_lacks_is_told(
    model: d3d.Model, names: list[str], options: MethodOptions, sampling: Sampling, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make_methods(names, model, options, sampling)


def test_methods_that_need_a_drafter_say_so(tiny_target: Path) -> None:
    bare = d3d.load(str(tiny_target), device="cpu", dtype="float32")
    for name in ("serial", "draft_model"):
        with pytest.raises(InvalidRequest, match="drafter"):
            make_methods([name], bare, MethodOptions(), Sampling())


def test_peers_take_no_batches_and_drafts_have_an_end(plan: BenchPlan, model: d3d.Model) -> None:
    with pytest.raises(InvalidRequest, match="one prompt at a time"):
        bench(replace(plan, batches=(2,)), model, ["transformers"])
    with pytest.raises(
        InvalidRequest, match="7 is not within 1 and the most that the drafter can draft, 6"
    ):
        bench(replace(plan, draft_lengths=(7,)), model, ["serial"])


def test_every_mode_takes_part_with_the_times_of_its_rounds_alone_and_in_batches(
    plan: BenchPlan, model: d3d.Model
) -> None:
    for batch in (1, 2):
        rows = run(
            replace(plan, directory=plan.directory.with_name(f"batch{batch}"), batches=(batch,)),
            model,
            list(METHODS),
        )
        plain = {row.prompt_id: row.token_ids for row in rows if row.method == "plain"}
        for mode in list(METHODS)[1:]:
            mine = [row for row in rows if row.method == mode]
            assert {row.prompt_id: row.token_ids for row in mine} == plain
            assert all(row.acceptance is not None and row.acceptance.each_round for row in mine)


def test_a_damaged_row_in_the_middle_is_told_by_its_line(
    finished: BenchPlan, model: d3d.Model
) -> None:
    file = finished.directory / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + "{broken\n" + "".join(lines[1:]))
    with pytest.raises(InvalidRequest, match="line 2"):
        run(finished, model, [])


RESULTS = Path(__file__).parents[3] / "results" / "bench-fast" / "results.jsonl"


def test_rows_of_format_1_whose_rounds_are_arrays_stay_readable(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert any(
        isinstance(line["acceptance"]["each_round"][0], list)
        for line in lines
        if line["acceptance"]
    )
    rows = read_rows(RESULTS)
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        arrays = line["acceptance"]["each_round"] if line["acceptance"] else []
        assert [list(round_[:5]) for round_ in row.rounds] == [array[:5] for array in arrays]
        assert [round_.readiness for round_ in row.rounds] == [array[5] for array in arrays]
    append_rows(tmp_path / "again.jsonl", rows)
    assert read_rows(tmp_path / "again.jsonl") == rows


def test_a_torn_last_row_is_left_out_and_cut_off_before_the_next(finished: BenchPlan) -> None:
    file = finished.directory / "results.jsonl"
    rows = read_rows(file)
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    assert read_rows(file) == rows[:-1]
    append_rows(file, rows[-1:])
    assert file.read_bytes() == content


def test_prompts_that_cannot_be_asked_are_left_out_also_when_it_goes_on(
    tmp_path: Path, model: d3d.Model
) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [
        {"id": "a", "prompt": "x \ud800"},
        {"id": "b", "prompt": "the cat " * 200},
        {"id": "c", "turns": ["the cat", "sat " * 300, "on"]},
        {"id": "d", "prompt": "hello"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = BenchPlan(tmp_path / "run", (read_set(str(file)),), max_tokens=(4,), batches=(1, 2))
    for _ in range(2):
        made = bench(plan, model, ("ngram",))
        answered = made.run(lambda *_: None)
        assert {(row.prompt_id, row.turn) for row in answered} == {("c", 0), ("d", 0)}
        assert len(answered) == 2 * 2 * 2
        (too_long,) = made.left_out.lines()
        assert "left out 2 rows: a prompt that leaves no room" in too_long
        assert f"{file}, line 2" in too_long
    (no_text,) = plan.sets[0].left_out.lines()
    assert "not valid Unicode" in no_text
    assert f"{file}, line 1" in no_text
