"""The cost of a drafter on this machine: its pass, the target's verification, and whole answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from d3d.engine.params import SamplingParams
from d3d.hub.open_drafter import ready_drafters
from d3d.hub.open_model import OpenModel
from d3d.lab.plan.probes import PassProbe
from d3d.lab.prune.curve import DepthTiming
from d3d.lab.tune.measure import answer_case, ms_per_token
from d3d.methods.base import Parts
from d3d.methods.plain.config import PlainConfig
from d3d.methods.serial.config import SerialConfig
from d3d.model.from_target import select_layers
from d3d.target.native import NativeTarget
from d3d.train.corpus import Sample

REPEATS = 15
CONTEXT = 256
"""Tokens before the passes that are timed."""


def time_drafter(
    path: Path,
    target: OpenModel,
    draft_length: int,
    answers: list[Sample] | None = None,
    max_tokens: int = 0,
) -> DepthTiming:
    """Medians over plain passes, drafts and verifications, taking turns, after CONTEXT tokens.

    answers: decoded in whole too, up to max_tokens, plain and serial taking turns. The target is
    unchanged: other drafters can't be loaded over weights packed for decoding."""
    layers = tuple(range(len(target.transformer.layers)))
    packed = replace(target, transformer=select_layers(target.transformer, layers, share=True))
    (drafter,) = ready_drafters(packed, [path])
    parts = Parts(packed, NativeTarget(packed.transformer), drafter, path)
    medians = _passes(parts, draft_length)
    plain, serial = _answers(parts, draft_length, answers, max_tokens) if answers else (None, None)
    return DepthTiming(
        t_draft_ms=medians["draft"],
        t_verify_ms=medians["verify"],
        t_plain_ms=medians["plain"],
        measured_plain_ms=plain,
        measured_serial_ms=serial,
    )


def _passes(parts: Parts, draft_length: int) -> dict[str, float]:
    """Median milliseconds by kind of pass."""
    assert isinstance(parts.target, NativeTarget)
    vocab_size, generator = parts.target.vocab_size, torch.Generator().manual_seed(0)
    length = min(CONTEXT, parts.target.max_length - draft_length - 2)
    text = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    probe = PassProbe(parts.target.model, parts.drafter, text)
    passes: dict[str, Callable[[], None]] = {
        "plain": lambda: probe.verify(1),
        "draft": lambda: probe.draft(draft_length),
        "verify": lambda: probe.verify(draft_length + 1),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(REPEATS + 1):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                times[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _answers(
    parts: Parts, draft_length: int, samples: list[Sample], max_tokens: int
) -> tuple[float, float]:
    """Milliseconds per token after the first, plain and serial."""
    params = SamplingParams(max_tokens=max_tokens)
    configs = (PlainConfig(), SerialConfig(draft_length=draft_length))
    ways = [config.build(parts) for config in configs]
    results = [
        [answer_case(parts.model, way, [sample.prompt_ids], params) for way in ways]
        for sample in samples
    ]
    plain, serial = (ms_per_token(column) for column in zip(*results, strict=True))
    return plain, serial
