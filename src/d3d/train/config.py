"""A training configuration file: which drafter to make of which model, how to train it, and when to
measure it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from d3d.errors import InvalidRequest
from d3d.model.drafter import Alignment, DeltaConfig, DrafterConfig
from d3d.model.masks.rules import BlockAttention
from d3d.train.losses import Weighting

Precision = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["cosine", "linear", "constant"]
TeacherName = Literal["clean_rows", "recorded"]
Distribution = Literal["auto", "ddp", "fsdp"]


class Stage(BaseModel):
    """Blocks of one size for a share of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(gt=0.0, le=1.0)
    block_size: int = Field(ge=2)
    anchors: int = Field(ge=1, description="blocks hung in each answer, at random places")
    decay: float = Field(
        4.0, gt=0.0, description="slots over which the loss falls by e, where `weighting` is decay"
    )


class TrainConfig(BaseModel):
    """How a drafter is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(2000, ge=1)
    answers_per_step: int = Field(
        2, ge=1, description="of all processes together; their gradients are averaged"
    )
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup: int = Field(50, ge=0, description="steps of linear warm-up")
    schedule: Schedule = Field(
        "cosine", description="how the learning rate falls behind the warm-up"
    )
    floor: float = Field(
        0.05, ge=0.0, le=1.0, description="share of the learning rate that is left at the end"
    )
    ar_weight: float = Field(
        0.3,
        ge=0.0,
        description="weight of the clean rows' next-token loss, where they learn at all",
    )
    weighting: Weighting = "decay"
    distillation: float = Field(
        0.0, ge=0.0, le=1.0, description="share of the target's own distribution in the label"
    )
    teacher: TeacherName = Field(
        "clean_rows", description="where that distribution comes from: the same pass, or the corpus"
    )
    max_length: int = Field(512, ge=8, description="longer texts are cut")
    clip: float = Field(1.0, gt=0.0)
    precision: Precision = Field(
        "auto", description="what is computed in; weights that are trained are float32 in any case"
    )
    activation_checkpointing: bool = Field(
        False, description="compute each layer twice instead of keeping what it computed"
    )
    distributed: Distribution = Field(
        "auto",
        description="several processes: ddp (whole weights in each) or fsdp (weights shared out)",
    )
    seed: int = 0
    stages: tuple[Stage, ...] = Field(
        (
            Stage(share=0.6, block_size=6, anchors=120, decay=4.0),
            Stage(share=0.4, block_size=16, anchors=40, decay=5.0),
        ),
        min_length=1,
    )

    @model_validator(mode="after")
    def _shares_are_whole(self) -> TrainConfig:
        if abs(sum(stage.share for stage in self.stages) - 1) > 1e-6:
            raise ValueError(
                f"the shares of the stages must sum to 1, not {sum(stage.share for stage in self.stages):g}"
            )
        return self

    def stage(self, step: int) -> Stage:
        """The stage that `step` (from 0) belongs to."""
        end = 0.0
        for stage in self.stages:
            end += stage.share * self.steps
            if step < end:
                return stage
        return self.stages[-1]

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then down to `floor` by the schedule."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        left = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "constant": 1.0,
        }[self.schedule]
        return self.learning_rate * (self.floor + (1 - self.floor) * left)


class ModelSpec(BaseModel):
    """A model by name. In a file a plain string is short for its `source`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    """Preset, directory, GGUF file or hub id."""
    config: Path | None = None
    """A `transformers` config.json, or the directory that holds it, relative to the configuration
    file: `--dry-run` reads it where the model itself is not here."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class DrafterSpec(BaseModel):
    """What drafter to make, and of which model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: ModelSpec | None = None
    """The model whose layers it starts from; None is the target itself."""
    block_size: int = Field(16, ge=2, le=256)
    block_attention: BlockAttention = "causal"
    alignment: Alignment = "next"
    mask_token_id: int | None = None
    kept_layers: tuple[int, ...] | None = None
    """None keeps all."""
    delta: DeltaConfig | None = DeltaConfig(rank=64)
    """None trains full weights."""
    anchor_slot: bool = False
    slot_layers: tuple[int, ...] | None = None
    """Layers that slots go through; None: all that are kept."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Tokens that can be drafted: the most frequent ones of the corpus. None is all."""
    previous_token_width: int | None = None
    start: str | None = None
    """A drafter of the same base to go on from (directory, preset or hub id), of this rank and this
    width of the previous-token head or lower ones; what it lacks, such as the head, begins as
    new."""

    def resolve(self, num_layers: int) -> DrafterConfig:
        """Raises InvalidRequest for layers in another order, or none."""
        kept = tuple(range(num_layers)) if self.kept_layers is None else self.kept_layers
        try:
            return DrafterConfig.model_validate(
                self.model_dump(exclude={"base", "start"}) | {"kept_layers": kept}
            )
        except ValidationError as error:
            raise InvalidRequest(f"drafter: {first_problem(error)}") from error


class RunConfig(BaseModel):
    """A training configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: ModelSpec | None = None
    """The model that wrote the corpus; `--target` goes before it."""
    drafter: DrafterSpec = DrafterSpec()
    train: TrainConfig = TrainConfig()
    evaluate_every: int = Field(400, ge=1, description="steps; the last one is measured too")
    evaluate_draft_length: int = Field(8, ge=1)
    measure_start: bool = Field(False, description="measure the untrained drafter, too, as step 0")
    bonus_recall: bool = Field(
        False, description="measure how often the bonus token was guessed, too; a third more work"
    )
    tensorboard: bool = Field(False, description="write curves for TensorBoard beside the log")

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.evaluate_draft_length > self.drafter.block_size:
            raise ValueError(
                f"evaluate_draft_length ({self.evaluate_draft_length}) is above the drafter's block_size ({self.drafter.block_size})"
            )
        if (
            self.drafter.base is not None
            and self.train.distillation > 0
            and self.train.teacher == "clean_rows"
        ):
            raise ValueError(
                "train.distillation takes its labels from clean rows of the target, and a drafter with another base has none; use "
                "teacher: recorded, with a corpus made by `d3d data --top-logits`"
            )
        return self


def read_run_config(path: Path) -> RunConfig:
    """From YAML. Raises InvalidRequest that names the key."""
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{path} can't be read: {error}") from error
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Key and message of the first thing that is wrong."""
    first = error.errors()[0]
    name, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such key"
    return f"{name}: {message}" if name else message
