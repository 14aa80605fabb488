"""Measured costs of passes: the file that `d3d profile` writes and `d3d plan` reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d3d.errors import InvalidRequest, first_problem
from d3d.files import FileKind, write_whole
from d3d.lab.plan.costs import Contention, interpolate

DIGITS = 9
"""Decimal places of seconds in the file."""

Kind = Literal[
    "verify",
    "draft",
    "packed",
    "fused",
    "switch",
    "rest",
    "async_verify",
    "async_packed",
    "async_draft",
    "async_read",
]
"""verify, draft, packed, fused: single passes. switch: from a verdict to the next verification, on
a hit. rest: of a round, beside draft and verification. async_verify, async_packed: the same passes
in async mode on this machine, with both sides running; async_draft: a draft there that the target
waits for; async_read: a request's first one, for which the worker reads the prompt."""


PROFILE = FileKind("a profile", ("format", "machine", "target", "runs"))


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Frozen):
    """One kind of pass at one size: median and quartiles of its samples, in seconds."""

    kind: Kind
    size: int = Field(ge=0)
    """Rows of `verify` and `fused`, drafted tokens of `draft`, outcomes of `packed`; otherwise
    0."""
    draft_length: int = Field(0, ge=0)
    """Draft length of `packed` and of async mode; otherwise 0."""
    context: int = Field(ge=0)
    """Committed tokens before the pass."""
    median_s: float = Field(ge=0, allow_inf_nan=False)
    low_s: float = Field(ge=0, allow_inf_nan=False)
    high_s: float = Field(ge=0, allow_inf_nan=False)
    samples: int = Field(ge=1)


class MemoryUse(_Frozen):
    """Bytes."""

    target_weights: int
    drafter_weights: int
    """Bytes of its own, beside those it shares with the target."""
    cache_per_token: int
    """Keys and values of one token: the target's."""
    drafter_cache_per_token: int
    """0 if it works in the target's cache."""
    peak: int
    """Most bytes held during the measurement."""


class ProfileRun(_Frozen):
    """Measurements with one dtype and number of threads."""

    device: str
    dtype: str
    threads: int = Field(ge=1)
    placement: str
    """Placement of async mode's draft worker."""
    points: list[Point]
    memory: MemoryUse


class ModelFacts(_Frozen):
    """About a model."""

    name: str
    fingerprint: str
    num_layers: int = Field(ge=1)
    layer_share: float = Field(ge=0, le=1)
    """Share of the layers' weights in those that a pass reads, the head's among them."""
    block_size: int | None = None
    fused_rows: int | None = None
    """Default rows of fused mode with this model."""


class Profile(_Frozen):
    """A machine with a target and its drafter."""

    format: Literal[1] = 1
    date: str
    command: list[str]
    versions: dict[str, str]
    machine: dict[str, Any]
    target: ModelFacts
    drafter: ModelFacts | None
    runs: list[ProfileRun] = Field(min_length=1)

    def write(self, path: Path) -> None:
        """Whole, or not at all. Raises CantWrite."""
        write_whole(path, PROFILE, self.model_dump_json(indent=1) + "\n")

    def run(self, dtype: str | None = None, threads: int | None = None) -> ProfileRun:
        """The first that fits. Raises InvalidRequest, with what was measured, if none does."""
        for run in self.runs:
            if dtype in (None, run.dtype) and threads in (None, run.threads):
                return run
        known = ", ".join(f"{run.dtype} with {run.threads} threads" for run in self.runs)
        raise InvalidRequest(
            f"profile: nothing measured in {dtype or 'any dtype'} with {threads or 'any'} threads; "
            f"there is {known}"
        )


def read_profile(path: Path) -> Profile:
    """Raises InvalidRequest for a file that is no profile, or one of another version."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"profile {path} can't be read: {error}; make one with d3d profile {path}"
        ) from error
    except ValidationError as error:
        problem = first_problem(error, Profile.model_fields)
        raise InvalidRequest(
            f"{path}: not a profile of this version of d3d ({problem}); measure it again"
        ) from error


def point(
    kind: Kind, size: int, draft_length: int, context: int, seconds: Sequence[float]
) -> Point:
    """Median and quartiles of samples."""
    low, median, high = np.quantile(np.array(seconds), [0.25, 0.5, 0.75]).round(DIGITS).tolist()
    return Point(
        kind=kind,
        size=size,
        draft_length=draft_length,
        context=context,
        median_s=median,
        low_s=low,
        high_s=high,
        samples=len(seconds),
    )


Line = list[tuple[float, float]]


@dataclass(frozen=True)
class ProfileCosts:
    """Costs of passes from one run of a profile: medians, interpolated linearly."""

    run: ProfileRun

    @cached_property
    def _points(self) -> dict[Kind, list[Point]]:
        points: dict[Kind, list[Point]] = defaultdict(list)
        for each in self.run.points:
            points[each.kind].append(each)
        return dict(points)

    @cached_property
    def _lines(self) -> dict[tuple[Kind, int], list[tuple[int, Line]]]:
        """By kind and draft length: contexts, ascending, each with its times by size."""
        lines: dict[tuple[Kind, int], dict[int, Line]] = defaultdict(lambda: defaultdict(list))
        for each in self.run.points:
            lines[each.kind, each.draft_length][each.context].append((each.size, each.median_s))
        return {
            key: [(context, sorted(line)) for context, line in sorted(by_context.items())]
            for key, by_context in lines.items()
        }

    @property
    def has_drafter(self) -> bool:
        return "draft" in self._points

    @property
    def has_fused(self) -> bool:
        return "fused" in self._points

    @property
    def has_own_cache(self) -> bool:
        return self.run.memory.drafter_cache_per_token > 0

    @property
    def switch_s(self) -> float:
        return self._single("switch")

    @property
    def rest_s(self) -> float:
        return self._single("rest")

    def verify(self, rows: int, context: float) -> float:
        return self._at("verify", rows, context)

    def draft(self, draft_length: int, context: float) -> float:
        return self._at("draft", draft_length, context)

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Interpolated over the measured draft lengths, too."""
        lengths = sorted({each.draft_length for each in self._of("packed")})
        line = [(float(each), self._at("packed", outcomes, context, each)) for each in lengths]
        return interpolate(line, draft_length)

    def fused(self, rows: int, context: float) -> float:
        return self._at("fused", rows, context)

    def read(self, context: float) -> float:
        points = self._points.get("async_read", ())
        line = sorted((float(each.context), each.median_s) for each in points)
        return interpolate(line, context) if line else 0.0

    def contention(self) -> Contention | None:
        """Each pass in async mode over the same pass alone; None if async mode was not measured.

        There a pass has fewer threads for the whole request, and less memory bandwidth while the
        other side's pass runs."""
        kinds: tuple[Kind, ...] = ("async_verify", "async_packed", "async_draft")
        verify, packed, draft = (self._points.get(kind, [None])[0] for kind in kinds)
        if verify is None or packed is None:
            return None
        packed_alone = self.packed(packed.draft_length, packed.size, packed.context)
        return Contention(
            verify.median_s / self.verify(verify.size, verify.context),
            packed.median_s / packed_alone,
            1.0 if draft is None else draft.median_s / self.draft(draft.size, draft.context),
            lasting=True,
        )

    def _of(self, kind: Kind) -> list[Point]:
        if kind not in self._points:
            raise InvalidRequest(
                f"{kind}: the profile holds no such pass; measure it again with a drafter that can "
                "do it"
            )
        return self._points[kind]

    def _single(self, kind: Kind) -> float:
        points = self._points.get(kind)
        return points[0].median_s if points else 0.0

    def _at(self, kind: Kind, size: int, context: float, draft_length: int = 0) -> float:
        """Between sizes at each context, then between contexts."""
        if size < 1:
            raise InvalidRequest(f"{kind}: a pass of size {size} is impossible")
        self._of(kind)
        lines = self._lines[kind, draft_length]
        return interpolate(
            [(float(known), interpolate(line, size)) for known, line in lines], context
        )


def thinned_factor(drafter: ModelFacts, num_layers: int) -> float:
    """Cost of the drafter's pass with fewer layers over its cost now. Raises InvalidRequest."""
    if not 1 <= num_layers <= drafter.num_layers:
        raise InvalidRequest(
            f"layers: {num_layers} is not within 1 and those of {drafter.name}, "
            f"{drafter.num_layers}"
        )
    return 1 - drafter.layer_share * (1 - num_layers / drafter.num_layers)
