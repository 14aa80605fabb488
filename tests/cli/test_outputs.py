"""What commands write: files of others are never touched, one process works in a place, and a full
disk is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from d3d.cli.app import app
from d3d.engine.round import Round
from d3d.engine.trace import chrome_trace
from d3d.files import alone_in, alone_with
from support.bench_rows import example_rows, write_run
from support.command import Outcome, d3d

FOREIGN = b'[{"prompt": "a"}]'
TINY = ("--dtype", "float32", "--device", "cpu")


class Writes(NamedTuple):
    """A command, and the files that it writes into the current directory."""

    command: str
    """{name} stands for a part."""
    outputs: tuple[str, ...]
    held: str
    """Directory, with a slash, or file that it holds."""


MODEL = "--target {target} --dtype float32 --device cpu"
TUNE = "tune {prompts} out --trials 1 --finalists 1 --mode serial --threads 1 --max-tokens 4"
SET = "--set {prompts} --max-tokens 4 --prompts 1 --results ."
WRITES = {
    "data": Writes(
        f"data out.jsonl --prompts {{prompts}} --max-tokens 4 {MODEL}",
        ("out.jsonl", "out.manifest.json"),
        "out.jsonl",
    ),
    "data, shards": Writes(
        f"data out --shard-answers 2 --prompts {{prompts}} --max-tokens 4 {MODEL}",
        ("out", "out/answers-00000.jsonl", "out/manifest.json"),
        "out/",
    ),
    "train": Writes(
        f"train {{corpus}} out --held-out {{held_out}} --config {{config}} {MODEL}",
        ("out", "out/log.jsonl", "out/state.pt", "out/best", "out/best/notes.txt"),
        "out/",
    ),
    "prune": Writes(
        "prune {drafter} {corpus} out --target {target} --draft-length 2 --no-pictures",
        ("out", *(f"out/{name}" for name in ("log.jsonl", "curve.json", "curve.md", "curve.svg"))),
        "out/",
    ),
    "export": Writes("export {drafter} out --target {target}", ("out", "out/mine.txt"), "out"),
    "tune": Writes(
        f"{TUNE} --drafter {{drafter}} --target {{target}} --dtype float32",
        ("out", "out/search.log", "out/confirmed.jsonl", "out/preset.yaml"),
        "out/",
    ),
    "profile": Writes(
        "profile out.json --placement thread --context 8 --draft-length 1 --outcomes 1 --repeats 1 "
        f"--drafter {{drafter}} {MODEL}",
        ("out.json", "out.json.samples.jsonl"),
        "out.json",
    ),
    "bench run": Writes(
        f"bench run out {SET} --method serial --drafter {{drafter}} {MODEL}",
        ("out", "out/provenance.json", "out/results.jsonl"),
        "out/",
    ),
    "bench identity": Writes(
        f"bench identity out {SET} --method serial --drafter {{drafter}} --target {{target}}",
        tuple(f"out/{name}" for name in ("identity.json", "report.md", "report.html")),
        "out/",
    ),
    "bench report": Writes(
        "bench report {run} --output out",
        ("out", "out/report.md", "out/report.html", "out/pictures/acceptance_at.svg"),
        "out/report.md",
    ),
    "bench compare": Writes(
        "bench compare {run} {other_run} --output out",
        ("out", "out/report.md", "out/report.html"),
        "out/report.md",
    ),
    "generate": Writes(
        f"generate hello --max-tokens 4 --trace out.json {MODEL}", ("out.json",), "out.json"
    ),
    "generate, record": Writes(
        f"generate hello --max-tokens 4 --record out.jsonl {MODEL}", ("out.jsonl",), ""
    ),
    "chat": Writes(f"chat --max-tokens 4 --record out.jsonl {MODEL}", ("out.jsonl",), ""),
    "timeline": Writes("timeline {trace} --out out.svg", ("out.svg",), "out.svg"),
    "timeline, png": Writes("timeline {trace} --out out.png", ("out.png",), "out.png"),
}
READ_ONLY = {"serve", "calibrate", "demo", "doctor", "evaluate", "plan", "pull", "show"}
"""They write to the cache at most, where files of others are renamed (tests/hub)."""
SHARED = {"generate, record", "chat"}
"""Several processes may write to a record of requests."""


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_drafter: Path
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parts")
    made = {
        "target": tiny_target,
        "drafter": tiny_drafter,
        **{name: root / f"{name}.jsonl" for name in ("prompts", "corpus", "held_out")},
        "config": root / "train.yaml",
        "trace": root / "trace.json",
    }
    for name, words in (("prompts", "cat mat two much"), ("held_out", "hello world")):
        lines = [json.dumps({"prompt": f"say {word}"}) + "\n" for word in words.split()]
        made[name].with_suffix(".in.jsonl").write_text("".join(lines))
    made["prompts"] = root / "prompts.in.jsonl"
    for name, source in (("corpus", "prompts"), ("held_out", "held_out")):
        given = ("--prompts", root / f"{source}.in.jsonl", "--target", tiny_target)
        assert d3d("data", made[name], *given, "--max-tokens", 16, *TINY).code == 0
    stage = "stages: [{share: 1.0, block_size: 4, anchors: 2, decay: 4.0}]"
    made["config"].write_text(
        "drafter: {block_size: 4, delta: {rank: 4}}\n"
        f"train: {{steps: 2, warmup: 1, answers_per_step: 1, {stage}}}\n"
        "evaluate_every: 2\nevaluate_draft_length: 4\n"
    )
    made["trace"].write_text(json.dumps(chrome_trace([Round(2, 1, 2, 0.1, 0.1)])))
    for name in ("run", "other_run"):
        made[name] = write_run(root / name, example_rows())
    return made


@pytest.fixture
def run(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Outcome]]:
    """Run one of WRITES in an empty directory."""
    import torch

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield lambda name: d3d(
        *(word.format_map(parts) for word in WRITES[name].command.split()), stdin="hello\n"
    )
    torch.set_num_threads(threads)


def below(directory: Path) -> dict[str, bytes | None]:
    """Content of all files, None for directories."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def test_no_command_is_forgotten() -> None:
    commands: dict[str, Any] = dict(get_command(app).commands)  # type: ignore[attr-defined]
    names = {f"bench {name}" for name in commands.pop("bench").commands} | set(commands)
    assert names == {name.split(",")[0] for name in WRITES} | READ_ONLY


@pytest.mark.parametrize(
    ("name", "output"), [(name, output) for name, each in WRITES.items() for output in each.outputs]
)
def test_files_of_others_are_refused_and_stay_as_they_are(
    name: str, output: str, run: Callable[[str], Outcome], tmp_path: Path
) -> None:
    if output.endswith((".svg", ".png")):
        pytest.importorskip("matplotlib")
    path = tmp_path / output
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(FOREIGN)
    before = below(tmp_path)
    refused = run(name)
    assert refused.code == 2, refused
    assert refused.err.startswith("d3d: error: "), refused.err
    assert output.split("/")[0] in refused.err
    after = below(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.endswith((".lock", ".partial"))]


@pytest.mark.parametrize("name", WRITES)
def test_written_twice_it_is_its_own(name: str, run: Callable[[str], Outcome]) -> None:
    """Recognised, or for an export refused; without leftovers."""
    if "timeline" in name or "report" in name:
        pytest.importorskip("matplotlib")
    assert run(name).code == 0
    assert run(name).code == (2 if name == "export" else 0)
    assert not [file for file in below(Path()) if file.endswith((".lock", ".partial"))]


@pytest.mark.parametrize("name", sorted(WRITES.keys() - SHARED))
def test_a_second_process_is_told_who_is_at_work(
    name: str, run: Callable[[str], Outcome], tmp_path: Path
) -> None:
    held = WRITES[name].held
    path = tmp_path / held
    with (alone_in if held.endswith("/") else alone_with)(path, "process"):
        before = below(tmp_path)
        refused = run(name)
        assert refused.code == 2
        assert "is at work in" in refused.err
        assert f"process {os.getpid()} on" in refused.err
        assert " since 20" in refused.err
        assert below(tmp_path) == before


def test_a_killed_process_blocks_nobody(
    run: Callable[[str], Outcome], parts: dict[str, Path], tmp_path: Path
) -> None:
    """A real one: the second is refused while the first works, and takes over after a kill."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom d3d.files import alone_with\n"
        "with alone_with(Path(sys.argv[1]), 'd3d data'):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    output = tmp_path / "out.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", script, output], stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert run("data").is_refusal("another d3d data is at work", f"process {first.pid} ")
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert run("data").code == 0
    assert below(tmp_path).keys() == {"out.jsonl", "out.manifest.json"}


FULL = OSError(28, os.strerror(28))


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the writes of this module's functions fail after a number of them."""
    left = iter(range(after))

    def writing(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            if next(left, None) is None:
                raise FULL
            return real(*arguments, **named)

        return write

    monkeypatch.setattr("d3d.files.os.write", writing(os.write))
    monkeypatch.setattr("d3d.files.os.replace", writing(os.replace))


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "name", ["data", "train", "prune", "tune", "profile", "bench run", "bench report", "generate"]
)
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    name: str, after: int, run: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        full_disk(patched, after)
        stopped = run(name)
    if stopped.code:  # generate and train write less than that
        assert stopped.code == 2, stopped
        errors = [line for line in stopped.err.splitlines() if line.startswith("d3d: error: ")]
        assert len(errors) == 1
        assert "No space left on device" in errors[0]
        assert "run it again" in errors[0]
        assert "Traceback" not in stopped.err
    else:
        assert after
    assert run(name).code == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_an_unwritable_place_is_refused_before_the_work(parts: dict[str, Path]) -> None:
    given = ("--prompts", parts["prompts"], "--target", parts["target"], *TINY)
    assert d3d("data", "/proc/o.jsonl", *given).is_refusal("/proc/o.jsonl can't be written")
    assert d3d("export", parts["drafter"], "/proc/o", "--target", parts["target"]).is_refusal(
        "/proc/o can't be written"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_standard_output_is_one_line(parts: dict[str, Path]) -> None:
    shell = f"{sys.executable} -m d3d.cli.app --help > /dev/full"
    ended = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "standard output can't be written: No space left on device" in ended.stderr
    read = f"{sys.executable} -m d3d.cli.app --help | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", read], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) in {(1, ""), (0, "")}


def test_a_device_may_be_named(
    run: Callable[[str], Outcome], parts: dict[str, Path], tmp_path: Path
) -> None:
    given = ("--max-tokens", 4, "--target", parts["target"], *TINY)
    assert d3d("generate", "hello", "--trace", "/dev/null", *given).code == 0
    assert Path("/dev/null").is_char_device()


def corpus_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cut_answers_are_counted_and_a_longer_limit_writes_them_anew(
    parts: dict[str, Path], tmp_path: Path
) -> None:
    from d3d.train.corpus import read_corpus

    def data(name: str, *more: object) -> Outcome:
        given = ("--prompts", parts["prompts"], "--target", parts["target"], "--device", "cpu")
        return d3d("data", tmp_path / name, *given, "--temperature", 1, *more)

    cut = data("a.jsonl", "--max-tokens", 4, "--dtype", "float32")
    assert "4 of 4 answers are cut by --max-tokens" in cut.err
    assert json.loads((tmp_path / "a.manifest.json").read_text())["cut"] == 4
    again = data("a.jsonl", "--max-tokens", 12, "--dtype", "float32")
    assert "4 answers, 4 of them new" in again.out
    assert "wrote 4 answers anew that were cut before" in again.err
    whole = data("b.jsonl", "--max-tokens", 12, "--dtype", "float32")
    assert whole.code == 0
    answers = [
        sorted((each.prompt_ids, each.answer_ids) for each in read_corpus(tmp_path / name))
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert answers[0] == answers[1]
    manifests = [json.loads((tmp_path / f"{name}.manifest.json").read_text()) for name in "ab"]
    for name in ("answers", "answer_tokens", "cut", "sources", "temperatures"):
        assert manifests[0][name] == manifests[1][name]
    assert manifests[0]["runs"][1]["replaced"] == 4
    assert "0 of them new" in data("a.jsonl", "--max-tokens", 12, "--dtype", "float32").out
    assert "0 of them new" in data("a.jsonl", "--max-tokens", 4, "--dtype", "float32").out
    assert data("a.jsonl", "--dtype", "bfloat16").is_refusal("another --dtype")
