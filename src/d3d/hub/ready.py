"""Drafters made ready for decoding: beside their target, or apart from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d3d.hub.checkpoint import load_drafter
from d3d.hub.open_model import OpenModel, TargetModel
from d3d.model.drafter import DrafterModel
from d3d.model.linear import pack_weights


def ready_drafters(target: OpenModel, paths: Sequence[Path]) -> list[DrafterModel]:
    """Load the checkpoints, then pack the weights of target and drafters. Once for a target: a
    drafter is loaded over weights that are not packed yet. Raises InvalidCheckpoint as
    `load_drafter` does."""
    drafters = [load_drafter(path, target) for path in paths]
    for drafter in drafters:
        drafter.prepare_to_draft()
    pack_weights(target.transformer, *drafters, quantize=target.quantize)
    return drafters


def ready_apart(target: TargetModel, path: Path, quantize: str | None = None) -> DrafterModel:
    """A drafter whose target decodes elsewhere: in another process, on another device, by another
    engine. Only its own weights are packed, or rounded. Raises InvalidCheckpoint as `load_drafter`
    does."""
    drafter = load_drafter(path, target)
    drafter.prepare_to_draft()
    pack_weights(drafter, quantize=quantize)
    return drafter
