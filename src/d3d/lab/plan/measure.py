"""Measure a profile: every pass, size, context and number of threads in turn, again and again, so
that what changes meanwhile meets all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from d3d.api import Model
from d3d.drafting.fused_budget import BUDGETS
from d3d.errors import InvalidRequest
from d3d.hub.fingerprint import weights_fingerprint
from d3d.lab.plan.devices import Shape
from d3d.lab.plan.probes import Cell, Probes, can_fuse, native
from d3d.lab.plan.profile import Facts, Memory, Profile, Run, point
from d3d.lab.plan.samples import Samples
from d3d.machine import PeakMemory, machine, processor, versions
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.placement import PLACEMENTS, check_placement, default_placement
from d3d.model.from_target import clean_rows_are_of

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    contexts: tuple[int, ...] = (64, 512)
    draft_lengths: tuple[int, ...] = ()
    """Of drafts, and one more of verifications; empty: some up to the drafter's block size."""
    outcomes: tuple[int, ...] = (1, 2, 4, 8, 16)
    threads: tuple[int, ...] = ()
    """Empty: as many as torch uses."""
    placement: str | None = None
    """Of async mode's draft worker; None: the device's default."""
    repeats: int = 7

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for name, values in (
            ("context", self.contexts),
            ("draft length", self.draft_lengths),
            ("outcomes", self.outcomes),
        ):
            if any(value < 1 for value in values) or (not values and name != "draft length"):
                raise InvalidRequest(
                    f"{name}: {', '.join(map(str, values)) or 'nothing'} can't be measured; give numbers from 1 on"
                )
        if min(self.contexts) < 2:
            raise InvalidRequest(
                "context: a pass needs an anchor and a token before it; give 2 or more"
            )
        if any(count < 1 for count in self.threads):
            raise InvalidRequest(f"threads: {min(self.threads)} is not a number of threads")
        if self.placement not in (None, *PLACEMENTS):
            raise InvalidRequest(
                f"placement: {self.placement!r} is not one of {', '.join(PLACEMENTS)}"
            )
        if self.repeats < 1:
            raise InvalidRequest(f"repeats: {self.repeats} measures nothing")


@dataclass
class Measurement:
    """A profile in the making; samples go to a file beside it as they come, and a second start goes
    on from there."""

    path: Path
    grid: Grid
    dtypes: tuple[str, ...]
    load: Callable[[str], Model]
    """The model in a dtype."""
    _runs: list[Run] = field(default_factory=list)

    def run(self, show: Callable[[int, int, str], None]) -> Profile:
        """Measure what is missing; `show` is told samples done, samples in all of this dtype, and
        what. Writes and returns the profile.

        Raises InvalidRequest for a grid that this model can't be measured on, and where the file
        beside is of another one."""
        about = machine()
        model = None
        for dtype in self.dtypes:
            model = self.load(dtype)
            try:
                self._measure(model, show)
            finally:
                model.close()
        assert model is not None
        target, drafter = _facts(model)
        profile = Profile(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=["d3d", *sys.argv[1:]],
            versions=versions(),
            machine=about,
            target=target,
            drafter=drafter,
            runs=self._runs,
        )
        profile.write(self.path)
        self._samples_path.unlink(missing_ok=True)
        return profile

    @property
    def _samples_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.samples.jsonl")

    def _measure(self, model: Model, show: Callable[[int, int, str], None]) -> None:
        placement = self.grid.placement or default_placement(model.target.device)
        check_placement(placement, model.target.device)
        cells = list(grid_cells(model, self.grid))
        threads = self.grid.threads or (torch.get_num_threads(),)
        samples = Samples(self._samples_path, self._settings(model, placement))
        longest = max(cell.draft_length or cell.size for cell in cells if cell.kind != "fused")
        passes = (self.grid.repeats + 1) * len(threads)
        probes = Probes(model, placement, max(self.grid.outcomes), longest, passes)
        memory, before = PeakMemory(model.target.device), torch.get_num_threads()
        work = list(_order(cells, threads, self.grid.repeats))
        warm: set[tuple[int, Cell]] = set()
        try:
            for number, (count, repeat, cell) in enumerate(work, 1):
                key = [model.dtype_name, count, repeat, *cell]
                if key not in samples:
                    torch.set_num_threads(count)
                    if (count, cell) not in warm:
                        probes.seconds(cell)  # the first time is slower
                        warm.add((count, cell))
                    samples.add(key, probes.seconds(cell))
                show(
                    number,
                    len(work),
                    f"{model.dtype_name}, {count} threads, {cell.kind} {cell.size or ''}, context {cell.context}",
                )
        finally:
            torch.set_num_threads(before)
        for count in threads:
            points = [
                point(*cell, seconds)
                for cell in cells
                if (
                    seconds := samples.of(
                        [model.dtype_name, count, repeat, *cell]
                        for repeat in range(self.grid.repeats)
                    )
                )
            ]
            self._runs.append(
                Run(
                    device=model.device_name,
                    dtype=model.dtype_name,
                    threads=count,
                    placement=placement,
                    points=points,
                    memory=_memory(model, memory.bytes()),
                )
            )

    def _settings(self, model: Model, placement: str) -> dict[str, Any]:
        """What samples of one file must have in common."""
        return {
            "target": model.target.fingerprint,
            "drafter": None
            if model.drafter is None
            else weights_fingerprint(model.drafter.model.trainable()),
            "device": model.device_name,
            "placement": placement,
            "outcomes": max(self.grid.outcomes),
            "machine": processor(),
            "versions": versions(),
        }


def _order(
    cells: list[Cell], threads: tuple[int, ...], repeats: int
) -> Iterator[tuple[int, int, Cell]]:
    """All of them once, then again, each time from another one on."""
    for repeat in range(repeats):
        for count in threads:
            shift = repeat * len(cells) // repeats
            for cell in cells[shift:] + cells[:shift]:
                yield count, repeat, cell


def grid_cells(model: Model, grid: Grid) -> Iterator[Cell]:
    """Raises InvalidRequest for contexts and drafts that the model has no room for."""
    block = model.drafter.block_size if model.drafter is not None else 1
    lengths = grid.draft_lengths or tuple(size for size in SIZES if size <= block)
    if model.drafter is not None and max(lengths) > block:
        raise InvalidRequest(
            f"draft length: {max(lengths)} is above the drafter's block size, {block}"
        )
    room = model.engine.max_length - max(lengths) - max(BUDGETS) - (grid.repeats + 2) * 8
    if max(grid.contexts) > room:
        raise InvalidRequest(
            f"context: {max(grid.contexts)} leaves no room for passes in {model.engine.max_length} tokens; at most {room}"
        )
    for context in grid.contexts:
        yield from (
            Cell("verify", size, 0, context)
            for size in sorted({1, *(length + 1 for length in lengths)})
        )
        if model.drafter is not None:
            yield from (Cell("draft", size, 0, context) for size in lengths)
            packed = sorted({min(5, max(lengths)), max(lengths)})
            yield from (
                Cell("packed", size, length, context) for length in packed for size in grid.outcomes
            )
        if can_fuse(model):
            yield from (Cell("fused", rows, 0, context) for rows in BUDGETS)
    first = grid.contexts[0]
    yield Cell("rest", 0, 0, first)
    if model.drafter is not None:
        width = min(5, max(lengths))
        yield Cell("switch", 0, 0, first)
        yield Cell("async_verify", width + 1, width, first)
        yield Cell("async_packed", DEFAULT_OUTCOMES, width, first)
        yield Cell("async_draft", width, width, first)
        yield from (Cell("async_read", 0, width, context) for context in grid.contexts)


def _facts(model: Model) -> tuple[Facts, Facts | None]:
    config = native(model)[0].config
    target = Facts(
        name=Path(model.target.source).name,
        fingerprint=model.target.fingerprint,
        num_layers=config.num_layers,
        layer_share=_layer_share(Shape.of("target", config)),
        fused_rows=model.preset.fused_rows if model.preset is not None else None,
    )
    if model.drafter is None:
        return target, None
    drafter = model.drafter.model
    going = len(drafter.config.kept_layers) - len(drafter.config.skipped)
    shape = replace(Shape.of("drafter", drafter.transformer.config), num_layers=going)
    return target, Facts(
        name="its own drafter" if model.drafter_path is None else model.drafter_path.name,
        fingerprint=weights_fingerprint(drafter.trainable()),
        num_layers=going,
        layer_share=_layer_share(shape, drafter.config.draft_vocabulary),
        block_size=drafter.config.block_size,
    )


def _layer_share(shape: Shape, num_logits: int | None = None) -> float:
    """num_logits: how many of the head's rows a pass reads; None: all."""
    layers = shape.num_layers * shape.layer_parameters
    return layers / (layers + shape.hidden_size * (num_logits or shape.vocab_size))


def _memory(model: Model, peak: int) -> Memory:
    target = native(model)[0]
    size, config = model.target.dtype.itemsize, target.config
    shape = Shape.of("target", config)
    weights = shape.read_parameters + (0 if config.tied else shape.head_parameters)
    own_weights, own_cache = 0, 0
    if model.drafter is not None:
        drafter = model.drafter.model
        shared = set(map(id, target.transformer.parameters()))
        own_weights = sum(
            one.numel() * one.element_size()
            for one in drafter.parameters()
            if id(one) not in shared
        )
        own = replace(
            Shape.of("drafter", drafter.transformer.config),
            num_layers=len(drafter.config.kept_layers),
        )
        own_cache = 0 if clean_rows_are_of(drafter, target.transformer) else own.kv_per_token * size
    return Memory(
        target_weights=weights * size,
        drafter_weights=own_weights,
        cache_per_token=shape.kv_per_token * size,
        drafter_cache_per_token=own_cache,
        peak=peak,
    )
