"""Costs of passes on this machine: measured once per machine, model, dtype and thread count, and
cached with their conditions (`d3d doctor` shows them)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import date
from typing import TYPE_CHECKING, Any

import torch

from d3d.errors import D3DError
from d3d.files import FileKind, Journal
from d3d.hub.cache import cache_root
from d3d.inputs import json_or_none
from d3d.json_text import to_json
from d3d.machine import processor, processor_model

if TYPE_CHECKING:
    from d3d.methods.base import Parts


COSTS = FileKind("a list of measured costs", ("measured_on", "date"))


class MachineCosts:
    """Costs of one target and drafter on this machine."""

    def __init__(self, journal: Journal, key: dict[str, Any]) -> None:
        self._journal, self._key = journal, key
        self._known = {
            name: value
            for entry in read_costs(journal)
            if entry.get("measured_on") == key
            for name, value in entry.items()
        }

    def get(self, name: str) -> Any:
        """Look up a cost; None if unknown."""
        return self._known.get(name)

    def measured(self, name: str, measure: Callable[[], Any]) -> Any:
        """Look up a cost, measuring it if unknown."""
        if name not in self._known:
            self._known[name] = measure()
            today = date.today().isoformat()
            entry = {"measured_on": self._key, name: self._known[name], "date": today}
            with suppress(OSError, D3DError):  # not writable, or not ours: measured again next time
                self._journal.path.parent.mkdir(parents=True, exist_ok=True)
                self._journal.append(to_json(entry))
        return self._known[name]


def machine_costs(parts: Parts) -> MachineCosts:
    """Costs of a target and its drafter on this machine."""
    model = parts.model
    key = {
        "processor": processor(),
        "processor_model": processor_model(),
        "device": torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": getattr(model, "quantize", None),
        "target": model.fingerprint,
        "drafter": None if parts.drafter is None else parts.drafter_fingerprint,
    }
    return MachineCosts(costs_journal(), key)


def costs_journal() -> Journal:
    return Journal(cache_root() / "machine.jsonl", COSTS, shared=True)


def read_costs(journal: Journal) -> list[dict[str, Any]]:
    """Read all entries, skipping damaged lines."""
    entries = (json_or_none(line) for _, line in journal.lines())
    return [entry for entry in entries if isinstance(entry, dict) and _is_sound(entry)]


def _is_sound(entry: dict[str, Any]) -> bool:
    """True if all costs are numbers, 0 or more, and rows are whole."""
    about = {"date", "measured_on"}
    costs = {name: value for name, value in entry.items() if name not in about}
    return isinstance(entry.get("measured_on"), dict) and all(
        not isinstance(value, bool)
        and isinstance(value, int if name.endswith("rows") else int | float)
        and (name.endswith("rows") <= value < float("inf"))
        for name, value in costs.items()
    )
