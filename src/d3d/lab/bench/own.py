"""Our own methods: all run through one engine and one loop, and differ in their drafter only.

The only module of the benchmark that builds drafters and decodes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, cast

from d3d.api import Model
from d3d.baselines.draft_model import autoregressive_head, draft_model
from d3d.baselines.lookup import LookupDrafter
from d3d.core.protocols import Drafter
from d3d.core.types import SamplingParams
from d3d.decoding.loop import Event, decode
from d3d.decoding.modes import DEFAULT_DRAFT_LENGTH as DEFAULT_DRAFT_LENGTH
from d3d.decoding.modes import DEFAULT_OUTCOMES, MODES, Decoding, ModeOptions
from d3d.decoding.request import Request, new_request
from d3d.drafting.block_drafter import BlockDrafter
from d3d.drafting.packed_pass import PackedDrafter
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
    """Builds the decoding of one of our methods."""

    at: Callable[[int | None], Decoding]
    """By draft length; None: the method's default."""
    about: dict[str, Any]
    """Describes the drafter, for the provenance."""
    longest: int | None = None
    """Longest draft; None: the drafter's block size."""
    retime: Callable[[TimedAnswer], TimedAnswer] | None = None
    """Replaces measured times by modelled ones; such a method answers one prompt at a time."""


def _mode(name: str) -> Callable[[Model, MethodOptions], OwnMethod]:
    def make(model: Model, options: MethodOptions) -> OwnMethod:  # noqa: ARG001 - uses the model's drafter
        about = {} if name == PLAIN or model.drafter is None else _about(model.drafter)
        preset = model.options(name, ModeOptions())._asdict()
        if chosen := {key: value for key, value in preset.items() if value is not None}:
            about["options"] = chosen

        def at(length: int | None) -> Decoding:
            return model.decoding(name, ModeOptions(draft_length=length))

        # async mode's drafter is built for one draft length, so it does not tell the longest
        longest = model.drafter.block_size if name == "async" and model.drafter else None
        return OwnMethod(at, about, longest)

    return make


def _lookup(model: Model, options: MethodOptions) -> OwnMethod:  # noqa: ARG001 - needs no other model
    drafter = LookupDrafter()
    about = {"longest": drafter.longest, "shortest": drafter.shortest}
    return OwnMethod(_serially(model, drafter), about)


def _draft_model(model: Model, options: MethodOptions) -> OwnMethod:
    if options.draft_model is not None:
        opened = open_model(options.draft_model, device=options.device, dtype=options.dtype)
        drafter = draft_model(opened, model.target)
        return OwnMethod(_serially(model, drafter), {"model": options.draft_model})
    if model.drafter is None:
        raise InvalidRequest(
            "method draft_model: name a causal model with --draft-model, "
            "or a drafter whose own head can be used"
        )
    drafter = autoregressive_head(model.drafter.model, model.engine.vocab_size)
    return OwnMethod(_serially(model, drafter), {"model": "the clean rows of the drafter"})


def _serially(model: Model, drafter: Drafter) -> Callable[[int | None], Decoding]:
    return lambda length: Decoding(
        model.engine, drafter, min(length or DEFAULT_DRAFT_LENGTH, drafter.block_size)
    )


def _async_modelled(model: Model, options: MethodOptions) -> OwnMethod:  # noqa: ARG001 - uses the model's drafter
    if model.drafter is None:
        raise InvalidRequest(
            f"method {ASYNC_MODELLED}: it needs a D3D drafter; name one with --drafter"
        )
    drafter = PackedDrafter(model.drafter.model, model.engine.vocab_size)
    limit = model.drafter.block_size
    switch_s = median(handover_seconds("thread", HANDOVERS))

    def at(length: int | None) -> Decoding:
        width = min(length or DEFAULT_DRAFT_LENGTH, limit)
        return Decoding(model.engine, RehearsedDrafter(drafter, width, DEFAULT_OUTCOMES), width)

    about = _about(model.drafter) | {
        "outcomes": DEFAULT_OUTCOMES,
        "times": "modelled, as if the drafter had a second device",
    }
    return OwnMethod(at, about, retime=lambda answer: on_two_devices(answer, switch_s))


def _about(drafter: BlockDrafter) -> dict[str, Any]:
    config, weights = drafter.model.config, drafter.model.trainable()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return {
        "fingerprint": weights_fingerprint(weights),
        "block_size": config.block_size,
        "kept_layers": list(config.kept_layers),
        "own_mib": round(num_bytes / (1 << 20)),
        "num_denoise_steps": drafter.num_denoise_steps,
    }


OWN: dict[str, Callable[[Model, MethodOptions], OwnMethod]] = {
    **{mode: _mode(mode) for mode in MODES},
    "lookup": _lookup,
    "draft_model": _draft_model,
    ASYNC_MODELLED: _async_modelled,
}
"""Every mode of d3d, drafters that are no mode, and one method with modelled times."""


def sampling_params(setting: Setting, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=setting.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )


def answer_together(
    model: Model,
    chosen: Decoding,
    questions: Sequence[Question],
    setting: Setting,
    sampling: Sampling,
) -> list[TimedAnswer]:
    """Decode all questions in one batch. Raises InvalidRequest for a prompt that is too long."""
    params = sampling_params(setting, sampling)
    timer = DeliveryTimer()
    requests = [
        new_request(
            model.engine,
            question.token_ids,
            params,
            eos_token_ids=model.target.eos_token_ids,
            tokenizer=model.tokenizer,
            device=model.target.device,
        )
        for question in questions
    ]
    notes = [_Notes() for _ in requests]
    for event in decode(chosen.target, chosen.drafter, requests, chosen.draft_length):
        notes[event.index].add(event, timer.elapsed())
    wall_s = timer.elapsed()
    return [
        note.answer(request, wall_s, has_rounds=chosen.drafter is not None)
        for note, request in zip(notes, requests, strict=True)
    ]


@dataclass
class _Notes:
    """Collects one request's events."""

    texts: list[str] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, event: Event, at_s: float) -> None:
        self.deliveries.append(Delivery(at_s, len(event.verdict.token_ids)))
        self.texts.append(event.text)
        if event.stats is not None:
            self.rounds.append(Round(*cast("Any", event.stats)))
        if event.fault is not None:
            self.faults.append(f"drafting stopped: {event.fault}")

    def answer(self, request: Request, wall_s: float, *, has_rounds: bool) -> TimedAnswer:
        ids = request.sequence.answer_ids
        return TimedAnswer(
            text="".join(self.texts),
            token_ids=tuple(ids),
            num_tokens=len(ids),
            finish_reason=str(request.sequence.finish_reason),
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
    rounds, ends = overlapped(cast("Any", answer.rounds), switch_s, rest_s)
    first, *further = answer.deliveries
    deliveries = [
        Delivery(first.at_s + end, delivery.num_tokens)
        for end, delivery in zip(ends, further, strict=True)
    ]
    return replace(
        answer,
        deliveries=(first, *deliveries),
        rounds=tuple(cast("Any", rounds)),
        wall_s=deliveries[-1].at_s + max(0.0, answer.wall_s - answer.deliveries[-1].at_s),
        modelled=True,
    )
