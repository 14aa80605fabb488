"""The cost of a drafter on this machine: its pass, the target's verification, and whole answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.decoding.modes import Decoding
from d3d.drafting.block_drafter import BlockDrafter
from d3d.hub.open_model import OpenModel
from d3d.hub.ready import ready_drafters
from d3d.lab.prune.curve import DepthTiming
from d3d.lab.tune.measure import answer_case, ms_per_token
from d3d.model.from_target import select_layers
from d3d.target.native import NativeEngine
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
    (model,) = ready_drafters(packed, [path])
    engine = NativeEngine(packed.transformer)
    timer = _Timer(engine, BlockDrafter(model, engine.vocab_size), draft_length)
    medians = timer.passes()
    plain, serial = timer.answers(answers, max_tokens, target) if answers else (None, None)
    return DepthTiming(
        t_draft_ms=medians["draft"],
        t_verify_ms=medians["verify"],
        t_plain_ms=medians["plain"],
        measured_plain_ms=plain,
        measured_serial_ms=serial,
    )


@dataclass(frozen=True)
class _Timer:
    engine: NativeEngine
    drafter: BlockDrafter
    draft_length: int

    def passes(self) -> dict[str, float]:
        """Median milliseconds by kind of pass."""
        passes = self._open()
        times: dict[str, list[float]] = {name: [] for name in passes}
        for repeat in range(REPEATS + 1):
            for name, run in passes.items():
                started = time.perf_counter()
                run()
                if repeat:  # the first is a warm-up
                    times[name].append(time.perf_counter() - started)
        return {name: 1e3 * statistics.median(values) for name, values in times.items()}

    def _open(self) -> dict[str, Callable[[], object]]:
        engine, generator = self.engine, torch.Generator().manual_seed(0)
        length = min(CONTEXT, engine.max_length - self.draft_length - 2)
        capacity = length + self.draft_length + 2
        text = torch.randint(0, engine.vocab_size, (length,), generator=generator).tolist()
        session = engine.open(1, capacity)
        session.forward([text[:-1]], last_only=True)
        drafts = self.drafter.open_beside(session) or self.drafter.open(1, capacity)
        sequence = Sequence(text, SamplingParams())

        def forward(rows: int) -> None:
            session.forward([[text[-1]] * rows])
            session.crop([length - 1])

        return {
            "plain": lambda: forward(1),
            "draft": lambda: drafts.draft([sequence], [self.draft_length]),
            "verify": lambda: forward(self.draft_length + 1),
        }

    def answers(
        self, samples: list[Sample], max_tokens: int, target: OpenModel
    ) -> tuple[float, float]:
        """Milliseconds per token after the first, plain and serial."""
        params = SamplingParams(max_tokens=max_tokens)
        ways = (
            Decoding(self.engine, None, 0),
            Decoding(self.engine, self.drafter, self.draft_length),
        )
        results = [
            [answer_case(target, way, [sample.prompt_ids], params) for way in ways]
            for sample in samples
        ]
        plain, serial = (ms_per_token(column) for column in zip(*results, strict=True))
        return plain, serial
