"""Whatever stands in a file that a user gives, reading it ends in one of d3d's own errors, which
names the file."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import GGMLQuantizationType, GGUFReader

from d3d.engine.round import Round
from d3d.engine.trace import chrome_trace
from d3d.errors import D3DError, InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import read_provenance
from d3d.hub.names import resolve_drafter, resolve_model
from d3d.hub.presets import preset_path
from d3d.inputs import input_path, read_json, read_yaml
from d3d.lab.bench.results import load_run
from d3d.lab.plan.plan import best, options
from d3d.lab.plan.profile import MemoryUse
from d3d.lab.plan.sources import CostSource
from d3d.lab.plan.trace import of_mean, read_trace
from d3d.lab.report.benchmark import comparison, report
from d3d.loader import load, preset_of
from d3d.methods.costs import costs_journal, read_costs
from d3d.native import build
from d3d.train.config import read_run_config
from d3d.train.corpus import read_corpus
from support.bench_rows import example_rows, write_run
from support.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[1]
SEED = 20
ODD: tuple[Any, ...] = (
    None,
    True,
    "x",
    "12",
    -1,
    0,
    1.5,
    10**9,
    10**30,
    float("nan"),
    float("inf"),
    [],
    [[1]],
    {},
    {"a": None},
)
GONE = object()
DEEP = b"[" * 100_000
WHOLE = (b"", b"[]", b"null", b"1", b"{", b"\xff\xfe{", DEEP, b'{"a":' * 100_000)

Read = Callable[[], object]


def odd_contents(content: dict[str, Any], count: int) -> Iterator[tuple[str, Any]]:
    """Copies of a file's content in which one value has another type or size, or is gone: so many
    times, drawn by seed, anywhere in it."""
    rng = random.Random(SEED)
    for _ in range(count):
        changed = copy.deepcopy(content)
        place: Any = changed
        names: list[str] = []
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            names.append(str(key))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
                break
            place = inner
        value = rng.choice([*ODD, GONE])
        if value is GONE:
            del place[key]
        else:
            place[key] = value
        yield f"{'.'.join(names)} = {'gone' if value is GONE else repr(value)}", changed


def check(file: Path, named: str, read: Read, *, count: int = 60) -> None:
    """Change a JSON or YAML file in many ways; `named` is in the message of each refusal."""
    before = file.read_bytes()
    content = yaml.safe_load(before)
    odd = [(what, json.dumps(value).encode()) for what, value in odd_contents(content, count)]
    refused = 0
    for what, text in [*odd, *((repr(text[:9]), text) for text in WHOLE)]:
        file.write_bytes(text)
        try:
            read()
        except D3DError as error:
            refused += 1
            message = str(error)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            continue
        assert named in message, f"{what}: {message}"
    file.write_bytes(before)
    read()
    assert refused


@pytest.fixture
def models(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Path:
    """Copies of a tiny target and its drafter."""
    shutil.copytree(tiny_target, tmp_path / "target")
    shutil.copytree(tiny_drafter, tmp_path / "drafter")
    config = tmp_path / "drafter" / "config.json"
    content = json.loads(config.read_text())
    content["base"]["source"] = str(tmp_path / "target")
    config.write_text(json.dumps(content))
    return tmp_path


def answer(*names: Path, backend: str = "native") -> Read:
    """Load a target (and its drafter) and decode two tokens."""

    def run() -> object:
        target, *drafter = map(str, names)
        with load(target, *drafter, device="cpu", dtype="float32", backend=backend) as model:
            return model.generate("a cat", max_tokens=2)

    return run


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_target(name: str, models: Path) -> None:
    check(models / "target" / name, str(models / "target"), answer(models / "target"))


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_a_target_in_c(models: Path) -> None:
    target = models / "target"
    check(target / "config.json", str(target), answer(target, backend="c"))


def test_a_drafter(models: Path) -> None:
    names = models / "target", models / "drafter"
    check(names[1] / "config.json", str(names[1]), answer(*names))
    check(names[1] / "provenance.json", str(names[1]), lambda: read_provenance(names[1]), count=0)


def test_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    shutil.copyfile(preset_path("smollm2-135m-fast"), file)
    check(file, str(file), lambda: preset_of(str(file)))
    before = file.read_text()
    for more in ("2026-12-01: x", "drafter: &a [*a]"):  # not in JSON
        file.write_text(f"{before}\n{more}\n")
        with pytest.raises(InvalidCheckpoint, match=r"preset\.yaml"):
            preset_of(str(file))


def test_a_training_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    shutil.copyfile(ROOT / "recipes/smollm2-135m/train.yaml", file)
    check(file, str(file), lambda: read_run_config(file))


def plan_with(profile: Path, trace: Path | None = None) -> object:
    source = CostSource(profile)
    source.check()
    rounds = of_mean(2.0, 5) if trace is None else read_trace(trace)
    return best(source.scenario(rounds))


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "feed_forward_length"])
@pytest.mark.parametrize("value", [0, (1 << 32) - 1])
def test_sizes_in_a_gguf_file(key: str, value: int, cache: Path, tmp_path: Path) -> None:
    """A size beyond any model is refused before memory is allocated by it."""
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, GGMLQuantizationType.F32)
    field = GGUFReader(file).get_field(f"llama.{key}")
    assert field is not None
    content = bytearray(file.read_bytes())
    end = field.offset + sum(part.nbytes for part in field.parts)
    content[end - 4 : end] = value.to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=r"tiny\.gguf: num_|tiny\.gguf: intermediate_size"):
        resolve_model(str(file))


def test_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    facts = {"name": "x", "fingerprint": "y", "num_layers": 2, "layer_share": 0.5}
    points = [
        {"kind": kind, "size": size, "context": context, "draft_length": length}
        | {"median_s": 0.1 + size, "low_s": 0.1, "high_s": 2.0, "samples": 3}
        for kind, length, size in (("verify", 0, 6), ("draft", 0, 5), ("packed", 5, 2))
        for context in (10, 100)
        for size in (1, size)
    ]
    memory = dict.fromkeys(MemoryUse.model_fields, 1)
    run = {"device": "cpu", "dtype": "float32", "threads": 1, "placement": "thread"}
    content = {
        "date": "2026-01-01",
        "command": [],
        "versions": {},
        "machine": {},
        "target": facts,
        "drafter": facts,
        "runs": [run | {"points": points, "memory": memory}],
    }
    file.write_text(json.dumps(content))
    check(file, str(file), lambda: plan_with(file), count=150)


TRACES = {
    "answer": {
        "usage": {"prompt_tokens": 5, "completion_tokens": 9},
        "timing": {"tpot_s": 0.1},
        "speculation": {
            "mode": "serial",
            "num_accepted_histogram": [1, 1, 2],
            "undrafted_rounds": 1,
            "lookup_rounds": 0,
            "hit_rate_at": [0.5, None, 1.0],
        },
    },
    "evaluation": {
        "mode": "async",
        "num_accepted_histogram": [3, 2, 1],
        "bonus_recall": {"1": [0.1, 0.2, None], "4": [0.5, 0.5, 0.5]},
        "hit_rate_at": {"1": [0.1, 0.2, None], "4": [0.5, 0.5, 0.5]},
    },
    "timeline": chrome_trace(
        [Round(2, 1, 2, 0.1, 0.2, 0.0), Round(2, 2, 3, 0.1, 0.2, 0.5)],
        {"mode": "serial", "dtype": "float32", "threads": 1, "prompt_tokens": 5, "tpot_s": 0.1},
    ),
}


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(TRACES[kind]))
    source = CostSource(datasheet="h100")
    check(file, str(file), lambda: options(source.scenario(read_trace(file))), count=150)


@pytest.mark.parametrize("name", ["provenance.json", "results.jsonl"])
def test_a_benchmark(name: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", example_rows())
    file = directory / name
    if name == "results.jsonl":  # the last row, on lines of their own
        file.write_text(file.read_text().splitlines()[-1] + "\n")

    def read() -> object:
        if name == "results.jsonl":
            file.write_bytes(file.read_bytes().rstrip(b"\n") + b"\n")
        run = load_run(directory)
        return report(run, with_pictures=False), comparison(run, run)

    check(file, str(directory), read, count=150)


def test_a_corpus(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    row = {"prompt_ids": [1, 2], "answer_ids": [3], "source": "x", "temperature": 0.0, "seed": 0}
    file.write_text(json.dumps(row | {"top": {"part": "x", "start": 0}}))

    def read() -> object:
        row = file.read_text(encoding="utf-8", errors="surrogateescape")
        text = f'{{"tokenizer": "abc"}}\n{row}\n'
        corpus = tmp_path / "whole.jsonl"
        corpus.write_text(text, encoding="utf-8", errors="surrogateescape")
        return read_corpus(corpus, vocab_size=100)

    check(file, "whole.jsonl", read)
    file.write_text(json.dumps(row | {"answer_ids": [3, 100]}))
    with pytest.raises(InvalidRequest, match=r"line 2: token id 100, .* below 100"):
        read()


def test_costs_of_this_machine(cache: Path) -> None:
    """Damaged lines are measured anew, and never used."""
    sound = {"row_price": 0.5, "date": "2026-01-01", "measured_on": {}}
    journal = costs_journal()
    journal.path.parent.mkdir(parents=True)
    lines = [json.dumps({**sound, "row_price": value}) for value in ODD]
    lines += [json.dumps({**sound, "fused_rows": value}) for value in ODD]
    journal.path.write_bytes(b"\n".join([*(line.encode() for line in lines), DEEP, b""]))
    prices = [(entry["row_price"], entry.get("fused_rows")) for entry in read_costs(journal)]
    sound_prices = [(value, None) for value in (0, 1.5, 10**9, 10**30)]
    assert prices == [*sound_prices, (0.5, 10**9), (0.5, 10**30)]


def test_names_that_no_file_can_have() -> None:
    for name in ("x" * 300, "a\0b", "~nobody-of-this-name/x"):
        for read in (resolve_model, resolve_drafter):
            with pytest.raises(InvalidCheckpoint):
                read(name)
        with pytest.raises(InvalidRequest):
            input_path(name)


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_what_can_not_be_read_at_all(read: Callable[[Path], Any], tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    for path, reason in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "directory"),
        (loop, "symbolic links"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            read(path)
