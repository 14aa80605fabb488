"""Answers of our own engine and loop, with the times of every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from d3d.api import Model
from d3d.core.types import RoundStats, SamplingParams
from d3d.decoding.loop import decode
from d3d.decoding.modes import Decoding
from d3d.engine.clock import Event
from d3d.engine.request import Request, new_request
from d3d.lab.bench.answers import Answer, Delivery, Question, Sampling, Setting, Stopwatch


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
) -> list[Answer]:
    """Decode all questions in one batch. Raises InvalidRequest for a prompt that is too long."""
    params = sampling_params(setting, sampling)
    watch = Stopwatch()
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
        notes[event.index].add(event, watch.elapsed())
    wall_s = watch.elapsed()
    return [
        note.answer(request, wall_s, has_rounds=chosen.drafter is not None)
        for note, request in zip(notes, requests, strict=True)
    ]


@dataclass
class _Notes:
    """What one request's events have brought."""

    texts: list[str] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    rounds: list[RoundStats] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, event: Event, at_s: float) -> None:
        self.deliveries.append(Delivery(at_s, len(event.verdict.token_ids)))
        self.texts.append(event.text)
        if event.stats is not None:
            self.rounds.append(event.stats)
        if event.fault is not None:
            self.faults.append(f"drafting stopped: {event.fault}")

    def answer(self, request: Request, wall_s: float, *, has_rounds: bool) -> Answer:
        ids = request.sequence.answer_ids
        return Answer(
            text="".join(self.texts),
            token_ids=tuple(ids),
            num_tokens=len(ids),
            finish_reason=str(request.sequence.finish_reason),
            deliveries=tuple(self.deliveries),
            rounds=tuple(self.rounds) if has_rounds else None,
            wall_s=wall_s,
            warnings=tuple(self.faults),
        )
