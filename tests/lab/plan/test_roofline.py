"""Costs computed from data sheets, and what they make of the published figures."""

from __future__ import annotations

import pytest

from d3d.errors import InvalidRequest
from d3d.lab.plan.roofline import (
    DATA_SHEETS,
    MODELS,
    DataSheet,
    DecoderShape,
    Efficiency,
    RooflineCosts,
    find_data_sheet,
    find_model,
    pass_bytes,
    pass_flops,
    pass_seconds,
)
from published_speedups import CLAIMS, explain, explain_all, main

TOY = DecoderShape(
    "toy",
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
)
# a layer: query and output 2 * 4 * 4, key and value 2 * 4 * 2, MLP 3 * 4 * 8; the head 10 * 4
TOY_PARAMETERS = 2 * (32 + 16 + 96) + 40
FULL = Efficiency(1.0, 1.0, 0.0, 0.0)


def test_bytes_and_operations_of_a_pass_are_those_on_paper() -> None:
    assert TOY.read_parameters == TOY_PARAMETERS
    assert TOY.kv_per_token == 2 * 2 * 1 * 2
    assert pass_bytes(TOY, 3, 7) == 2 * (TOY_PARAMETERS + 8 * 10)
    assert pass_flops(TOY, 3, 7) == 3 * (2 * TOY_PARAMETERS + 4 * 10 * 2 * 2 * 2)


def test_a_pass_takes_the_slower_of_reading_and_computing() -> None:
    reader, computer = DataSheet("r", 100.0, 1e9, 1e9), DataSheet("c", 1e9, 100.0, 1e9)
    assert pass_seconds(TOY, reader, 3, 7, FULL) == pytest.approx(pass_bytes(TOY, 3, 7) / 100)
    assert pass_seconds(TOY, computer, 3, 7, FULL) == pytest.approx(pass_flops(TOY, 3, 7) / 100)
    half = Efficiency(0.5, 1.0, 0.25, 0.0)
    assert pass_seconds(TOY, reader, 3, 7, half) == pytest.approx(0.25 + pass_bytes(TOY, 3, 7) / 50)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-1.7b", 1.72e9), ("qwen3-8b", 8.19e9 - 0.62e9), ("qwen3-32b", 32.76e9 - 0.78e9)],
)
def test_named_models_have_their_published_sizes(name: str, parameters: float) -> None:
    """Without the embedding table where the head is another one; norms are left out."""
    assert MODELS[name].read_parameters == pytest.approx(parameters, rel=0.003)


def test_a_drafter_is_thinned_by_layers_only() -> None:
    whole, thin = MODELS["d3d-8b"], MODELS["d3d-31d-8b"]
    assert (
        whole.thinned(31).read_parameters
        == thin.read_parameters
        == whole.read_parameters - 5 * whole.layer_parameters
    )
    for count in (0, 37):
        with pytest.raises(InvalidRequest, match="layers"):
            whole.thinned(count)


def test_a_second_device_shares_nothing_and_one_shares_all() -> None:
    two, one = (
        RooflineCosts(MODELS["qwen3-8b"], MODELS["d3d-8b"], DATA_SHEETS["h100"], count)
        for count in (2, 1)
    )
    assert two.contention.verify == 1
    assert one.contention.verify == 2
    assert two.packed(16, 8, 100) > two.draft(16, 100) > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: find_data_sheet("h1000"), "there are h100"),
        (lambda: find_model("gpt"), "there are qwen3"),
        (lambda: Efficiency(bandwidth_share=0), "bandwidth share"),
        (lambda: Efficiency(arithmetic_share=1.2), "arithmetic share"),
        (lambda: Efficiency(overhead_s=-1), "overhead"),
        (lambda: Efficiency(switch_s=float("nan")), "switch"),
        (lambda: RooflineCosts(MODELS["qwen3-32b"], None, DATA_SHEETS["l40s"]), "do not fit"),
        (
            lambda: RooflineCosts(MODELS["qwen3-8b"], MODELS["d3d-8b"], DATA_SHEETS["rtx4090"], 1),
            "do not fit",
        ),
        (lambda: RooflineCosts(TOY, TOY, DATA_SHEETS["h100"], 3), "devices"),
        (lambda: RooflineCosts(TOY, None, DATA_SHEETS["h100"]).draft(4, 10), "drafter"),
    ],
)
def test_what_can_not_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()  # type: ignore[operator]


def test_a_published_round_is_split_into_what_is_explained_and_what_is_open() -> None:
    one = explain(CLAIMS[0], DATA_SHEETS["h100"], Efficiency(), outcomes=8)
    assert one.published_round_s == pytest.approx(7.88 / 5.00 * one.plain_s)
    assert one.all_hits == pytest.approx(7.88 * one.plain_s / one.round_s)
    assert one.hit_rate is not None
    explained = one.round_s + (1 - one.hit_rate) * one.fresh_s
    assert explained == pytest.approx(one.published_round_s)
    assert one.needed_acceptance == pytest.approx(5.00 * one.round_s / one.plain_s)
    unknown = explain(CLAIMS[3], DATA_SHEETS["h100"], Efficiency())
    assert unknown.all_hits is unknown.open_s is unknown.hit_rate is None
    assert len(explain_all(Efficiency())) == 3 * len(CLAIMS)


def test_published_figures_are_told_apart_from_modelled_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["published_speedups.py", "--outcomes", "17"])
    main()
    printed = capsys.readouterr().out
    assert "(modelled)" in printed
    assert "Published: acceptance length and speed-up; all else is modelled" in printed
    assert "2 H200" in printed
