"""Options of fused mode."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from d3d.errors import InvalidRequest
from d3d.methods.base import (
    MOST_TOKENS,
    Built,
    DraftLength,
    Facts,
    Lookup,
    MethodConfig,
    Parts,
)

DEFAULT_FUSED_DRAFT_LENGTH = 6

FusedRows = Annotated[
    int | None,
    Field(
        ge=2,
        le=MOST_TOKENS,
        description="Maximum rows of a pass per request. Default: the preset's, else measured "
        "once per machine.",
    ),
]


class FusedConfig(MethodConfig):
    """Verify a draft and make the next in one pass."""

    summary: ClassVar[str] = "verify a draft and make the next in one pass"
    method: Literal["fused"] = "fused"
    draft_length: DraftLength = None
    rows: FusedRows = None
    lookup: Lookup = None

    def resolve(self, facts: Facts) -> FusedConfig:
        from d3d.methods.fused.engine import (
            LONGEST_COPY,
            check_fused_config,
            longest_fused_draft,
        )

        drafter = facts.need_drafter("fused")
        facts.need_native("fused")
        check_fused_config(drafter, clean_rows_are_targets=facts.clean_rows_are_targets)
        group = drafter.longest_slot_draft
        longest = longest_fused_draft(group, self.lookup or 0)
        if self.draft_length is not None and self.draft_length > longest:
            copies = f", and copies from the text have {LONGEST_COPY}" if self.lookup else ""
            raise InvalidRequest(
                f"draft_length: {self.draft_length} is not within 1 and {longest}: slots draft "
                f"{group} tokens at most{copies}"
            )
        default = LONGEST_COPY if self.lookup else min(DEFAULT_FUSED_DRAFT_LENGTH, longest)
        return self.model_copy(
            update={
                "draft_length": self.draft_length or default,
                "rows": self.rows or facts.preset_rows,
            }
        )

    def describe(self, facts: Facts) -> dict[str, Any]:
        return {"rows": "measured at the start"} | super().describe(facts)

    def build(self, parts: Parts) -> Built:
        from d3d.methods.costs import machine_costs
        from d3d.methods.fused.engine import FusedTarget
        from d3d.methods.fused.rows import best_rows, row_price
        from d3d.target.native import NativeTarget

        chosen = self.resolve(parts.facts)
        target, drafter = parts.target, parts.drafter
        assert isinstance(target, NativeTarget)
        assert drafter is not None
        costs = machine_costs(parts)
        length = min(DEFAULT_FUSED_DRAFT_LENGTH, drafter.config.longest_slot_draft)
        price = costs.measured("row_price", lambda: row_price(target, drafter, length))
        rows = chosen.rows or costs.measured(
            "fused_rows", lambda: best_rows(target, drafter, length, price)
        )
        engine = FusedTarget(
            target,
            drafter,
            chosen.max_draft_length,
            rows,
            lookup=chosen.lookup or 0,
            row_price=price,
        )
        return Built(engine, engine)
