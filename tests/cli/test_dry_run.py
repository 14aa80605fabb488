"""`--dry-run`: what would run where, without loading a model; what is impossible is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d3d.hub.open_drafter import load_drafter
from d3d.model.linear import Linear
from support.command import Outcome, d3d
from support.tiny_model import open_tiny, write_tiny_drafter


@pytest.fixture
def dry(tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`d3d generate --dry-run` for the tiny model; weights may not be loaded."""
    monkeypatch.setattr(
        "d3d.loader.open_model", lambda *_, **__: pytest.fail("weights were loaded")
    )
    for module in ("d3d.cli.dry_run", "d3d.methods.async_.placement"):
        monkeypatch.setattr(f"{module}.available_cores", lambda: [0, 1, 2, 3, 4, 5])

    def run(*arguments: object, drafter: Path | None = tiny_drafter) -> Outcome:
        given = (
            "generate",
            "--dry-run",
            "--prompt",
            "hello",
            "--target",
            tiny_target,
            "--device",
            "cpu",
            "--dtype",
            "bfloat16",
        )
        return d3d(*given, *(() if drafter is None else ("--drafter", drafter)), *arguments)

    return run


@pytest.fixture(scope="module")
def full_weights(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_drafter(tmp_path_factory.mktemp("full") / "drafter", tiny_target, scope=None)


def test_the_plan_of_the_default_method(dry: Any) -> None:
    plan = dry("--json").record
    assert plan["target"]["device"] == "cpu"
    assert plan["target"]["dtype"] == "bfloat16"
    assert plan["drafter"]["shares_target"] is True
    assert plan["drafter"]["block_size"] == 6
    assert plan["mode"] == "serial"
    assert plan["modes"] == {
        "serial": {"draft_length": "measured at the start", "num_denoise_steps": 1}
    }
    assert plan["cores"] == [0, 1, 2, 3, 4, 5]
    assert plan["memory"]["target_bytes"] > 0
    assert plan["memory"]["drafter_bytes"] > 0
    assert plan["memory"]["cache_bytes_per_token"] > 0


def test_what_spares_the_drafter_is_told(dry: Any) -> None:
    told = {"num_denoise_steps": 1, "lookup": 2, "least_kept": 0.5}
    told |= {"draft_length": "measured at the start"}
    assert dry("--json", "--lookup", 2, "--least-kept", 0.5).record["modes"] == {"serial": told}
    assert dry("--json", "--lookup", 0, "--least-kept", 0).record["modes"] == {
        "serial": {"draft_length": "measured at the start", "num_denoise_steps": 1}
    }


def test_beside_another_engine_a_drafter_has_weights_of_its_own(dry: Any) -> None:
    shared, own = dry("--json").record, dry("--json", "--backend", "transformers").record
    assert own["drafter"]["shares_target"] is False
    assert (
        own["memory"]["drafter_bytes"]
        == shared["memory"]["drafter_bytes"] + shared["memory"]["target_bytes"]
    )
    assert own["memory"]["drafter_cache_bytes_per_token"] == own["memory"]["cache_bytes_per_token"]


def test_memory_counts_what_is_made_to_draft(dry: Any, tiny_target: Path, tmp_path: Path) -> None:
    clean = dry("--json").record["memory"]["drafter_bytes"]
    path = write_tiny_drafter(tmp_path / "drafter", tiny_target, anchor_slot=True)
    model = load_drafter(path, open_tiny(tiny_target))
    merged = sum(
        one.weight.numel()
        for one in model.modules()
        if isinstance(one, Linear) and one.down is not None
    )
    assert dry("--json", drafter=path).record["memory"]["drafter_bytes"] == clean + 2 * merged


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        (("--mode", "plain"), {"plain": {}}),
        (("--mode", "fused", "--rows", 9), {"fused": {"draft_length": 5, "rows": 9}}),
        (
            ("--mode", "fused", "--rows", 9, "--lookup", 2),
            {"fused": {"draft_length": 8, "rows": 9, "lookup": 2}},
        ),
        (
            ("--mode", "async", "--outcomes", 3, "--draft-length", 4),
            {
                "async": {
                    "draft_length": 4,
                    "outcomes": 3,
                    "miss_policy": "draft_now",
                    "placement": "thread",
                    "target_threads": 1,
                }
            },
        ),
    ],
    ids=["plain", "fused", "fused, copies", "async"],
)
def test_the_plan_of_each_mode(
    arguments: tuple[object, ...],
    modes: dict[str, Any],
    dry: Any,
    tiny_drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("d3d.methods.async_.placement.available_cores", lambda: [0, 1])
    assert (
        dry(*arguments, "--json", drafter=None if "plain" in arguments else tiny_drafter).record[
            "modes"
        ]
        == modes
    )


def test_a_draft_process_gets_cores_of_its_own(dry: Any) -> None:
    plan = dry("--mode", "async", "--placement", "processes", "--json").record
    assert plan["modes"]["async"]["worker_cores"] == [3, 4, 5]
    assert plan["modes"]["async"]["target_threads"] <= 3


def test_auto_names_what_it_would_try_and_what_not(
    dry: Any, full_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dry("--mode", "auto", "--json").record
    assert plan["modes"].keys() == {"plain", "serial", "fused", "async"}
    assert plan["modes"]["async"]["placement"] == "processes"
    monkeypatch.setattr("d3d.methods.async_.placement.available_cores", lambda: [0, 1])
    plan = dry("--mode", "auto", "--json", drafter=full_weights).record
    assert plan["modes"].keys() == {"plain", "serial"}
    assert "2 cores and one memory bus" in plan["left_out"]["async"]
    assert "deltas at slots only" in plan["left_out"]["fused"]
    assert (
        plan["memory"]["drafter_cache_bytes_per_token"] == plan["memory"]["cache_bytes_per_token"]
    )


def test_people_read_it_in_lines(dry: Any) -> None:
    outcome = dry("--mode", "auto")
    assert outcome.code == 0, outcome.err
    heads = [line.split()[0] for line in outcome.out.splitlines() if not line.startswith(" ")]
    assert heads == ["target", "drafter", "mode", "cores", "memory"]
    assert "serial: draft length measured at the start" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "async", "--placement", "streams"), "streams is for CUDA"),
        (("--mode", "async", "--placement", "devices"), "devices is for CUDA"),
        (("--mode", "async", "--placement", "cellar"), "placement: 'cellar'"),
        (("--mode", "async", "--outcomes", 0), "outcomes: 0"),
        (("--mode", "async", "--miss-policy", "hope"), "miss_policy: 'hope'"),
        (("--mode", "serial", "--rows", 9), "rows: method serial"),
        (("--draft-length", 7), "draft_length: 7"),
        (("--denoise-steps", 7), "num_denoise_steps: 7"),
        (("--mode", "fused", "--rows", 1), "rows: 1"),
        (("--mode", "fused", "--draft-length", 6), "slots draft 5 tokens at most"),
        (
            ("--mode", "fused", "--draft-length", 9, "--lookup", 2),
            "slots draft 5 tokens at most, and copies from the text have 8",
        ),
        (("--mode", "turbo"), "method: 'turbo'"),
        (("--device", "cuda"), "CUDA"),
    ],
    ids=str,
)
def test_the_impossible_is_refused(arguments: tuple[object, ...], words: str, dry: Any) -> None:
    assert dry(*arguments).is_refusal(words)


def test_fused_mode_with_full_weights_is_refused(dry: Any, full_weights: Path) -> None:
    assert dry("--mode", "fused", drafter=full_weights).is_refusal("deltas at slots only")


def test_options_of_modes_that_auto_leaves_out_are_refused(
    dry: Any, full_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dry("--mode", "auto", "--rows", 9, drafter=full_weights).is_refusal(
        "rows: auto leaves fused out"
    )
    monkeypatch.setattr("d3d.methods.async_.placement.available_cores", lambda: [0, 1])
    assert dry("--mode", "auto", "--outcomes", 4).is_refusal(
        "outcomes: auto leaves async out", "one memory bus"
    )
    assert dry("--mode", "auto", "--draft-length", 4, drafter=None).is_refusal(
        "draft_length: auto leaves serial out here: there is no drafter"
    )


def test_a_preset_that_is_not_here_is_planned_all_the_same(cache: Path) -> None:
    outcome = d3d(
        "generate", "--dry-run", "--prompt", "hello", "--mode", "fused", "--device", "cpu", "--json"
    )
    assert outcome.code == 0, outcome.err
    assert outcome.record["modes"] == {"fused": {"draft_length": 6, "rows": 12}}
    assert outcome.record["memory"] is None


def test_chat_has_it_too(tiny_target: Path, tiny_drafter: Path) -> None:
    outcome = d3d(
        "chat",
        "--dry-run",
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--mode",
        "serial",
        stdin="hello\n",
    )
    assert outcome.code == 0
    assert outcome.out.startswith("target ")
    assert json.dumps("hello") not in outcome.out
