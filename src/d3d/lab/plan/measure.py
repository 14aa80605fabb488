"""Measures a profile: all passes once, then all again, each time from another one on, so that a
machine that changes meanwhile changes all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch

from d3d.api import Model
from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.files import FileKind, Journal, alone_with
from d3d.forks import set_num_threads
from d3d.hub.fingerprint import weights_fingerprint
from d3d.inputs import MOST_THREADS, json_or_none
from d3d.json_text import to_json
from d3d.lab.plan.probes import Probes, TimedPass, can_fuse, native
from d3d.lab.plan.profile import PROFILE, MemoryUse, ModelFacts, Profile, ProfileRun, point
from d3d.lab.plan.roofline import DecoderShape
from d3d.machine import PeakMemory, machine, processor, versions
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.outcomes import MOST_OUTCOMES
from d3d.methods.async_.placement import PLACEMENTS, check_placement, default_placement
from d3d.methods.fused.rows import BUDGETS
from d3d.model.from_target import clean_rows_are_of

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Draft lengths measured by default, up to the drafter's block size."""
PACKED_DRAFT_LENGTH = 5
"""Draft length of packed passes and of async mode, beside the longest; shorter if need be."""


MOST_REPEATS = 1000


@dataclass(frozen=True)
class Grid:
    """The passes to measure."""

    contexts: tuple[int, ...] = (64, 512)
    draft_lengths: tuple[int, ...] = ()
    """Draft lengths; verifications have one row more. Empty: SIZES."""
    outcomes: tuple[int, ...] = (1, 2, 4, 8, 16)
    threads: tuple[int, ...] = ()
    """Empty: torch's number of threads."""
    placement: str | None = None
    """Placement of async mode's draft worker; None: the device's default."""
    repeats: int = 7

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for name, values, most in (
            ("context", self.contexts, None),
            ("draft length", self.draft_lengths, None),
            ("outcomes", self.outcomes, MOST_OUTCOMES),
            ("threads", self.threads, MOST_THREADS),
            ("repeats", (self.repeats,), MOST_REPEATS),
        ):
            wrong = [value for value in values if not 1 <= value <= (most or value)]
            if wrong or (not values and name in ("context", "outcomes")):
                given = ", ".join(map(str, wrong)) or "nothing"
                numbers = "from 1 on" if most is None else f"from 1 to {most}"
                raise InvalidRequest(f"{name}: {given} can't be measured; give numbers {numbers}")
        if min(self.contexts) < 2:
            raise InvalidRequest(
                "context: a pass needs an anchor and a token before it; give 2 or more"
            )
        if self.placement not in (None, *PLACEMENTS):
            raise InvalidRequest(
                f"placement: {self.placement!r} is not one of {', '.join(PLACEMENTS)}"
            )


SAMPLES = FileKind("samples of a profile", ("settings",))


class Samples:
    """Seconds by key, in a journal: each sample is on disk before the next one is taken."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises InvalidRequest if the file's samples were taken with other settings."""
        self._journal = Journal(path, SAMPLES)
        SAMPLES.check(path)
        self._seconds: dict[str, list[float]] = {}
        try:
            rows = [json_or_none(line) for _, line in self._journal.lines()]
            before = rows[0]["settings"] if rows else settings
            self._seconds = {to_json(row["key"]): row["seconds"] for row in rows[1:]}
        except (KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{path} is damaged ({error}); remove it to measure from the start"
            ) from error
        if before != settings:
            differs = ", ".join(name for name in settings if before.get(name) != settings[name])
            raise InvalidRequest(
                f"{path} holds samples taken with another {differs}; remove it, or take another "
                "name for this profile"
            )
        if not rows:
            self._journal.append(to_json({"settings": settings}))

    def __contains__(self, key: list[Any]) -> bool:
        return to_json(key) in self._seconds

    def add(self, key: list[Any], seconds: list[float]) -> None:
        self._seconds[to_json(key)] = seconds
        self._journal.append(to_json({"key": key, "seconds": seconds}))

    def of(self, key: list[Any]) -> list[float]:
        return self._seconds.get(to_json(key), [])


@dataclass
class Measurement:
    """A profile in the making. Samples go to a file beside it; a second start continues there."""

    path: Path
    grid: Grid
    dtypes: tuple[str, ...]
    load: Callable[[str], Model]
    """Loads the model in a dtype."""
    _runs: list[ProfileRun] = field(default_factory=list)

    def run(self, show: Callable[[int, int, str], None]) -> Profile:
        """Measures what is missing, writes the profile and returns it.

        show: called with samples done, samples in all of this dtype, and the current pass. Raises
        InvalidRequest for a grid that does not fit the model, another grid's samples, or a file
        that is no profile; CantWrite."""
        with alone_with(self.path, "d3d profile"):
            PROFILE.check(self.path)
            return self._run(show)

    def _run(self, show: Callable[[int, int, str], None]) -> Profile:
        at_start = machine()
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
            machine=at_start,
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
        passes = list(grid_passes(model, self.grid))
        threads = self.grid.threads or (torch.get_num_threads(),)
        samples = Samples(self._samples_path, self._settings(model, placement))
        probes = Probes(model, placement, max(self.grid.outcomes))
        memory, before = PeakMemory(model.target.device), torch.get_num_threads()
        work = list(_order(passes, threads, self.grid.repeats))
        warm: set[tuple[int, TimedPass]] = set()
        try:
            for number, (count, repeat, timed) in enumerate(work, 1):
                key = [model.dtype_name, count, repeat, *timed]
                if key not in samples:
                    set_num_threads(count)
                    if (count, timed) not in warm:
                        probes.seconds(timed)  # the first time is slower
                        warm.add((count, timed))
                    samples.add(key, probes.seconds(timed))
                show(number, len(work), f"{model.dtype_name}, {count} threads, {timed}")
        finally:
            torch.set_num_threads(before)
        for count in threads:
            keys = {
                timed: [
                    [model.dtype_name, count, repeat, *timed] for repeat in range(self.grid.repeats)
                ]
                for timed in passes
            }
            seconds = {
                timed: [value for key in keys[timed] for value in samples.of(key)]
                for timed in passes
            }
            self._runs.append(
                ProfileRun(
                    device=model.device_name,
                    dtype=model.dtype_name,
                    threads=count,
                    placement=placement,
                    points=[point(*timed, values) for timed, values in seconds.items() if values],
                    memory=_memory(model, memory.bytes()),
                )
            )

    def _settings(self, model: Model, placement: str) -> dict[str, Any]:
        """Facts shared by all samples of one file."""
        drafter = model.parts.drafter
        return {
            "target": model.target.fingerprint,
            "drafter": drafter and weights_fingerprint(drafter.trainable()),
            "device": model.device_name,
            "placement": placement,
            "outcomes": max(self.grid.outcomes),
            "machine": processor(),
            "versions": versions(),
        }


def _order(
    passes: list[TimedPass], threads: tuple[int, ...], repeats: int
) -> Iterator[tuple[int, int, TimedPass]]:
    """(threads, repeat, pass): all once, then all again, each time from another one on."""
    for repeat in range(repeats):
        for count in threads:
            shift = repeat * len(passes) // repeats
            for timed in passes[shift:] + passes[:shift]:
                yield count, repeat, timed


def grid_passes(model: Model, grid: Grid) -> Iterator[TimedPass]:
    """Raises InvalidRequest for contexts and drafts that are too long for the model."""
    block = model.parts.drafter.config.block_size if model.parts.drafter is not None else 1
    lengths = grid.draft_lengths or tuple(size for size in SIZES if size <= block)
    longest = max(lengths)
    if model.parts.drafter is not None and longest > block:
        raise InvalidRequest(f"draft_length: {longest} is above the drafter's block size, {block}")
    room = model.parts.target.max_length - longest - max(BUDGETS) - (grid.repeats + 2) * 8
    if max(grid.contexts) > room:
        raise InvalidRequest(
            f"context: {max(grid.contexts)} leaves no room for passes in "
            f"{model.parts.target.max_length} tokens; "
            + (f"at most {room}" if room > 1 else "take fewer --repeats, or a shorter draft")
        )
    for context in grid.contexts:
        for rows in sorted({1, *(length + 1 for length in lengths)}):
            yield TimedPass("verify", rows, 0, context)
        if can_fuse(model):
            for rows in BUDGETS:
                yield TimedPass("fused", rows, 0, context)
    yield TimedPass("rest", 0, 0, grid.contexts[0])
    if model.parts.drafter is not None:
        yield from _drafter_passes(grid, lengths)


def _drafter_passes(grid: Grid, lengths: tuple[int, ...]) -> Iterator[TimedPass]:
    longest = max(lengths)
    width, first = min(PACKED_DRAFT_LENGTH, longest), grid.contexts[0]
    for context in grid.contexts:
        for length in lengths:
            yield TimedPass("draft", length, 0, context)
        for length, outcomes in product(sorted({width, longest}), grid.outcomes):
            yield TimedPass("packed", outcomes, length, context)
        yield TimedPass("async_read", 0, width, context)
    yield TimedPass("switch", 0, 0, first)
    yield TimedPass("async_verify", width + 1, width, first)
    yield TimedPass("async_packed", DEFAULT_OUTCOMES, width, first)
    yield TimedPass("async_draft", width, width, first)


def _facts(model: Model) -> tuple[ModelFacts, ModelFacts | None]:
    """About the target and the drafter."""
    config = native(model)[0].config
    target = ModelFacts(
        name=Path(model.target.source).name,
        fingerprint=model.target.fingerprint,
        num_layers=config.num_layers,
        layer_share=_layer_share(DecoderShape.of("target", config)),
        fused_rows=model.parts.preset_rows,
    )
    if model.parts.drafter is None:
        return target, None
    drafter = model.parts.drafter
    num_layers = len(drafter.config.kept_layers) - len(drafter.config.skipped)
    shape = DecoderShape.of("drafter", drafter.transformer.config, num_layers)
    path = model.parts.drafter_path
    return target, ModelFacts(
        name="its own drafter" if path is None else path.name,
        fingerprint=weights_fingerprint(drafter.trainable()),
        num_layers=num_layers,
        layer_share=_layer_share(shape, drafter.config.draft_vocabulary),
        block_size=drafter.config.block_size,
    )


def _layer_share(shape: DecoderShape, num_logits: int | None = None) -> float:
    """num_logits: rows of the head that a pass reads; None: all."""
    layers = shape.num_layers * shape.layer_parameters
    return ratio(layers, layers + shape.hidden_size * (num_logits or shape.vocab_size))


def _memory(model: Model, peak: int) -> MemoryUse:
    target = native(model)[0]
    size, config = model.target.dtype.itemsize, target.config
    shape = DecoderShape.of("target", config)
    weights = shape.read_parameters + (0 if config.tied else shape.head_parameters)
    drafter_weights = drafter_cache = 0
    if model.parts.drafter is not None:
        drafter = model.parts.drafter
        shared = set(map(id, target.transformer.parameters()))
        drafter_weights = sum(
            parameter.numel() * parameter.element_size()
            for parameter in drafter.parameters()
            if id(parameter) not in shared
        )
        if not clean_rows_are_of(drafter, target.transformer):
            num_layers = len(drafter.config.kept_layers)
            cached = DecoderShape.of("drafter", drafter.transformer.config, num_layers)
            drafter_cache = cached.kv_per_token * size
    return MemoryUse(
        target_weights=weights * size,
        drafter_weights=drafter_weights,
        cache_per_token=shape.kv_per_token * size,
        drafter_cache_per_token=drafter_cache,
        peak=peak,
    )
