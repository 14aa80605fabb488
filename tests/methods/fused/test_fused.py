"""Fused mode: answers equal plain decoding's whatever the slots predict, and each number of kept
tokens selects its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.engine.drafter import Draft
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.errors import InvalidRequest
from d3d.methods.base import Parts
from d3d.methods.costs import machine_costs
from d3d.methods.fused import engine as fused
from d3d.methods.fused.config import FusedConfig
from d3d.methods.fused.engine import LONGEST_COPY, DraftedGroup, FusedTarget, _LastPass
from d3d.methods.fused.offers import CopiedOffers, Offer
from d3d.methods.fused.plan import NEXT_ROUND, NO_SLOTS, RowPlan, plan_rows
from d3d.methods.fused.rows import BUDGETS, best_rows, expected_tokens, row_price
from d3d.methods.serial.denoise import not_finite
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.model.linear import pack_weights
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from d3d.train.config import Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.trainer import Trainer
from support.drafters import block_logits, grow, request, text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny, random_drafter

PRICE = 0.05
"""Of a row, in tokens."""
Kind = dict[str, Any]
KINDS: list[Kind] = [
    {"block_attention": "causal"},
    {"block_attention": "bidirectional"},
    {"previous_token_width": 8},
    {"mask_token_id": 96},
]
LEARNING = TrainConfig(
    steps=80,
    warmup=5,
    learning_rate=2e-2,
    answers_per_step=4,
    stages=(Stage(share=1.0, block_size=5, anchors=60),),
    precision="float32",
)
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))
)


@pytest.fixture(scope="module")
def base() -> Transformer:
    return tiny_transformer(seed=1)


@pytest.fixture
def target(base: Transformer) -> NativeTarget:
    return NativeTarget(base)


def drafter(target: NativeTarget, *, strength: float = 1.0, **kind: Any) -> DrafterModel:
    model = tiny_drafter(target.model, **kind)
    if model.previous_token_head is not None:
        torch.nn.init.normal_(
            model.previous_token_head.up, std=0.1, generator=torch.Generator().manual_seed(2)
        )
    for name, parameter in model.trainable().items():
        if name.endswith(".up"):
            parameter.data *= strength
    return model


def fused_engine(
    target: NativeTarget, model: DrafterModel, rows: int = 12, draft_length: int = 4
) -> FusedTarget:
    return FusedTarget(target, model, draft_length, rows)


def decode(engine: FusedTarget, runs: list[Run]) -> list[Run]:
    return run_all(engine, engine, runs)


def six(target: NativeTarget, **params: Any) -> list[Run]:
    return [
        make(target, text(2 + number, seed=number), max_tokens=5 + 13 * (number * 5 % 6), **params)
        for number in range(6)
    ]


@every_kind
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("rows", [2, 5, 12])
def test_ids_equal_plain(kind: Kind, sampling: str, rows: int, target: NativeTarget) -> None:
    params = SAMPLING[sampling]
    together = decode(fused_engine(target, drafter(target, **kind), rows), six(target, **params))
    assert [one.ids for one in together] == [
        one.ids for one in run_all(target, None, six(target, **params), 0)
    ]
    assert not any(one.faults for one in together)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_thousands_of_rounds_reach_every_number_of_kept_tokens(sampling: str) -> None:
    target = NativeTarget(tiny_transformer(seed=0))
    params = SAMPLING[sampling] | {"max_tokens": 180}
    prompts = [text(6, seed=50 + number) for number in range(4)]
    plain = [run(target, None, prompt, **params).ids for prompt in prompts]
    model = drafter(target, strength=0.0, previous_token_width=16)
    samples = [
        Sample(prompt, ids[:130], "test", 0.0, 0)
        for prompt, ids in zip(prompts, plain, strict=True)
    ]  # the rest is news
    Trainer(model, samples, LEARNING).run(lambda _: None)
    kept: list[int] = []
    for rows in (4, 8, 12):
        together = decode(
            fused_engine(target, model.eval(), rows, 3),
            [make(target, prompt, **params) for prompt in prompts],
        )
        assert [one.ids for one in together] == plain
        kept += [stats.num_accepted for one in together for stats in one.rounds]
    assert len(kept) > 500
    assert all(kept.count(number) > 4 for number in range(4)), Counter(kept)


def test_clean_rows_are_those_of_a_pass_without_slots_whatever_stands_in_them(
    target: NativeTarget,
) -> None:
    ids = text(20, seed=3)
    plain = NativeTarget(target.model)
    plain.forward([0], [ids[:15]])
    (expected,) = plain.forward([0], [ids[15:19]])
    for strength in (0.0, 1.0, 30.0):
        engine = fused_engine(target, drafter(target, strength=strength))
        (clean,) = verified(engine, request(ids[:16]), ids[16:19], RowPlan(3, (4, 3, 2, 1)))
        torch.testing.assert_close(clean.raw, expected.raw, atol=1e-5, rtol=1e-5)
        assert target.cache.lengths[-1] == 19
    assert engine.num_held > 0


def verified(
    engine: FusedTarget, one: Request, drafted: list[int], plan: RowPlan
) -> list[LogitRows]:
    """A pass over its anchor and a draft, with slots as planned, behind all else of its text."""
    engine.native.forward([one.id], [one.token_ids[:-1]])
    engine.set_plan(one, plan)
    assert engine.plan_of(one) == plan
    rows = engine.verify([one], [Draft(tuple(drafted))])
    assert engine.plan_of(one) == NO_SLOTS, "a plan is for one pass"
    return rows


@every_kind
def test_each_group_drafts_what_its_slots_would_draft_alone(
    kind: Kind, target: NativeTarget
) -> None:
    model = drafter(target, **kind)
    ids = text(12, seed=4)
    engine, one = fused_engine(target, model), request(ids[:9])
    verified(engine, one, ids[9:12], RowPlan(3, (4, 0, 2, 5)))
    for row, size in enumerate((4, 0, 2, 5)):
        group = engine._member(one).groups[row]
        assert len(group.logits) == size
        if size:
            expected = block_logits(model, ids[: 9 + row], [-1] * (size + 1))[1:]
            torch.testing.assert_close(group.logits, expected, atol=1e-5, rtol=1e-4)


def test_in_a_batch_each_group_is_its_own_and_bystanders_are_left_alone(
    target: NativeTarget,
) -> None:
    model, native = drafter(target), NativeTarget(target.model)
    engine = fused_engine(native, model)
    requests = [request(text(length, seed=length)) for length in (9, 20, 5, 14)]
    native.forward([one.id for one in requests], [one.token_ids[:-1] for one in requests])
    before = native.cache.lengths.copy()
    for place, plan in ((0, RowPlan(1, (2, 3))), (2, RowPlan(0, (4,))), (3, NO_SLOTS)):
        engine.set_plan(requests[place], plan)
    asked = [requests[place] for place in (3, 0, 2)]
    rows = engine.verify(asked, [Draft((7, 8)), Draft((9,)), Draft()])
    assert [len(logits) for logits in rows] == [3, 2, 1]
    fed = [
        [*one.token_ids, *drafted] for one, drafted in zip(asked, ((7, 8), (9,), ()), strict=True)
    ]
    for token_ids, logits in zip(fed, rows, strict=True):
        (expected,) = NativeTarget(target.model).forward([0], [token_ids])
        torch.testing.assert_close(logits.raw, expected.raw[-len(logits) :], atol=1e-5, rtol=1e-4)
    assert native.cache.lengths == [before[0] + 2, before[1], before[2] + 1, before[3] + 3]
    for one, drafted, sizes in ((requests[0], [9], (2, 3)), (requests[2], [], (4,))):
        for row, size in enumerate(sizes):
            behind = [*one.token_ids, *drafted[:row]]
            expected_logits = block_logits(model, behind, [-1] * (size + 1))[1:]
            group = engine._member(one).groups[row]
            torch.testing.assert_close(group.logits, expected_logits, atol=1e-5, rtol=1e-4)


def test_the_draft_after_a_round_comes_from_the_group_behind_the_last_kept_token(
    target: NativeTarget,
) -> None:
    model = drafter(target)
    ids = text(12, seed=4)
    for num_accepted in range(3):
        engine = FusedTarget(NativeTarget(target.model), model, 6, 16)
        one = request(ids[:9])
        (draft,) = engine.propose([one])
        assert draft.token_ids == (), "nothing was drafted yet"
        member = engine._member(one)
        member.last = _LastPass(8, 2, 2, looked_up=False)
        verified(engine, one, ids[9:11], RowPlan(2, (3, 3, 3)))
        grow(one, [*ids[9 : 9 + num_accepted], 77])
        engine.rewind([one])
        assert engine.native.cache.length(one.id) == len(one) - 1
        expected = block_logits(model, ids[: 9 + num_accepted], [-1] * 4)[1:].argmax(-1).tolist()
        (draft,) = engine.propose([one])
        assert list(draft.token_ids) == expected[: len(draft.token_ids)]
        assert draft.token_ids


def test_a_round_whose_group_was_left_out_goes_on_without_a_draft(target: NativeTarget) -> None:
    one = decode(fused_engine(target, drafter(target), 2), [make(target, max_tokens=60)])[0]
    assert one.ids == run(target, max_tokens=60).ids
    assert any(stats.draft_length == 0 for stats in one.rounds[1:])
    assert any(stats.draft_length > 0 for stats in one.rounds)


def test_slots_that_are_not_finite_cost_speed_and_no_answer(target: NativeTarget) -> None:
    model = drafter(target)
    model.set_mask_vector(torch.full_like(model.mask_vector, float("inf")))  # type: ignore[arg-type]
    together = decode(fused_engine(target, model), six(target))
    assert [one.ids for one in together] == [
        one.ids for one in run_all(target, None, six(target), 0)
    ]
    for one in together:
        if len(one.rounds) > 2:
            (fault,) = one.faults
            assert "the drafter's logits are not finite (NaN or infinite) in a draft pass" in fault


def test_slots_that_are_not_finite_reach_no_bystander(target: NativeTarget) -> None:
    native = NativeTarget(target.model)
    model = drafter(target)
    model.set_mask_vector(torch.full_like(model.mask_vector, float("nan")))  # type: ignore[arg-type]
    engine = fused_engine(native, model)
    first, between, last = (request(text(length, seed=length)) for length in (9, 5, 12))
    three = [first, between, last]
    native.forward([one.id for one in three], [one.token_ids[:-1] for one in three])
    engine.set_plan(first, RowPlan(0, (4,)))
    engine.set_plan(last, RowPlan(0, (3,)))
    rows = engine.verify([first, last], [Draft(), Draft()])
    assert torch.isfinite(native.cache.keys).all()
    assert torch.isfinite(native.cache.values).all()
    rows.insert(1, *engine.verify([between], [Draft()]))
    for one, logits in zip(three, rows, strict=True):
        (expected,) = NativeTarget(target.model).forward([0], [one.token_ids], last_only=True)
        torch.testing.assert_close(logits.raw, expected.raw, atol=1e-5, rtol=1e-5)
    assert engine.propose([first, last]) == [not_finite(len(first)), not_finite(len(last))]


def test_a_spoilt_request_goes_on_plainly_while_others_draft(target: NativeTarget) -> None:
    """The guard suspends it: what was known of it is dropped, its place in the cache stays."""

    class Spoiling(FusedTarget):
        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            return [
                Draft(fault="told so") if one.prompt_length == 4 and one.num_rounds == 3 else draft
                for one, draft in zip(requests, super().propose(requests), strict=True)
            ]

    engine = Spoiling(NativeTarget(target.model), drafter(target), 4, 12)
    together = decode(engine, six(target))
    assert [one.ids for one in together] == [one.ids for one in run_all(target, None, six(target))]
    assert [one.faults for one in together] == [[], [], ["told so"], [], [], []]
    spoilt = together[2].rounds
    assert len(spoilt) > 8
    assert not any(stats.draft_length or stats.num_slots for stats in spoilt[3:])
    assert any(stats.draft_length for stats in together[1].rounds[3:])


def test_a_request_may_be_dropped_and_taken_up_again(target: NativeTarget) -> None:
    """As `auto` does between rounds: it plans anew from nothing, and the answer stays."""

    class Interrupted(FusedTarget):
        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            for one in requests:
                if one.num_rounds % 4 == 3:
                    self.suspend(one)
                    assert self.plan_of(one) == NO_SLOTS
            return super().propose(requests)

    engine = Interrupted(NativeTarget(target.model), drafter(target), 4, 12)
    together = decode(engine, six(target))
    assert [one.ids for one in together] == [one.ids for one in run_all(target, None, six(target))]
    assert any(stats.num_accepted for one in together for stats in one.rounds)


@pytest.mark.parametrize("lengths", [(1, 40, 40), (40, 1, 40), (1, 1, 1), (2, 1, 30)], ids=str)
def test_requests_that_end_with_their_first_token_stop_nobody_else(
    lengths: tuple[int, ...], target: NativeTarget
) -> None:
    def requests() -> list[Run]:
        return [
            make(target, text(4 + number, seed=number), max_tokens=length)
            for number, length in enumerate(lengths)
        ]

    together = decode(fused_engine(target, drafter(target)), requests())
    assert [one.ids for one in together] == [
        one.ids for one in run_all(target, None, requests(), 0)
    ]
    assert not any(one.faults for one in together)
    assert all(
        any(stats.draft_length for stats in one.rounds) for one in together if len(one.ids) > 10
    )


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": (11, 30)},
        {"min_tokens": 4, "stop_token_ids": (11, 30, 56)},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_ends_and_logprobs_in_a_batch_are_plains(
    params: dict[str, Any], target: NativeTarget
) -> None:
    together = decode(
        fused_engine(target, drafter(target)), six(target, temperature=0.9, seed=4, **params)
    )
    plain = run_all(target, None, six(target, temperature=0.9, seed=4, **params), 0)
    assert [(one.ids, one.finish_reason) for one in together] == [
        (one.ids, one.finish_reason) for one in plain
    ]
    assert len({one.finish_reason for one in plain}) == (1 if "logprobs" in params else 2), (
        "some ended early"
    )
    for one, other in zip(together, plain, strict=True):
        assert [entry.token_id for entry in one.logprobs] == [
            entry.token_id for entry in other.logprobs
        ]
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-3
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_other_families_packed(family: str, tied: bool) -> None:
    engine = NativeTarget(tiny_transformer(family, seed=3, tie_word_embeddings=tied))
    model = drafter(engine, previous_token_width=8)
    expected = [one.ids for one in run_all(engine, None, six(engine), 0)]
    pack_weights(engine.model, model)
    together = decode(fused_engine(engine, model), six(engine))
    assert [one.ids for one in together] == expected
    assert not any(one.faults for one in together)


def test_up_to_the_end_of_the_context() -> None:
    engine = NativeTarget(tiny_transformer(seed=1, max_position_embeddings=40))
    for prompt_length in (1, 20, 37, 39):
        prompt = text(prompt_length)
        fused_run = decode(
            fused_engine(engine, drafter(engine), 16), [make(engine, prompt, max_tokens=100)]
        )[0]
        assert fused_run.ids == run(engine, None, prompt, max_tokens=100).ids
        assert not fused_run.faults


def test_interleaved_answers_in_different_modes_do_not_meet(target: NativeTarget) -> None:
    model = drafter(target)
    engine = fused_engine(target, model)
    shared = BlockDrafter(model, 97, shared_cache=target.cache)
    ways: list[tuple[Any, Any]] = [
        (engine, engine),
        (target, shared),
        (target, None),
        (engine, engine),
        (target, BlockDrafter(model, 97)),
    ]
    runs = [make(target, text(5, seed=number), max_tokens=40) for number in range(5)]
    streams = [Engine(*way).run([one.request]) for way, one in zip(ways, runs, strict=True)]
    while streams:
        streams = [stream for stream in streams if next(stream, None) is not None]
    assert [one.ids for one in runs] == [
        run(target, None, text(5, seed=number), max_tokens=40).ids for number in range(5)
    ]
    assert target.num_held == engine.num_held == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scope": "all"}, "deltas at slots only"),
        ({"scope": None}, "serial and plain work"),
        ({"kept_layers": (0,)}, "the target itself"),
        ({"alignment": "same"}, "alignment next"),
        ({"block_size": 1}, "blocks of two or more"),
    ],
    ids=str,
)
def test_other_drafters_are_refused_with_the_modes_that_work(
    change: Kind, message: str, target: NativeTarget
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fused_engine(target, tiny_drafter(target.model, **change))


def test_a_drafter_of_another_target_is_refused(target: NativeTarget) -> None:
    with pytest.raises(InvalidRequest, match="the target itself"):
        fused_engine(target, tiny_drafter(tiny_transformer(seed=2)))


def test_rows_stay_within_the_budget(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = fused.fused_layout

    def watch(*arguments: Any) -> Any:
        layout = original(*arguments)
        seen.append(layout.width + layout.num_slots)
        return layout

    monkeypatch.setattr(fused, "fused_layout", watch)
    (one,) = decode(fused_engine(target, drafter(target), 9, 5), [make(target, max_tokens=100)])
    assert max(seen) == 9
    told = [
        1 + stats.draft_length + (stats.num_slots or 0) for stats in one.rounds if stats.num_slots
    ]
    assert told == seen


def test_no_slot_is_hung_where_nothing_can_follow(target: NativeTarget) -> None:
    engine = fused_engine(target, drafter(target))
    one = request(text(6), room=1)
    engine.propose([one])
    assert engine.plan_of(one) == RowPlan(0, (0,))


# Which rows


def test_all_rows_are_spent_on_what_promises_most() -> None:
    plan = plan_rows([0.9, 0.5, 0.1], [0.7, 0.4, 0.2], 10, 50)
    assert 1 + plan.num_drafted + sum(plan.groups) == 10
    assert plan.num_drafted == 2
    assert len(plan.groups) == 3
    assert plan.groups[1] >= plan.groups[0], "that both are kept, or one, is likelier than none"


@pytest.mark.parametrize("price", [0.0, 0.06, 0.3])
@pytest.mark.parametrize("rows", range(2, 40))
def test_no_plan_is_better_than_the_one_found(rows: int, price: float) -> None:
    confidences, survival = [0.8, 0.6, 0.5], [0.7, 0.5, 0.2]
    plan = plan_rows(confidences, survival, rows, 50, price)
    assert 1 + plan.num_drafted + sum(plan.groups) <= rows
    assert _promise(plan, confidences, survival, price) == pytest.approx(
        _best(confidences, survival, rows, price)
    )


def _promise(plan: RowPlan, confidences: list[float], survival: list[float], price: float) -> float:
    reached, total = 1.0, -price * (plan.num_drafted + sum(plan.groups))
    for row, size in enumerate(plan.groups):
        stops = reached * (1 - confidences[row]) if row < plan.num_drafted else reached
        total += NEXT_ROUND * stops * sum(survival[:size])
        if row < plan.num_drafted:
            reached *= confidences[row]
            total += reached
    return total


def _best(confidences: list[float], survival: list[float], rows: int, price: float) -> float:
    best = 0.0
    for num_drafted in range(min(3, rows - 1) + 1):
        plans = [RowPlan(num_drafted, ())]
        for _ in range(num_drafted + 1):
            plans = [
                RowPlan(num_drafted, (*plan.groups, size)) for plan in plans for size in range(4)
            ]
        fitting = [plan for plan in plans if 1 + num_drafted + sum(plan.groups) <= rows]
        best = max(best, *(_promise(plan, confidences, survival, price) for plan in fitting))
    return best


def test_a_row_that_promises_less_than_its_price_is_left_out() -> None:
    assert plan_rows([0.9, 0.02], [0.7, 0.4, 0.05], 40, 50, 0.06) == RowPlan(1, (0, 2))
    assert plan_rows([], [0.09], 40, 50, 0.06) == RowPlan(0, (0,))


def test_where_rows_cost_something_a_hopeless_drafter_is_asked_now_and_then_only(
    target: NativeTarget,
) -> None:
    model = drafter(target)
    runs = [
        decode(FusedTarget(target, model, 4, 12, row_price=price), [make(target, max_tokens=150)])
        for price in (0.0, 0.05)
    ]
    assert runs[0][0].ids == runs[1][0].ids
    free, priced = ([stats.draft_length > 0 for stats in one[0].rounds] for one in runs)
    assert sum(priced[-60:]) < 0.5 * sum(free[-60:])
    assert any(priced[-60:])


def test_rows_have_their_price_which_is_measured_once_per_machine(
    tiny_target: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def seconds(*arguments: Any) -> float:
        measured.append(arguments[3])
        return 1.0 + 0.04 * arguments[3]

    monkeypatch.setattr("d3d.methods.fused.rows.pass_seconds", seconds)
    base = open_tiny(tiny_target)
    target = NativeTarget(base.transformer)
    for _ in range(2):
        parts = Parts(base, target, random_drafter(base))
        built = FusedConfig(rows=7, lookup=3).build(parts)
        engine = built.target
        assert isinstance(engine, FusedTarget)
        assert engine is built.drafter
        assert (engine.rows, engine.lookup) == (7, 3)
        assert engine.max_draft_length == LONGEST_COPY
        assert engine.row_price == pytest.approx(0.04 / 1.04)
    assert measured == [1, 4, 16]
    assert "row_price" in (cache / "machine.jsonl").read_text()
    engine = FusedConfig().build(parts).target
    assert isinstance(engine, FusedTarget)
    assert engine.rows in BUDGETS
    assert (engine.lookup, engine.max_draft_length) == (0, 5)


def test_rows_that_cost_nothing_have_no_price(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds_a_row, price in ((0.0, 0.0), (-0.01, 0.0), (0.5, 0.5 / 1.5)):
        monkeypatch.setattr(
            "d3d.methods.fused.rows.pass_seconds",
            lambda *given, cost=seconds_a_row: 1.0 + cost * given[3],
        )
        assert row_price(target, drafter(target), 4) == pytest.approx(price)


def test_the_price_of_a_row_is_a_figure_of_real_passes(target: NativeTarget) -> None:
    assert 0 <= row_price(target, drafter(target), 4) < 1
    assert target.num_held == 0


def test_near_the_end_nothing_is_drafted_that_could_not_be_used() -> None:
    assert plan_rows([0.9, 0.9], [0.7, 0.5], 12, 1) == RowPlan(1, (0, 0))
    assert plan_rows([0.9, 0.9], [0.7, 0.5], 12, 3) == RowPlan(2, (2, 1, 0))


def test_drafted_tokens_go_before_slots_of_equal_chance() -> None:
    for rows in (3, 5, 8):
        assert plan_rows([0.5] * 4, [0.65, 0.42, 0.27, 0.18], rows, 50).num_drafted >= 1


# The budget


def test_more_rows_bring_more_tokens() -> None:
    tokens = [expected_tokens(rows, 6) for rows in BUDGETS]
    assert tokens == sorted(tokens)
    assert 1.2 < tokens[0] < tokens[-1] < 3.0


def test_the_budget_of_least_time_per_token_is_found(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drafter(target)
    most = max(BUDGETS, key=lambda rows: expected_tokens(rows, 5, PRICE))
    for seconds_a_row, best in ((1e-9, most), (100.0, BUDGETS[0])):
        monkeypatch.setattr(
            "d3d.methods.fused.rows.pass_seconds",
            lambda *given, cost=seconds_a_row: 1.0 + cost * given[3],
        )
        assert best_rows(target, model, 5, PRICE) == best


@pytest.mark.parametrize("context", [6, 10, 33, 34])
def test_a_short_context_has_a_budget_too(context: int) -> None:
    engine = NativeTarget(tiny_transformer(seed=1, max_position_embeddings=context))
    assert best_rows(engine, drafter(engine), 5) in BUDGETS


def test_an_endless_budget_takes_no_endless_room(target: NativeTarget) -> None:
    one = decode(fused_engine(target, drafter(target), 10**9, 3), [make(target, max_tokens=30)])[0]
    assert one.ids == run(target, max_tokens=30).ids


@pytest.mark.parametrize("draft_length", [4, LONGEST_COPY])
def test_what_the_text_holds_is_drafted_where_it_promises_more_than_the_slots(
    draft_length: int,
) -> None:
    repeating = NativeTarget(tiny_transformer(seed=1, scale=0.3))
    by_slots = 0
    for params in SAMPLING.values():
        plain = [make(repeating, text(6, seed) * 4, max_tokens=40, **params) for seed in range(3)]
        wanted = [one.ids for one in run_all(repeating, None, plain)]
        engine = FusedTarget(
            repeating,
            drafter(repeating),
            draft_length,
            12,
            lookup=2,
            row_price=PRICE,
        )
        runs = decode(
            engine,
            [make(repeating, text(6, seed) * 4, max_tokens=40, **params) for seed in range(3)],
        )
        assert [one.ids for one in runs] == wanted
        rounds = [stats for one in runs for stats in one.rounds]
        assert any(stats.looked_up and stats.draft_length for stats in rounds)
        by_slots += sum(stats.draft_length > 0 and not stats.looked_up for stats in rounds)
    assert by_slots
    without = decode(
        FusedTarget(repeating, drafter(repeating), 4, 12),
        [make(repeating, text(6) * 4, max_tokens=40)],
    )
    assert not any(stats.looked_up for stats in without[0].rounds)


def test_a_draft_of_slots_goes_on_with_copies_and_no_longer_than_drafts_may_be(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeating = NativeTarget(tiny_transformer(seed=1, scale=0.3))
    prompt = text(6) * 4
    whole = [*prompt, *run(repeating, prompt=prompt, max_tokens=60).ids]

    def right(self: FusedTarget, group: DraftedGroup, one: Request) -> Offer:
        tokens = tuple(whole[len(one) :][: len(group.states)])
        return Offer(tokens, (0.9,) * len(tokens))

    def none(self: CopiedOffers, token_ids: list[int]) -> Offer:
        return Offer((), (), looked_up=True)

    monkeypatch.setattr(FusedTarget, "_choose", right)
    monkeypatch.setattr(CopiedOffers, "offer", none)
    engine = FusedTarget(repeating, drafter(repeating), LONGEST_COPY, 40, lookup=2, row_price=PRICE)
    assert engine.max_draft_length == LONGEST_COPY > engine.longest_group == 5
    (one,) = decode(engine, [make(repeating, prompt, max_tokens=60)])
    assert [*prompt, *one.ids] == whole
    assert max(stats.num_accepted for stats in one.rounds) > engine.longest_group, (
        "with slots alone it could not be"
    )
    engine = FusedTarget(repeating, drafter(repeating), 3, 40, lookup=2, row_price=PRICE)
    (shorter,) = decode(engine, [make(repeating, prompt, max_tokens=60)])
    assert max(stats.draft_length for stats in shorter.rounds) == 3


def test_copies_behind_a_draft_are_believed_as_far_as_they_were_kept() -> None:
    copies = CopiedOffers(2, 5)
    known, drafted = [1, 2, 3, 9, 4, 5, 1], Offer((2, 3), (0.9, 0.8))
    continued = copies.continued(known, drafted)
    assert continued == ((2, 3, 9, 4, 5), (0.9, 0.8, *[pytest.approx(0.75)] * 3), False)
    assert copies.continued(known, Offer((7, 8), (0.9, 0.8))) == ((7, 8), (0.9, 0.8), False)
    assert copies.continued(known, Offer((), ())) == Offer((), ())
    assert copies.continued(known, Offer((2, 3, 9, 4, 6), (0.9,) * 5)).tokens == (2, 3, 9, 4, 6)
    copies.add_continued(2, 5, 2)  # the first of three was not kept
    assert copies.continued(known, drafted).confidences[2] == pytest.approx(3 / 5)
    copies.add_continued(2, 5, 5)
    assert copies.continued(known, drafted).confidences[2] == pytest.approx(6 / 8)
    copies.add_continued(2, 5, 1)  # none of them was looked at
    assert copies.continued(known, drafted).confidences[2] == pytest.approx(6 / 8)


def test_what_a_text_offers_is_believed_as_far_as_it_was_kept() -> None:
    copies = CopiedOffers(2, 3)
    offer = copies.offer([1, 2, 3, 9, 1, 2])
    assert offer.tokens == (3, 9, 1)
    assert offer.confidences == pytest.approx((0.65, 0.65, 0.65))
    assert offer.promise(3) == pytest.approx(0.65 + 0.65**2 + 0.65**3)
    assert offer.promise(1) == pytest.approx(0.65)
    assert copies.offer([1, 2, 3, 9, 1, 2, 7]).promise(3) == 0
    for _ in range(50):
        copies.survival.add(3, 1)
    assert copies.offer([1, 2, 3, 9, 1, 2, 7, 1, 2]).confidences[0] > 0.9
    assert copies.offer([1, 2, 3, 9, 1, 2, 7, 1, 2]).confidences[1] < 0.1


def test_a_price_of_another_processor_of_the_same_name_is_not_used(
    tiny_target: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = open_tiny(tiny_target)
    parts = Parts(base, NativeTarget(base.transformer), random_drafter(base))
    assert machine_costs(parts).measured("row_price", lambda: 0.25) == 0.25
    assert machine_costs(parts).get("row_price") == 0.25
    monkeypatch.setattr("d3d.methods.costs.processor_model", lambda: "26 2 AVX512")
    assert machine_costs(parts).get("row_price") is None
    assert (cache / "machine.jsonl").exists()
