"""Figures are what paper and pencil say."""

from __future__ import annotations

from itertools import pairwise

import pytest

from d3d.engine.round import Preparation, Readiness, Round
from d3d.lab.bench.lossless import first_difference
from d3d.lab.bench.metrics import (
    further_time,
    grouped,
    identity_counts,
    round_figures,
    score_counts,
    speed,
    speed_up,
    speed_within,
)
from d3d.lab.bench.rows import Identity, ends_in_a_loop
from support.bench_rows import example_rows, row

ROWS = example_rows()
PLAIN = [one for one in ROWS if one.method == "plain"]
SERIAL = [one for one in ROWS if one.method == "serial"]


def test_speed() -> None:
    plain = speed(PLAIN)
    assert plain.answers == 2
    assert plain.completion_tokens == 8
    assert plain.tokens_per_s == pytest.approx(8 / 0.8)
    assert plain.ttft_s == pytest.approx(0.1)
    assert plain.tpot_s == pytest.approx(0.6 / 6)
    assert plain.itl_s_p50 == pytest.approx(0.1)
    assert plain.tokens_per_delivery == 1.0
    assert plain.peak_memory_bytes == 1 << 30
    serial = speed(SERIAL)
    assert serial.tpot_s == pytest.approx(0.4 / 6)
    # gaps between deliveries: 0.1, 0.1, 0.2, however many tokens came with them
    assert serial.itl_s_p50 == pytest.approx(0.1)
    assert serial.itl_s_p99 == pytest.approx(0.198)
    assert serial.tokens_per_delivery == pytest.approx(8 / 5)


def test_acceptance_micro_and_macro() -> None:
    found = round_figures(SERIAL)
    assert found is not None
    assert found.rounds == 3
    assert found.acceptance_length == pytest.approx(6 / 3)  # all rounds
    assert found.acceptance_length_macro == pytest.approx((4 / 2 + 2 / 1) / 2)
    assert found.accepted_per_round == pytest.approx(3 / 3)
    assert found.acceptance_rate == pytest.approx(
        3 / 5
    )  # the shorter last draft counts as what it was
    assert found.acceptance_at == pytest.approx((2 / 3, 1 / 3))
    assert found.histogram == (1, 1, 1)
    assert found.t_draft_share == pytest.approx(0.16 / 0.4)
    assert found.t_verify_share == pytest.approx(0.22 / 0.4)
    assert found.t_draft_s == pytest.approx(0.16 / 3)
    # emitted = first token + accepted + rounds, where no stop has cut a round
    assert speed(SERIAL).completion_tokens == 2 + 3 + 3


def test_speed_within_an_answer_goes_by_the_tokens_that_are_there() -> None:
    one = row(
        "serial", "a", [(0.1, 1), (0.2, 3), (0.5, 1), (0.6, 2)]
    )  # tokens 2 to 4 in 0.1 s, then 5 in 0.3 s, 6 and 7 in 0.1 s
    assert speed_within([one], 1, 4) == (pytest.approx(0.1), 3)
    assert speed_within([one], 4, 6) == (pytest.approx(0.4), 3)
    assert speed_within([one, one], 1, 9) == (pytest.approx(1.0), 12)
    assert speed_within([one], 7, 9) == (0.0, 0)
    together = one.model_copy(update={"timing": one.timing.model_copy(update={"batch_size": 2})})
    assert speed_within([together], 1, 9) == (pytest.approx(0.25), 6)


def test_hit_rate_leaves_out_the_first_draft_of_an_answer() -> None:
    states: list[Readiness] = ["unprepared", "hit", "late", "miss", "hit", "unprepared"]
    rounds = [Round(2, 0, 1, 0.0, 0.1, preparation=Preparation(state)) for state in states]
    rounds.append(Round(2, 0, 1, 0.0, 0.1))
    found = round_figures(
        [
            row("async", "a", [(0.1, 1), (0.2, 7)], rounds),
            row("async", "b", [(0.1, 1), (0.2, 1)], rounds[:1]),
        ]
    )
    assert found is not None
    assert found.hit_rate == pytest.approx(2 / 5)
    serial = round_figures(SERIAL)
    assert serial is not None
    assert serial.hit_rate is None


def test_macro_differs_from_micro_where_answers_do() -> None:
    long = row(
        "serial", "a", [(0.1, 1), (0.2, 1), (0.3, 1), (0.4, 1)], [Round(2, 0, 1, 0.1, 0.1)] * 3
    )
    short = row("serial", "b", [(0.1, 1), (0.2, 3)], [Round(2, 2, 3, 0.1, 0.1)])
    found = round_figures([long, short])
    assert found is not None
    assert found.acceptance_length == pytest.approx(6 / 4)
    assert found.acceptance_length_macro == pytest.approx(2.0)


def test_methods_without_rounds_and_rounds_without_times() -> None:
    assert round_figures(PLAIN) is None
    untimed = round_figures([row("fused", "a", [(0.1, 1), (0.2, 2)], [Round(2, 1, 2, 0.0, 0.0)])])
    assert untimed is not None
    assert untimed.acceptance_length == 2.0
    assert untimed.t_draft_share is untimed.t_verify_share is untimed.t_draft_s is None
    nothing = round_figures([row("serial", "a", [(0.1, 1)], [])])
    assert nothing is not None
    assert (
        nothing.rounds,
        nothing.acceptance_length,
        nothing.acceptance_rate,
        nothing.acceptance_at,
    ) == (0, 0.0, 0.0, ())


def test_a_speed_up_is_a_ratio_of_totals_over_common_prompts() -> None:
    found = speed_up(SERIAL, PLAIN)
    assert found is not None
    assert found.answers == 2
    assert found.interval.value == pytest.approx((0.6 / 6) / (0.4 / 6))
    assert found.per_prompt == pytest.approx((1.0, 2.0))
    assert found.interval.low == pytest.approx(1.0)  # the worse prompt twice
    assert found.interval.high == pytest.approx(2.0)
    assert speed_up(SERIAL, PLAIN) == found  # drawn by seed
    only = speed_up(SERIAL, PLAIN[:1])
    assert only is not None
    assert (only.answers, *only.interval) == pytest.approx((1, 2.0, 2.0, 2.0))


def test_answers_of_one_token_have_no_speed_after_the_first() -> None:
    one = row("serial", "a", [(0.1, 1)], [])
    assert speed([one]).tpot_s is None
    assert speed([one]).itl_s_p50 is None
    assert further_time([one]) == (0.0, 0)
    assert speed_up([one], PLAIN) is None
    assert speed_up(SERIAL, []) is None
    assert speed([]).tokens_per_s == 0.0


def test_a_batchs_time_is_shared_out() -> None:
    def member(prompt_id: str, last: float) -> object:
        one = row("plain", prompt_id, [(0.2, 1), (last, 1)])
        return one.model_copy(
            update={"timing": one.timing.model_copy(update={"batch_s": 1.0, "batch_size": 2})}
        )

    members = [member("a", 0.6), member("b", 1.0)]
    assert speed(members).tokens_per_s == pytest.approx(4 / 1.0)  # type: ignore[arg-type]
    assert speed(members).tpot_s == pytest.approx((0.8 / 2 + 0.8 / 2) / 2)  # type: ignore[arg-type]


def test_sameness_and_scores() -> None:
    same = Identity(identical=True, by="ids", plain_tokens=3)
    near = Identity(
        identical=False, by="ids", plain_tokens=3, position=1, gap=1e-6, is_rounding=True
    )
    other = Identity(identical=False, by="text", plain_tokens=3, position=0)
    rows = [
        row("serial", str(n), [(0.1, 1)], identity=one, score=score)
        for n, (one, score) in enumerate(((same, True), (near, False), (other, None)))
    ]
    found = identity_counts(rows)
    assert found is not None
    assert (found.compared, found.identical, found.rounding, found.other, found.by) == (
        3,
        1,
        1,
        1,
        "ids+text",
    )
    assert identity_counts(PLAIN) is None
    assert score_counts(rows) == (1, 2)


def test_rows_are_grouped_by_method_set_and_setting() -> None:
    groups = grouped(ROWS)
    assert [(group.label, len(rows)) for group, rows in groups.items()] == [
        ("plain", 2),
        ("serial 2", 2),
    ]


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        ([7] * 24, True),
        ([7] * 23, False),
        ([1, 2, 3, *[4, 5, 6] * 8], True),
        ([*range(10)] * 3, False),
        ([*range(10)] * 4, True),
        ([*[4, 5, 6] * 20, 9], False),
        ([*range(200)], False),
        ([], False),
        (["so", "on", "and"] * 9, True),
    ],
)
def test_loops_at_the_end_are_found(token_ids: list[object], loops: bool) -> None:
    assert ends_in_a_loop(token_ids) is loops


def test_first_difference_of_texts() -> None:
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("abc", "ab") == 2
    assert all(first_difference(a, b) == 0 for a, b in pairwise(("x", "y", "")))
