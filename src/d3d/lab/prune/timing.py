"""What a drafter costs on this machine: its pass, the target's pass that verifies, and whole
answers where they are wanted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.decoding.loop import decode
from d3d.engine.request import new_request
from d3d.hub.open_drafter import ready_drafters
from d3d.hub.open_model import OpenModel
from d3d.lab.prune.curve import Timing
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.from_target import select_layers
from d3d.target.native import NativeEngine
from d3d.train.corpus import Sample

REPEATS = 15
CONTEXT = 256
"""Tokens before the passes that are timed."""


class Measured(NamedTuple):
    """Whole answers that are decoded, plain and serial by turns."""

    samples: list[Sample]
    max_tokens: int


def time_drafter(
    path: Path, target: OpenModel, draft_length: int, measured: Measured | None = None
) -> Timing:
    """Medians over passes behind a text of CONTEXT tokens, plain, draft and verification by turns,
    both models as they are for decoding. The target itself stays as it is: over packed weights no
    other drafter could be loaded."""
    layers = tuple(range(len(target.transformer.layers)))
    packed = replace(target, transformer=select_layers(target.transformer, layers, share=True))
    (model,) = ready_drafters(packed, [path])
    engine = NativeEngine(packed.transformer)
    drafter = BlockDrafter(model, engine.vocab_size)
    passes = _passes(engine, drafter, draft_length)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(REPEATS + 1):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                times[name].append(time.perf_counter() - started)
    plain, serial = (
        _answers(engine, drafter, draft_length, measured, target)
        if measured and measured.samples
        else (None, None)
    )
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return Timing(
        t_draft_ms=medians["draft"],
        t_verify_ms=medians["verify"],
        t_plain_ms=medians["plain"],
        measured_plain_ms=plain,
        measured_serial_ms=serial,
    )


def _passes(
    engine: NativeEngine, drafter: BlockDrafter, draft_length: int
) -> dict[str, Callable[[], object]]:
    length = min(CONTEXT, engine.max_length - draft_length - 2)
    text = torch.randint(
        0, engine.vocab_size, (length,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    session = engine.open(1, length + draft_length + 2)
    session.forward([text[:-1]], last_only=True)
    capacity = length + draft_length + 2
    drafts = drafter.open_beside(session) or drafter.open(1, capacity)
    sequence = Sequence(text, SamplingParams())

    def forward(rows: int) -> None:
        session.forward([[text[-1]] * rows])
        session.crop([length - 1])

    return {
        "plain": lambda: forward(1),
        "draft": lambda: drafts.draft([sequence], [draft_length]),
        "verify": lambda: forward(draft_length + 1),
    }


def _answers(
    engine: NativeEngine,
    drafter: BlockDrafter,
    draft_length: int,
    measured: Measured,
    target: OpenModel,
) -> tuple[float, float]:
    """Milliseconds a token behind the first, plain and serial."""
    ways: dict[str, tuple[BlockDrafter | None, int]] = {
        "plain": (None, 0),
        "serial": (drafter, draft_length),
    }
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for sample in measured.samples:
        for name, (way, length) in ways.items():
            params = SamplingParams(max_tokens=measured.max_tokens)
            request = new_request(
                engine, list(sample.prompt_ids), params, eos_token_ids=target.eos_token_ids
            )
            started = 0.0
            for event in decode(engine, way, [request], length):
                if event.stats is None:
                    started = time.perf_counter()
                else:
                    tokens[name] += len(event.verdict.token_ids)
            seconds[name] += time.perf_counter() - started
    plain, serial = (1e3 * seconds[name] / max(1, tokens[name]) for name in ways)
    return plain, serial
