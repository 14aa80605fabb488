"""Whether auto mode may try async mode here, and where its draft worker would run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from d3d.errors import InvalidRequest
from d3d.methods.async_.placement import check_placement

FEWEST_CORES = 4
"""A draft process of its own needs as many cores as the target keeps, and both are to have more
than one."""


class Room(NamedTuple):
    """A placement, or why there is none."""

    placement: str | None
    reason: str = ""


def room_for_worker(device: torch.device, num_cores: int, *, is_stored: bool) -> Room:
    """`device`: the target's; `is_stored`: whether the drafter came from a checkpoint, which a
    process can load again."""
    if device.type == "cuda":
        reasons = []
        for name in ("devices", "streams"):
            try:
                check_placement(name, device)
            except InvalidRequest as error:
                reasons.append(str(error).removeprefix("placement: "))
            else:
                return Room(name)
        return Room(None, reasons[-1])
    if num_cores < FEWEST_CORES:
        cores = "one core" if num_cores == 1 else f"{num_cores} cores"
        return Room(None, f"target and drafter would share {cores} and one memory bus")
    if not is_stored:
        return Room(
            None, "the drafter was not loaded from a checkpoint, which a draft process needs"
        )
    return Room("processes")
