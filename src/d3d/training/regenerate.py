"""Have the target answer prompts, many at a time, and keep the answers as training samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

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
    """Answers in batches of prompts of like length, in a random order of batches. Prompts that do not fit are left out.

    The noise of a sampled answer hangs on `options.seed` and the prompt alone, so a continued corpus equals one that was never
    interrupted; its seed is in the sample.
    """
    engine = NativeEngine(model.transformer)
    ordered = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    batches = [ordered[start : start + options.batch] for start in range(0, len(ordered), options.batch)]
    random.Random(options.seed).shuffle(batches)
    for batch in batches:
        pairs = [(prompt, _request(engine, model, prompt, options)) for prompt in batch if len(prompt.token_ids) < engine.max_length]
        for _ in decode(engine, None, [request for _, request in pairs]):
            pass
        yield [
            Sample(prompt.token_ids, request.sequence.answer_ids, prompt.source, options.temperature, request.sequence.seed)
            for prompt, request in pairs
        ]


def _request(engine: NativeEngine, model: OpenModel, prompt: Prompt, options: AnswerOptions) -> Request:
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, seed=prompt_seed(prompt.token_ids, options.seed)
    )
    return new_request(engine, prompt.token_ids, params, eos_token_ids=model.eos_token_ids)


def prompt_seed(token_ids: list[int], seed: int) -> int:
    """A seed below 2**53 for one prompt of a corpus."""
    digest = hashlib.sha256(f"{seed} {token_ids}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11
