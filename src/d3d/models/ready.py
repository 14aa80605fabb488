"""Drafters of one target, made ready for decoding beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d3d.models.checkpoint import load_drafter
from d3d.models.drafter import DrafterModel
from d3d.models.linear import pack_weights
from d3d.models.open_model import OpenModel


def ready_drafters(target: OpenModel, paths: Sequence[Path]) -> list[DrafterModel]:
    """Load the checkpoints, then pack the weights of target and drafters. Once for a target: a drafter is loaded over weights that are not
    packed yet. Raises InvalidCheckpoint as `load_drafter` does."""
    drafters = [load_drafter(path, target) for path in paths]
    for drafter in drafters:
        drafter.prepare_to_draft()
    pack_weights(target.transformer, *drafters, quantize=target.quantize)
    return drafters
