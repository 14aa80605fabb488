"""Have the target answer prompts, many at a time, and keep the answers as training samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from d3d.core.errors import InvalidRequest
from d3d.core.types import SamplingParams
from d3d.decoding.loop import decode
from d3d.decoding.request import Request, new_request
from d3d.engines.native import NativeEngine
from d3d.models.open_model import OpenModel
from d3d.training.corpus import Sample
from d3d.training.prompts import Prompt


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are written."""

    max_tokens: int = 256
    temperature: float = 0.0
    batch: int = 48
    seed: int = 0


def answer_prompts(model: OpenModel, prompts: list[Prompt], options: AnswerOptions) -> Iterator[list[Sample]]:
    """Answers in batches of prompts of like length, in a random order of batches. Prompts that do not fit are left out."""
    engine = NativeEngine(model.transformer)
    numbered = sorted(enumerate(prompts), key=lambda item: len(item[1].token_ids))
    batches = [numbered[start : start + options.batch] for start in range(0, len(numbered), options.batch)]
    random.Random(options.seed).shuffle(batches)
    for batch in batches:
        requests: list[tuple[Prompt, Request]] = []
        for number, prompt in batch:
            params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed + number)
            try:
                requests.append((prompt, new_request(engine, prompt.token_ids, params, eos_token_ids=model.eos_token_ids)))
            except InvalidRequest:
                continue
        for _ in decode(engine, None, [request for _, request in requests]):
            pass
        yield [
            Sample(prompt.token_ids, request.sequence.answer_ids, prompt.source, options.temperature, request.sequence.seed)
            for prompt, request in requests
        ]
