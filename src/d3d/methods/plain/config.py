"""Plain decoding: no drafter."""

from __future__ import annotations

from typing import ClassVar, Literal

from d3d.methods.base import Built, Facts, MethodConfig, Parts


class PlainConfig(MethodConfig):
    """The target alone."""

    summary: ClassVar[str] = "the target alone"
    method: Literal["plain"] = "plain"

    def resolve(self, facts: Facts) -> PlainConfig:  # noqa: ARG002
        return self

    def build(self, parts: Parts) -> Built:
        return Built(parts.target, None)
