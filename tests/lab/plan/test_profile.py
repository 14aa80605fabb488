"""A profile is measured, interrupted, read again and planned with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import d3d as d3d_api
from d3d.errors import InvalidRequest
from d3d.lab.plan.measure import Grid, Measurement, _facts, _memory, grid_passes
from d3d.lab.plan.plan import Scenario, fastest_rows
from d3d.lab.plan.probes import Probes
from d3d.lab.plan.profile import (
    MemoryUse,
    ModelFacts,
    Point,
    Profile,
    ProfileCosts,
    ProfileRun,
    point,
    read_profile,
    thinned_factor,
)
from d3d.lab.plan.trace import RecordedTime, Trace, TracedRound, bare_round, of_histogram
from d3d.methods.fused.rows import BUDGETS
from plan_check import check
from support.command import d3d
from support.tiny_model import write_tiny_drafter

SMALL = (
    "--repeats",
    1,
    "--context",
    8,
    "--context",
    16,
    "--draft-length",
    1,
    "--draft-length",
    3,
    "--outcomes",
    2,
)


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_drafter: Path
) -> Path:
    """A real profile of a tiny model; not to be changed."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    outcome = d3d(
        "profile",
        file,
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        *SMALL,
    )
    assert outcome.code == 0, outcome.err
    assert str(file) in outcome.out
    return file


def test_a_profile_holds_what_it_should(measured: Path) -> None:
    profile = read_profile(measured)
    (run,) = profile.runs
    sizes: dict[str, set[tuple[int, int, int]]] = {}
    for one in run.points:
        sizes.setdefault(one.kind, set()).add((one.size, one.draft_length, one.context))
        assert 0 <= one.low_s <= one.median_s <= one.high_s
    assert sizes["verify"] == {(rows, 0, context) for rows in (1, 2, 4) for context in (8, 16)}
    assert sizes["draft"] == {(length, 0, context) for length in (1, 3) for context in (8, 16)}
    assert sizes["packed"] == {(2, 3, 8), (2, 3, 16)}
    assert {rows for rows, _, _ in sizes["fused"]} >= {3, 8, 32}
    assert sizes.keys() >= {
        "switch",
        "rest",
        "async_verify",
        "async_packed",
        "async_read",
    }  # and where a miss asked for one, async_draft
    assert sizes["async_read"] == {(0, 3, 8), (0, 3, 16)}
    assert (run.dtype, run.placement) == ("float32", "thread")
    assert run.memory.target_weights > run.memory.drafter_weights > 0
    assert run.memory.peak > 1 << 20
    assert profile.drafter is not None
    assert profile.drafter.block_size == 6
    assert profile.machine["processor"]
    assert profile.versions["torch"]
    assert list(measured.parent.iterdir()) == [measured]


def test_a_profile_survives_its_file(measured: Path, tmp_path: Path) -> None:
    profile = read_profile(measured)
    profile.write(tmp_path / "again.json")
    assert read_profile(tmp_path / "again.json") == profile


def test_plan_and_its_json_are_labelled_modelled(measured: Path) -> None:
    outcome = d3d(
        "plan", "--profile", measured, "--histogram", "10,5,3,2", "--outcomes", 2, "--rows", 8
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("modelled") >= 3
    for mode in ("plain", "serial 3", "async 3, 2 outcomes", "fused, 8 rows"):
        assert mode in outcome.out
    record = d3d("plan", "--profile", measured, "--histogram", "10,5,3,2", "--json").record
    assert record["modelled"] is True
    assert all("modelled" in table["title"] for table in record["tables"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "not a profile"),
        ("x", "not a profile"),
        (None, "can't be read"),
        ({"format": 2}, "format"),
        ({"runs": []}, "runs"),
    ],
)
def test_what_is_no_profile_is_refused(
    measured: Path, tmp_path: Path, content: Any, words: str
) -> None:
    file = tmp_path / "other.json"
    if isinstance(content, dict):
        file.write_text(json.dumps(json.loads(measured.read_text()) | content))
    elif content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=words):
        read_profile(file)


def test_an_interrupted_measurement_goes_on(
    tmp_path: Path, tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = d3d_api.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    grid = Grid(contexts=(8,), draft_lengths=(2,), outcomes=(2,), repeats=2)
    taken: list[Any] = []

    def seconds(self: Probes, timed: Any) -> list[float]:
        if len(taken) == 7:
            raise KeyboardInterrupt
        taken.append(timed)
        return [0.5, 1.5]

    monkeypatch.setattr(Probes, "seconds", seconds)
    measurement = Measurement(tmp_path / "p.json", grid, ("float32",), lambda _: model)
    with pytest.raises(KeyboardInterrupt):
        measurement.run(lambda *_: None)
    assert not (tmp_path / "p.json").exists()
    samples = tmp_path / "p.json.samples.jsonl"
    lines = samples.read_text().splitlines()
    samples.write_text("\n".join(lines) + "\n" + lines[-1][:10])  # killed while it wrote
    other = Measurement(
        tmp_path / "p.json", Grid((8,), (2,), (3,), repeats=2), ("float32",), lambda _: model
    )
    with pytest.raises(InvalidRequest, match="another outcomes"):
        other.run(lambda *_: None)
    monkeypatch.setattr(Probes, "seconds", lambda self, timed: taken.append(timed) or [0.5, 1.5])
    profile = measurement.run(lambda *_: None)
    passes = list(grid_passes(model, grid))
    # every pass twice, and once more for a warm-up in each of the two starts that met it
    assert len(taken) <= 3 * len(passes) + 4
    assert [one.samples for one in profile.runs[0].points] == [4] * len(passes)
    assert {one.median_s for one in profile.runs[0].points} == {1.0}
    assert not samples.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", 1), "context"),
        (("--context", 100000), "no room"),
        (("--draft-length", 99), "block size"),
        (("--outcomes", 0), "outcomes"),
        (("--repeats", 0), "repeats"),
        (("--threads", 0), "threads"),
        (("--placement", "moon"), "placement"),
        (("--placement", "streams"), "CUDA"),
    ],
    ids=str,
)
def test_impossible_measurements_are_refused(
    tmp_path: Path, tiny_target: Path, tiny_drafter: Path, arguments: tuple[Any, ...], words: str
) -> None:
    model = ("--target", tiny_target, "--drafter", tiny_drafter, "--dtype", "float32")
    assert d3d("profile", tmp_path / "p.json", *model, "--repeats", 1, *arguments).is_refusal(words)
    assert not list(tmp_path.iterdir())


def by_hand(**fields: Any) -> ProfileRun:
    """A verification takes 10 + rows, a draft 5 + tokens, both in ms, at every context."""
    points = [
        point("verify", rows, 0, context, [0.001 * (10 + rows)])
        for rows in (1, 6)
        for context in (10, 100)
    ]
    points += [
        point("draft", size, 0, context, [0.001 * (5 + size)])
        for size in (1, 5)
        for context in (10, 100)
    ]
    points += [point("packed", size, 5, 10, [0.001 * 10 * size]) for size in (1, 2)]
    points += [point("switch", 0, 0, 10, [0.0001]), point("rest", 0, 0, 10, [0.001])]
    memory = MemoryUse(
        target_weights=1, drafter_weights=1, cache_per_token=1, drafter_cache_per_token=1, peak=1
    )
    return ProfileRun(
        **(
            {
                "device": "cpu",
                "dtype": "float32",
                "threads": 1,
                "placement": "thread",
                "points": points,
                "memory": memory,
            }
            | fields
        )
    )


def test_costs_are_read_off_the_medians() -> None:
    costs = ProfileCosts(by_hand())
    assert costs.verify(3, 50) == pytest.approx(0.013)
    assert costs.draft(3, 10) == pytest.approx(0.008)
    assert costs.packed(5, 4, 10) == pytest.approx(0.04)
    assert (costs.switch_s, costs.rest_s, costs.has_drafter, costs.has_fused) == (
        0.0001,
        0.001,
        True,
        False,
    )
    for ask in (lambda: costs.fused(8, 10), lambda: costs.verify(0, 10)):
        with pytest.raises(InvalidRequest, match=r"holds no such pass|is impossible"):
            ask()


def test_what_async_mode_costs_each_pass_is_told_apart() -> None:
    """A verification of 12 ms took 24 there, a preparation of 20 took 32, and a draft of 8 took
    12."""
    run = by_hand()
    beside = [point("async_verify", 2, 1, 10, [0.024]), point("async_packed", 2, 5, 10, [0.032])]
    contention = ProfileCosts(
        run.model_copy(update={"points": [*run.points, *beside]})
    ).contention()
    assert contention == pytest.approx((2.0, 1.6, 1.0, True))
    beside.append(point("async_draft", 3, 3, 10, [0.012]))
    contention = ProfileCosts(
        run.model_copy(update={"points": [*run.points, *beside]})
    ).contention()
    assert contention == pytest.approx((2.0, 1.6, 1.5, True))
    assert ProfileCosts(run).contention() is None


def test_the_reading_of_a_prompt_lies_on_a_line_between_those_measured() -> None:
    run = by_hand()
    assert ProfileCosts(run).read(50) == 0
    read = [point("async_read", 0, 5, context, [0.001 * context]) for context in (100, 20)]
    assert ProfileCosts(run.model_copy(update={"points": [*run.points, *read]})).read(
        50
    ) == pytest.approx(0.05)


def test_a_thinner_drafter_saves_what_its_layers_weigh() -> None:
    facts = ModelFacts(name="x", fingerprint="x", num_layers=30, layer_share=0.8)
    assert thinned_factor(facts, 30) == 1
    assert thinned_factor(facts, 15) == pytest.approx(0.6)
    with pytest.raises(InvalidRequest, match="layers"):
        thinned_factor(facts, 31)


def test_a_prediction_is_held_against_what_was_measured() -> None:
    rounds = tuple(TracedRound(bare_round(5, 2, 3), 50) for _ in range(10))

    def scenario(mode: str, tpot_s: float) -> Scenario:
        measured = RecordedTime(mode, tpot_s, 30)
        return Scenario(ProfileCosts(by_hand()), Trace("x", mode, 5, rounds, measured=measured))

    checked = check(scenario("serial", 0.009))
    assert checked.predicted_s == pytest.approx((0.010 + 0.016 + 0.001) / 3)
    assert checked.within
    assert not check(scenario("serial", 0.0075)).within
    for mode, words in (("fused", "--rows"), ("async", "--hit-rate"), ("odd", "not modelled")):
        with pytest.raises(InvalidRequest, match=words):
            check(scenario(mode, 1.0))


def test_the_part_of_a_profile_that_fits_is_taken(measured: Path) -> None:
    profile: Profile = read_profile(measured)
    assert profile.run("float32").threads == profile.runs[0].threads
    with pytest.raises(InvalidRequest, match="there is float32"):
        profile.run("bfloat16")


def test_a_point_knows_its_spread() -> None:
    one = point("verify", 1, 0, 10, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (one.low_s, one.median_s, one.high_s, one.samples) == (2.0, 3.0, 4.0, 5)
    with pytest.raises(ValueError, match="median_s"):
        Point(kind="verify", size=1, context=1, median_s=float("nan"), low_s=0, high_s=0, samples=1)


def test_a_drafter_whose_slots_pass_layers_by_is_described_as_it_drafts(
    tiny_target: Path, tmp_path: Path
) -> None:
    path = write_tiny_drafter(tmp_path / "drafter", tiny_target, anchor_slot=True, slot_layers=(1,))
    model = d3d_api.load(str(tiny_target), path, device="cpu", dtype="float32")
    assert model.parts.drafter is not None
    target, drafter = _facts(model)
    assert drafter is not None
    assert (target.num_layers, drafter.num_layers) == (2, 1)
    assert drafter.layer_share < target.layer_share
    memory = _memory(model, 1)
    assert memory.drafter_cache_per_token == 0, (
        "it works in the target's cache, though fused mode is not for it"
    )
    trained = sum(one.numel() for one in model.parts.drafter.trainable().values())
    assert memory.drafter_weights > 4 * trained, "weights with their deltas merged are there, too"


def test_a_drafter_whose_slots_pass_layers_by_is_planned_for_in_fused_mode(
    tiny_target: Path, tmp_path: Path
) -> None:
    path, file = (
        write_tiny_drafter(tmp_path / "drafter", tiny_target, slot_layers=(1,)),
        tmp_path / "profile.json",
    )
    profiled = d3d(
        "profile",
        file,
        "--target",
        tiny_target,
        "--drafter",
        path,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        *SMALL,
    )
    assert profiled.code == 0, profiled.err
    for given in ((), ("--kept-layers", 1)):
        planned = d3d("plan", "--profile", file, "--histogram", "10,5,3,2", *given)
        assert "fused, " in planned.out, planned.err


def test_without_a_fused_pass_in_the_profile_no_rows_are_chosen(measured: Path) -> None:
    run = read_profile(measured).run()
    bare = ProfileCosts(
        run.model_copy(update={"points": [one for one in run.points if one.kind != "fused"]})
    )
    trace = of_histogram([10, 5, 3, 2], source="x")
    assert fastest_rows(bare, trace) is None
    assert fastest_rows(ProfileCosts(run), trace) in BUDGETS
