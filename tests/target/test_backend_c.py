"""`--backend c`: the target's passes in the C library, for those who decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

import d3d
from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.native import build
from support.command import d3d as command
from support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2, "min_tokens": 5},
]


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> Model:
    return d3d.load(str(tiny_target), tiny_drafter, backend="c", dtype="float32")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties"])
def test_every_method_gives_the_same_bits(model: Model, sampling: dict[str, Any]) -> None:
    plain = model.generate("how are you?", method="plain", max_tokens=40, **sampling)
    for method in ("serial", "ngram"):
        result = model.generate("how are you?", method=method, max_tokens=40, **sampling)
        assert result.token_ids == plain.token_ids
        assert result.logprobs == plain.logprobs
    together = model.generate_many(["how are you?", "the cat sat"], max_tokens=40, **sampling)
    assert together[0].token_ids == plain.token_ids
    assert together[0].logprobs == plain.logprobs
    assert model.parts.target.num_held == 0


def test_ids_are_those_of_the_native_backend(
    model: Model, tiny_target: Path, tiny_drafter: Path
) -> None:
    native = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    for prompt in ("how are you?", "the cat sat on the mat", "naïve café"):
        ours, theirs = (each.generate(prompt, max_tokens=30) for each in (model, native))
        assert ours.token_ids == theirs.token_ids
    assert model.config() == native.config()


def test_a_draft_model_drafts_for_it(tiny_target: Path) -> None:
    with d3d.load(
        str(tiny_target), backend="c", draft_model=str(tiny_target), dtype="float32"
    ) as model:
        result = model.generate("the cat", max_tokens=20)
        assert (
            result.token_ids == model.generate("the cat", method="plain", max_tokens=20).token_ids
        )
        assert result.speculation is not None
        assert result.speculation.acceptance_length > 2


def test_a_gguf_file_runs_as_it_is_stored(tmp_path: Path, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1).path
    ours, theirs = (
        d3d.load(str(file), backend=backend, device="cpu", dtype="float32").generate(
            "def add", raw=True, max_tokens=20, logprobs=0
        )
        for backend in ("c", "native")
    )
    assert ours.token_ids == theirs.token_ids
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_what_it_can_not_do_is_refused(model: Model, tiny_target: Path) -> None:
    for method in ("fused", "async"):
        with pytest.raises(InvalidRequest, match=f"{method} needs d3d's own decoder"):
            model.generate("hello", method=method)
    for options, words in (
        ({"device": "cuda"}, "runs on a CPU"),
        ({"dtype": "bfloat16"}, "computes in float32"),
        ({"quantize": "int8"}, "as stored"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            d3d.load(str(tiny_target), backend="c", **options)


def test_without_the_library_one_line_says_why(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D3D_NATIVE", "0")
    asked = ("generate", "hello", "--model", tiny_target, "--backend", "c")
    assert command(*asked).is_refusal("turned off by D3D_NATIVE=0")


def test_the_command_names_its_precision(tiny_target: Path) -> None:
    outcome = command(
        "generate", "hello", "--model", tiny_target, "--backend", "c", "--max-tokens", 4
    )
    assert outcome.code == 0
    assert "float32" in outcome.err
    plan = command(
        "generate", "hello", "--model", tiny_target, "--backend", "c", "--dry-run", "--json"
    ).record
    assert plan["target"]["backend"] == "c"
    assert plan["target"]["dtype"] == "float32"


def test_doctor_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.levels_here()[0] in command("doctor").out
    monkeypatch.setenv("D3D_NATIVE", "0")
    assert "turned off by D3D_NATIVE=0" in command("doctor").out
