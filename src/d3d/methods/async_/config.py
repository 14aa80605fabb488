"""Options of async mode."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from d3d.methods.async_.outcomes import MOST_OUTCOMES
from d3d.methods.base import (
    Built,
    DraftLength,
    Facts,
    MethodConfig,
    Parts,
    check_draft_length,
    default_length,
)

MissPolicy = Literal["draft_now", "bonus_only"]
Placement = Literal["thread", "processes", "streams", "devices"]

DEFAULT_OUTCOMES = 1
"""Fastest budget on two CPU cores; larger ones pay if rows are nearly free."""

Outcomes = Annotated[
    int | None,
    Field(
        ge=1, le=MOST_OUTCOMES, description="Outcome budget: verdicts to prepare for. Default: 1."
    ),
]
OnMiss = Annotated[
    MissPolicy | None,
    Field(
        description="On a miss: draft_now (default) waits for a fresh draft, bonus_only runs the "
        "round without one."
    ),
]
Where = Annotated[
    Placement | None,
    Field(description="Placement of the drafter: thread, processes; on CUDA: streams, devices."),
]


class AsyncConfig(MethodConfig):
    """Draft while the target verifies."""

    summary: ClassVar[str] = "draft while the target verifies"
    method: Literal["async"] = "async"
    draft_length: DraftLength = None
    outcomes: Outcomes = None
    miss_policy: OnMiss = None
    placement: Where = None

    def resolve(self, facts: Facts) -> AsyncConfig:
        from d3d.methods.async_.placement import check_placement, default_placement

        drafter = facts.need_drafter("async")
        facts.need_native("async")
        check_draft_length(self.draft_length, drafter.block_size)
        placement = self.placement or default_placement(facts.device)
        check_placement(placement, facts.device)
        return self.model_copy(
            update={
                "outcomes": self.outcomes or DEFAULT_OUTCOMES,
                "miss_policy": self.miss_policy or "draft_now",
                "placement": placement,
            }
        )

    def describe(self, facts: Facts) -> dict[str, Any]:
        import torch

        from d3d.methods.async_.placement import available_cores, worker_cores

        fields = default_length(facts) | super().describe(facts)
        cores = available_cores()
        share = worker_cores(cores) if fields["placement"] == "processes" else []
        if share:
            fields["worker_cores"] = share
        if facts.device.type == "cpu":
            left = len(cores) - (len(share) or 1)  # a draft thread has one
            fields["target_threads"] = max(1, min(torch.get_num_threads(), left))
        return fields

    def build(self, parts: Parts) -> Built:
        """The worker starts with the first request (`Drafter.ready`)."""
        from d3d.methods.async_.coordinator import Policy
        from d3d.methods.async_.drafter import AsyncDrafter
        from d3d.methods.async_.opening import open_coordinator
        from d3d.methods.draft_length import paying_length

        chosen = self.resolve(parts.facts)
        assert parts.drafter is not None
        assert chosen.placement is not None
        if chosen.placement not in parts.workers:
            parts.workers[chosen.placement] = open_coordinator(
                chosen.placement, parts.model, parts.drafter, parts.drafter_path
            )
        running = parts.workers[chosen.placement]
        policy = Policy(
            chosen.draft_length or paying_length(parts, overlapped=True),
            chosen.outcomes or DEFAULT_OUTCOMES,
            chosen.miss_policy or "draft_now",
        )
        return Built(parts.target, AsyncDrafter(running.coordinator, policy, running.threads))
