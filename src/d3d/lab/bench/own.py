"""Our own methods: all run through one engine and one loop, and differ in their drafter only.

The only module of the benchmark that builds drafters and decodes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from d3d.api import Model
from d3d.config import METHODS
from d3d.engine.engine import Engine
from d3d.engine.params import SamplingParams
from d3d.engine.request import Request, new_request
from d3d.engine.round import Round
from d3d.errors import InvalidRequest
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.open_model import open_model
from d3d.lab.bench.answers import (
    PLAIN,
    Delivery,
    DeliveryTimer,
    MethodOptions,
    Question,
    Sampling,
    Setting,
    TimedAnswer,
)
from d3d.lab.plan.handover import handover_seconds
from d3d.lab.plan.rehearsal import RehearsedDrafter, overlapped
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.base import DEFAULT_DRAFT_LENGTH as DEFAULT_DRAFT_LENGTH
from d3d.methods.base import Built, check_draft_length
from d3d.methods.draft_model.config import DraftModelConfig
from d3d.model.drafter import DrafterModel

ASYNC_MODELLED = "async_modelled"
"""Async mode as if the drafter had a second device like the target's. Ids, blocks, hits and pass
times are real; when passes would overlap is modelled (`d3d.lab.plan`)."""
LABEL = (
    f"{ASYNC_MODELLED}: its times are modelled, not measured: as if the drafter had a second "
    "device like the target's."
)
HANDOVERS = 20
"""Handovers whose median is the switch time of async_modelled."""


class OwnMethod(NamedTuple):
    """Builds the target and drafter of one of our methods."""

    at: Callable[[int | None], Built]
    """By draft length; None: the method's default. Raises InvalidRequest."""
    about: dict[str, Any]
    """Describes the drafter, for the provenance."""
    check: Callable[[int], object] = int
    """Raises InvalidRequest for a draft length that the method can't serve."""
    retime: Callable[[TimedAnswer], TimedAnswer] | None = None
    """Replaces measured times by modelled ones; such a method answers one prompt at a time."""


def _method(name: str) -> Callable[[Model, MethodOptions], OwnMethod]:
    def make(model: Model, options: MethodOptions) -> OwnMethod:
        if name == "draft_model":
            return _draft_model(model, options)
        about = {} if name in (PLAIN, "ngram") or model.drafter is None else _about(model.drafter)
        chosen = model.config(method=name).model_dump(exclude={"method"}, exclude_none=True)
        if chosen:
            about["options"] = chosen

        def at(length: int | None) -> Built:
            return model.built(model.config(method=name, draft_length=length))

        def check(length: int) -> object:
            return model.config(method=name, draft_length=length).resolve(model.parts.facts)

        return OwnMethod(at, about, check)

    return make


def _draft_model(model: Model, options: MethodOptions) -> OwnMethod:
    parts, about = model.parts, {"model": "the clean rows of the drafter"}
    if options.draft_model is not None:
        opened = open_model(options.draft_model, device=options.device, dtype=options.dtype)
        parts, about = replace(parts, draft_model=opened), {"model": options.draft_model}
    elif model.drafter is None:
        raise InvalidRequest(
            "method draft_model: name a causal model with --draft-model, "
            "or a drafter whose own head can be used"
        )
    return OwnMethod(lambda length: DraftModelConfig(draft_length=length).build(parts), about)


def _async_modelled(model: Model, options: MethodOptions) -> OwnMethod:  # noqa: ARG001 - uses the model's drafter
    if model.drafter is None:
        raise InvalidRequest(
            f"method {ASYNC_MODELLED}: it needs a D3D drafter; name one with --drafter"
        )
    target, limit = model.parts.target, model.drafter.config.block_size
    drafter = PackedDrafter(model.drafter, target.vocab_size)
    switch_s = median(handover_seconds("thread", HANDOVERS))

    def at(length: int | None) -> Built:
        width = min(length or DEFAULT_DRAFT_LENGTH, limit)
        return Built(target, RehearsedDrafter(drafter, width, DEFAULT_OUTCOMES))

    about = _about(model.drafter) | {
        "outcomes": DEFAULT_OUTCOMES,
        "times": "modelled, as if the drafter had a second device",
    }

    def check(length: int) -> object:
        check_draft_length(length, limit)
        return length

    return OwnMethod(at, about, check, retime=lambda answer: on_two_devices(answer, switch_s))


def _about(drafter: DrafterModel) -> dict[str, Any]:
    config, weights = drafter.config, drafter.trainable()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return {
        "fingerprint": weights_fingerprint(weights),
        "block_size": config.block_size,
        "kept_layers": list(config.kept_layers),
        "own_mib": round(num_bytes / (1 << 20)),
    }


OWN: dict[str, Callable[[Model, MethodOptions], OwnMethod]] = {
    **{name: _method(name) for name in METHODS},
    ASYNC_MODELLED: _async_modelled,
}
"""Every method of d3d, and one with modelled times."""


def sampling_params(setting: Setting, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=setting.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )


def answer_together(
    model: Model,
    built: Built,
    questions: Sequence[Question],
    setting: Setting,
    sampling: Sampling,
) -> list[TimedAnswer]:
    """Decode all questions in one batch. Raises InvalidRequest for a prompt that is too long."""
    params = sampling_params(setting, sampling)
    timer = DeliveryTimer()
    requests = [
        new_request(
            model.parts.target,
            question.token_ids,
            params,
            eos_token_ids=model.target.eos_token_ids,
            tokenizer=model.tokenizer,
        )
        for question in questions
    ]
    notes = {request.id: _Notes() for request in requests}
    for round_ in Engine(built.target, built.drafter).run(requests):
        notes[round_.request_id].add(round_, timer.elapsed())
    wall_s = timer.elapsed()
    return [
        notes[request.id].answer(request, wall_s, has_rounds=built.drafter is not None)
        for request in requests
    ]


@dataclass
class _Notes:
    """Collects one request's rounds."""

    texts: list[str] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, round_: Round, at_s: float) -> None:
        self.deliveries.append(Delivery(at_s, len(round_.token_ids)))
        self.texts.append(round_.text)
        if round_.number:
            self.rounds.append(round_)
        if round_.fault is not None:
            self.faults.append(f"drafting stopped: {round_.fault}")

    def answer(self, request: Request, wall_s: float, *, has_rounds: bool) -> TimedAnswer:
        ids = request.answer_ids
        return TimedAnswer(
            text="".join(self.texts),
            token_ids=tuple(ids),
            num_tokens=len(ids),
            finish_reason=str(request.finish_reason),
            deliveries=tuple(self.deliveries),
            rounds=tuple(self.rounds) if has_rounds else None,
            wall_s=wall_s,
            warnings=tuple(self.faults),
        )


def on_two_devices(answer: TimedAnswer, switch_s: float) -> TimedAnswer:
    """A rehearsed answer with modelled times. Each round keeps the mean time that was measured
    outside of its passes."""
    if not answer.rounds:
        return replace(answer, modelled=True)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(answer.deliveries)]
    spent = sum(round_.t_draft + round_.t_verify for round_ in answer.rounds)
    rest_s = max(0.0, sum(gaps) - spent) / len(answer.rounds)
    rounds, ends = overlapped(answer.rounds, switch_s, rest_s)
    first, *further = answer.deliveries
    deliveries = [
        Delivery(first.at_s + end, delivery.num_tokens)
        for end, delivery in zip(ends, further, strict=True)
    ]
    return replace(
        answer,
        deliveries=(first, *deliveries),
        rounds=tuple(rounds),
        wall_s=deliveries[-1].at_s + max(0.0, answer.wall_s - answer.deliveries[-1].at_s),
        modelled=True,
    )
