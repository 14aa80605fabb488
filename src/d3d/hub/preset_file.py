"""A preset of one's own, as a file: a target, a drafter, how they decode, and how that was found
out.

It may stand wherever the name of a preset may. YAML, or JSON, which is YAML as well; unknown keys
are refused."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d3d.errors import InvalidCheckpoint
from d3d.hub.presets import PRESETS, SHIPPED

FORMAT: Literal[1] = 1
SUFFIXES = (".yaml", ".yml", ".json")


class AnswerRounds(BaseModel):
    """What became of one answer while it was tuned: a figure that later traffic is compared
    with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(ge=0)
    committed: int = Field(ge=0)
    """Tokens that its rounds committed."""


class Tuned(BaseModel):
    """Where a preset's choices come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    target_fingerprint: str
    drafter_fingerprint: str | None = None
    prompts: str
    """Name of the file that they were in."""
    prompts_sha256: str
    num_prompts: int
    max_tokens: int
    temperature: float = 0.0
    concurrency: int = 1
    seed: int
    trials: int
    """Settings that were tried."""
    judged_on_other_prompts: bool
    """Whether the prompts behind the figures below had no part in the search."""
    ms_per_token: float
    plain_ms_per_token: float
    speed_up: float
    """Over plain decoding, in the same runs, prompt by prompt."""
    speed_up_interval: tuple[float, float]
    """95 %, from prompts drawn anew with replacement."""
    answers: tuple[AnswerRounds, ...] = ()
    """None in plain mode."""


class PresetFile(BaseModel):
    """What the file holds. Keys beside these are options of its mode (`d3d.config`)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    format: Literal[1] = FORMAT
    target: str
    """Preset, hub id, or a path from the file's own directory on; so has the drafter."""
    drafter: str | None = None
    """None: the target's own where it is a preset, else none."""
    dtype: str = "auto"
    quantize: str | None = None
    """What the linear weights of both are rounded to. None: nothing."""
    threads: int | None = Field(None, ge=1)
    """Of torch, for the whole process. None: as many as it takes by itself."""
    mode: str
    tuned: Tuned | None = None
    """None if somebody wrote the file by hand."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the mode."""
        return dict(self.model_extra or {})


def is_preset_file(source: str) -> bool:
    """Whether a model's name can only be meant as a preset file, one that comes with d3d among
    them."""
    return source in SHIPPED or Path(source).suffix.lower() in SUFFIXES


def preset_path(source: str | Path) -> Path:
    """Where the file lies."""
    shipped = SHIPPED.get(str(source))
    return (
        Path(source).expanduser()
        if shipped is None
        else Path(str(resources.files("d3d").joinpath(shipped)))
    )


def read_preset(path: str | Path) -> PresetFile:
    """With paths of target and drafter as they are to be opened from here. Raises InvalidCheckpoint
    that says what is wrong."""
    file = preset_path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        found = PresetFile.model_validate(content)
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"there is no preset file {file}; d3d tune writes one") from error
    except ValidationError as error:
        raise InvalidCheckpoint(f"preset {file}: {_first(error)}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidCheckpoint(
            f"preset {file} can't be read as YAML or JSON: {' '.join(str(error).split())}"
        ) from error
    for name in ("target", "drafter"):
        value = getattr(found, name)
        if value is not None and is_preset_file(value):
            raise InvalidCheckpoint(
                f"preset {file}: {name}: {value} is another preset file; name the model itself"
            )
    beside = {name: _from(file.parent, getattr(found, name)) for name in ("target", "drafter")}
    return found.model_copy(update=beside)


def write_preset(path: Path, preset: PresetFile) -> None:
    """Whole or not at all; paths that exist are written so that the file may be read from
    anywhere."""
    absolute = {name: _absolute(getattr(preset, name)) for name in ("target", "drafter")}
    content = preset.model_copy(update=absolute).model_dump(mode="json", exclude_none=True)
    work = path.with_name(path.name + ".partial")
    work.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    work.replace(path)


def _from(directory: Path, value: str | None) -> str | None:
    """A path that exists beside the file; other names, those of presets before all, are as they
    are."""
    if value is None or value in PRESETS:
        return value
    beside = directory / Path(value).expanduser()
    return str(beside) if beside.exists() else value


def _absolute(value: str | None) -> str | None:
    if value is None or value in PRESETS:
        return value
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if name == "format":
        return f"format: written by another version of d3d; this one reads format {FORMAT}"
    return f"{name}: {first['msg']}" if name else f"it must hold keys and values ({first['msg']})"
