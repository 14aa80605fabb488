"""What a machine's passes took: the file that `d3d profile` writes and `d3d plan` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d3d.errors import InvalidRequest

FORMAT = 1

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
"""verify, draft, packed, fused: passes, each alone. switch: from a verdict to the next
verification, on a hit. rest: of a round, beside draft and verification. async_verify, async_packed:
the same passes in async mode on this machine, where both sides work; async_draft: a draft there
that the target waits for; async_read: the first of a request, for which the worker reads the
prompt."""


class Point(BaseModel):
    """One kind of pass at one size: seconds over its samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    size: int = Field(ge=0)
    """Rows of `verify` and `fused`, drafted tokens of `draft`, outcomes of `packed`; 0 where there
    is no size."""
    draft_length: int = Field(0, ge=0)
    """Of `packed` and of async mode; 0 elsewhere."""
    context: int = Field(ge=0)
    """Committed tokens before the pass."""
    median_s: float = Field(ge=0, allow_inf_nan=False)
    low_s: float = Field(ge=0, allow_inf_nan=False)
    high_s: float = Field(ge=0, allow_inf_nan=False)
    """The quartiles."""
    samples: int = Field(ge=1)


class Memory(BaseModel):
    """Bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_weights: int
    drafter_weights: int
    """Of its own, beside what it shares with the target."""
    cache_per_token: int
    """Keys and values of one token: the target's."""
    drafter_cache_per_token: int
    """0 where it works in the target's cache."""
    peak: int
    """The most that was held in all while it was measured."""


class Run(BaseModel):
    """All that was measured with one dtype and number of threads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    dtype: str
    threads: int = Field(ge=1)
    placement: str
    """Of async mode's draft worker."""
    points: list[Point]
    memory: Memory


class Facts(BaseModel):
    """About a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    fingerprint: str
    num_layers: int = Field(ge=1)
    layer_share: float = Field(ge=0, le=1)
    """Of what a pass reads: the layers' weights over layers' and head's."""
    block_size: int | None = None
    fused_rows: int | None = None
    """Rows that fused mode takes by default with this model."""


class Profile(BaseModel):
    """A machine with a target and its drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    date: str
    command: list[str]
    versions: dict[str, str]
    machine: dict[str, Any]
    target: Facts
    drafter: Facts | None
    runs: list[Run] = Field(min_length=1)

    def write(self, path: Path) -> None:
        """Whole, or not at all."""
        work = path.with_name(f"{path.name}.partial")
        work.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        work.replace(path)

    def run(self, dtype: str | None = None, threads: int | None = None) -> Run:
        """The first that fits. Raises InvalidRequest that lists what was measured."""
        for one in self.runs:
            if dtype in (None, one.dtype) and threads in (None, one.threads):
                return one
        there = ", ".join(f"{one.dtype} with {one.threads} threads" for one in self.runs)
        raise InvalidRequest(
            f"profile: nothing measured in {dtype or 'any dtype'} with {threads or 'any'} threads; there is {there}"
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
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRequest(
            f"{path}: not a profile of this version of d3d ({where}: {first['msg']}); make it anew"
        ) from error


def point(
    kind: Kind, size: int, draft_length: int, context: int, seconds: Sequence[float]
) -> Point:
    """Median and quartiles of samples."""
    low, median, high = (
        float(value) for value in np.quantile(np.array(seconds), [0.25, 0.5, 0.75])
    )
    digits = 9
    return Point(
        kind=kind,
        size=size,
        draft_length=draft_length,
        context=context,
        median_s=round(median, digits),
        low_s=round(low, digits),
        high_s=round(high, digits),
        samples=len(seconds),
    )
