"""Base class of method configs, and the parts that methods are built from.

A method is one folder: a config class (fields, ranges, help), a drafter, and `build`. Flags, preset
files, dry runs, the search space of `d3d tune` and error messages follow from the config class.

Config modules import torch inside functions only, so that `--help` is quick."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from d3d.engine.drafter import Drafter, Target
    from d3d.hub.open_model import OpenModel, TargetModel
    from d3d.methods.async_.opening import Running
    from d3d.model.drafter import DrafterConfig, DrafterModel

DEFAULT_DRAFT_LENGTH = 5
"""For drafts whose costs are not measured."""

MOST_TOKENS = 1024
"""Upper bound of options that count tokens, so that a wrong one is refused, not computed."""

DraftLength = Annotated[
    int | None,
    Field(
        ge=1, le=MOST_TOKENS, description="Most tokens to draft a round (num_speculative_tokens)."
    ),
]
Lookup = Annotated[
    int | None,
    Field(
        ge=0,
        le=32,
        description="Prompt lookup: if the text's last N or more tokens stand earlier in it, draft "
        "what followed them, without the drafter. 0: never.",
    ),
]


def no_drafter(method: str) -> InvalidRequest:
    return InvalidRequest(
        f"method: {method} needs a drafter, and there is none; name one with --drafter, or use "
        "plain or ngram"
    )


class Facts(NamedTuple):
    """Facts that decide which options a method supports; known without weights."""

    device: torch.device
    is_native: bool
    """True if d3d's own decoder runs the target."""
    drafter: DrafterConfig | None = None
    clean_rows_are_targets: bool = False
    """True if the drafter is the target with deltas at slots only."""
    preset_rows: int | None = None
    """Rows of a fused pass, from the preset."""
    is_stored: bool = False
    """True if the drafter came from a checkpoint, which another process can load."""

    def need_drafter(self, method: str) -> DrafterConfig:
        if self.drafter is None:
            raise no_drafter(method)
        return self.drafter

    def need_native(self, method: str) -> None:
        if not self.is_native:
            raise InvalidRequest(
                f"method: {method} needs d3d's own decoder to run the target; leave the other "
                "backend out, or use plain, ngram or serial"
            )


class Built(NamedTuple):
    """Arguments of `d3d.engine.engine.Engine`."""

    target: Target
    drafter: Drafter | None


@dataclass
class Parts:
    """Parts from which methods are built: a loaded target, perhaps a drafter, and shared state."""

    model: TargetModel
    target: Target
    drafter: DrafterModel | None = None
    drafter_path: Path | None = None
    """Checkpoint of the drafter."""
    preset_rows: int | None = None
    draft_model: OpenModel | None = None
    """Causal model for method draft_model."""
    workers: dict[str, Running] = field(default_factory=dict)
    """Async mode's workers, by placement."""

    @cached_property
    def drafter_fingerprint(self) -> str:
        """Hex digest of the drafter's weights, configuration and draft vocabulary."""
        from d3d.hub.fingerprint import weights_fingerprint

        assert self.drafter is not None
        fields = [weights_fingerprint(self.drafter.trainable())]
        fields.append(self.drafter.config.model_dump_json())
        if self.drafter.draft_ids is not None:
            fields.append(str(self.drafter.draft_ids.tolist()))
        return hashlib.sha256(" ".join(fields).encode()).hexdigest()

    @cached_property
    def facts(self) -> Facts:
        from d3d.model.from_target import clean_rows_are_of
        from d3d.target.native import NativeTarget

        native = self.target if isinstance(self.target, NativeTarget) else None
        return Facts(
            self.model.device,
            native is not None,
            None if self.drafter is None else self.drafter.config,
            native is not None
            and self.drafter is not None
            and clean_rows_are_of(self.drafter, native.model),
            self.preset_rows,
            self.drafter_path is not None,
        )


class MethodConfig(BaseModel):
    """Options of a method; None stands for the method's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    summary: ClassVar[str]
    """One line of help."""
    method: str

    @abstractmethod
    def resolve(self, facts: Facts) -> Self:
        """Fill in defaults, as far as known without weights. Raises InvalidRequest for options that
        this drafter or machine does not support."""

    @abstractmethod
    def build(self, parts: Parts) -> Built:
        """Build the method. Raises InvalidRequest as `resolve`."""

    def describe(self, facts: Facts) -> dict[str, Any]:
        """Entry of the method in a dry run."""
        chosen = self.resolve(facts).model_dump(exclude={"method"}, exclude_none=True)
        return {name: value for name, value in chosen.items() if value != 0 or name == "rows"}

    @property
    def max_draft_length(self) -> int:
        """Maximum draft length; known once resolved."""
        return int(getattr(self, "draft_length", None) or 0)


def default_length(facts: Facts) -> dict[str, Any]:
    """Entry of a dry run for a draft length that nothing names."""
    measured = facts.is_native
    return {"draft_length": "measured at the start" if measured else DEFAULT_DRAFT_LENGTH}


def check_draft_length(wanted: int | None, longest: int) -> None:
    """Raise InvalidRequest if the drafter can't draft that many tokens."""
    if wanted is not None and wanted > longest:
        raise InvalidRequest(
            f"draft_length: {wanted} is not within 1 and the most that the drafter can draft, "
            f"{longest}"
        )
