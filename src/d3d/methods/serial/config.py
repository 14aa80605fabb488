"""Options of serial mode."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from d3d.errors import InvalidRequest
from d3d.methods.base import (
    Built,
    DraftLength,
    Facts,
    Lookup,
    MethodConfig,
    Parts,
    check_draft_length,
    default_length,
)

DenoiseSteps = Annotated[
    int | None,
    Field(ge=1, description="Drafter passes per block, at most draft_length. Default: 1."),
]
DraftConfidence = Annotated[
    float | None,
    Field(
        ge=0,
        le=1,
        description="Cut a draft once the probability that all of it is kept, by the drafter's "
        "own estimate, falls below this. Default: no cut.",
    ),
]
LeastKept = Annotated[
    float | None,
    Field(
        ge=0,
        description="Pause drafting while fewer tokens than this are kept on average (every eighth "
        "round still drafts). 0: never pause.",
    ),
]


class SerialConfig(MethodConfig):
    """Draft a block, then verify it."""

    summary: ClassVar[str] = "draft a block, then verify it"
    method: Literal["serial"] = "serial"
    draft_length: DraftLength = None
    num_denoise_steps: DenoiseSteps = None
    draft_confidence: DraftConfidence = None
    lookup: Lookup = None
    least_kept: LeastKept = None

    def resolve(self, facts: Facts) -> SerialConfig:
        drafter = facts.need_drafter("serial")
        check_draft_length(self.draft_length, drafter.block_size)
        steps, length = self.num_denoise_steps or 1, self.draft_length or drafter.block_size
        if steps > length:
            raise InvalidRequest(
                f"num_denoise_steps: {steps} is not within 1 and the draft length, {length}"
            )
        return self.model_copy(update={"num_denoise_steps": steps})

    def describe(self, facts: Facts) -> dict[str, Any]:
        return default_length(facts) | super().describe(facts)

    def build(self, parts: Parts) -> Built:
        from d3d.methods.draft_length import paying_length
        from d3d.methods.serial.drafter import BlockDrafter

        chosen = self.resolve(parts.facts)
        steps = chosen.num_denoise_steps or 1
        assert parts.drafter is not None
        drafter = BlockDrafter(
            parts.drafter,
            parts.target.vocab_size,
            draft_length=chosen.draft_length or max(steps, paying_length(parts)),
            shared_cache=parts.target.cache_for(parts.drafter),
            num_denoise_steps=steps,
            draft_confidence=chosen.draft_confidence,
            lookup=chosen.lookup or 0,
            least_kept=chosen.least_kept or 0.0,
        )
        return Built(parts.target, drafter)
