"""The training configuration file: the drafter, how to train it, and when to measure it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from d3d.errors import InvalidRequest, first_problem
from d3d.inputs import read_yaml
from d3d.model.drafter import Alignment, DeltaConfig, DrafterConfig
from d3d.model.masks.rules import BlockAttention
from d3d.train.losses import Weighting

Precision = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["cosine", "linear", "constant"]
TeacherName = Literal["clean_rows", "recorded"]
Distribution = Literal["auto", "ddp", "fsdp"]


class Stage(BaseModel, frozen=True, extra="forbid"):
    """A share of the steps, with blocks of one size."""

    share: float = Field(gt=0.0, le=1.0)
    block_size: int = Field(ge=2)
    anchors: int = Field(ge=1, description="blocks hung in each answer, at random positions")
    decay: float = Field(
        4.0, gt=0.0, description="slots over which a weight falls by e, if `weighting` is decay"
    )


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of the training itself."""

    steps: int = Field(2000, ge=1)
    answers_per_step: int = Field(
        2, ge=1, description="over all processes; their gradients are averaged"
    )
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup: int = Field(50, ge=0, description="steps of linear warm-up")
    schedule: Schedule = Field("cosine", description="decay of the learning rate after warm-up")
    floor: float = Field(0.05, ge=0.0, le=1.0, description="final share of the learning rate")
    ar_weight: float = Field(
        0.3, ge=0.0, description="weight of the clean rows' next-token loss, if they are trained"
    )
    weighting: Weighting = "decay"
    distillation: float = Field(
        0.0, ge=0.0, le=1.0, description="share of the target's own distribution in the label"
    )
    teacher: TeacherName = Field(
        "clean_rows", description="source of that distribution: the same pass, or the corpus"
    )
    max_length: int = Field(512, ge=8, description="longer texts are cut")
    clip: float = Field(1.0, gt=0.0)
    precision: Precision = Field(
        "auto", description="compute dtype; trained weights are float32 in any case"
    )
    activation_checkpointing: bool = Field(
        False, description="compute each layer twice instead of keeping its activations"
    )
    distributed: Distribution = Field(
        "auto", description="several processes: ddp (all weights in each) or fsdp (weights sharded)"
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
        whole = sum(stage.share for stage in self.stages)
        if abs(whole - 1) > 1e-6:
            raise ValueError(f"the shares of the stages must sum to 1, not {whole:g}")
        return self

    def stage(self, step: int) -> Stage:
        """Stage of a step, counted from 0."""
        end = 0.0
        for stage in self.stages:
            end += stage.share * self.steps
            if step < end:
                return stage
        return self.stages[-1]

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then the schedule down to `floor`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        left = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "constant": 1.0,
        }[self.schedule]
        return self.learning_rate * (self.floor + (1 - self.floor) * left)


class ModelSpec(BaseModel, frozen=True, extra="forbid"):
    """A model by name; in a file, a string is short for its `source`."""

    source: str
    """Preset, directory, GGUF file or hub id."""
    config: Path | None = None
    """A `transformers` config.json or its directory, relative to the configuration file, for
    `--dry-run` if the model itself is not on this machine."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class DrafterSpec(BaseModel, frozen=True, extra="forbid"):
    """The drafter to train."""

    base: ModelSpec | None = None
    """The model whose layers it starts from; None: the target itself."""
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
    """Layers that slots pass through; None: all kept layers."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Number of tokens that can be drafted, the most frequent ones of the corpus; None: all."""
    previous_token_width: int | None = None
    start: str | None = None
    """A drafter of the same base to start from (directory, preset or hub id), of at most this rank
    and this width of the previous-token head; parts that it lacks start as new."""

    def resolve(self, num_layers: int) -> DrafterConfig:
        """The drafter's configuration for a base of `num_layers`. Raises InvalidRequest for layers
        that are out of order, or none."""
        kept = tuple(range(num_layers)) if self.kept_layers is None else self.kept_layers
        try:
            return DrafterConfig.model_validate(
                self.model_dump(exclude={"base", "start"}) | {"kept_layers": kept}
            )
        except ValidationError as error:
            raise InvalidRequest(f"drafter: {first_problem(error)}") from error


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    """A training configuration file."""

    target: ModelSpec | None = None
    """The model that wrote the corpus; `--target` overrides it."""
    drafter: DrafterSpec = DrafterSpec()
    train: TrainConfig = TrainConfig()
    evaluate_every: int = Field(400, ge=1, description="steps; the last one is measured too")
    evaluate_draft_length: int = Field(8, ge=1)
    measure_start: bool = Field(False, description="measure the untrained drafter as step 0")
    bonus_recall: bool = Field(
        False, description="also measure recall of the bonus token; a third more work"
    )
    tensorboard: bool = Field(False, description="write curves for TensorBoard beside the log")

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.evaluate_draft_length > self.drafter.block_size:
            raise ValueError(
                f"evaluate_draft_length ({self.evaluate_draft_length}) is above the drafter's "
                f"block_size ({self.drafter.block_size})"
            )
        from_clean_rows = self.train.distillation > 0 and self.train.teacher == "clean_rows"
        if self.drafter.base is not None and from_clean_rows:
            raise ValueError(
                "train.distillation takes its labels from clean rows of the target, and a drafter "
                "with another base has none; use teacher: recorded, with a corpus made by "
                "`d3d data --top-logits`"
            )
        return self


def read_run_config(path: Path) -> RunConfig:
    """Read a configuration file (YAML). Raises InvalidRequest that names the key."""
    content = read_yaml(path)
    try:
        return RunConfig.model_validate({} if content is None else content)
    except ValidationError as error:
        sections = [name for name in error.errors()[0]["loc"][:-1] if name in SECTIONS]
        section = SECTIONS[sections[-1]] if sections else RunConfig
        message = first_problem(error, section.model_fields)
        raise InvalidRequest(f"{path}: {message}") from error


SECTIONS: dict[str | int, type[BaseModel]] = {
    "target": ModelSpec,
    "drafter": DrafterSpec,
    "base": ModelSpec,
    "delta": DeltaConfig,
    "train": TrainConfig,
    "stages": Stage,
}
"""Models of the file's nested keys, for messages that list the keys there are."""
