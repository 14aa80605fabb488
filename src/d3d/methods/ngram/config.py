"""Options of prompt lookup alone."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from d3d.methods.base import (
    DEFAULT_DRAFT_LENGTH,
    MOST_TOKENS,
    Built,
    DraftLength,
    Facts,
    MethodConfig,
    Parts,
)

DEFAULT_LONGEST = 3

LookupMin = Annotated[
    int | None,
    Field(ge=1, le=MOST_TOKENS, description="Shortest run to match, in tokens. Default: 1."),
]
LookupMax = Annotated[
    int | None,
    Field(ge=1, le=MOST_TOKENS, description="Longest run to match, in tokens. Default: 3."),
]


class NgramConfig(MethodConfig):
    """Prompt lookup: copy what followed the same tokens earlier in the text. Needs no drafter."""

    summary: ClassVar[str] = "prompt lookup: copy from the text, no drafter"
    method: Literal["ngram"] = "ngram"
    draft_length: DraftLength = None
    prompt_lookup_min: LookupMin = None
    prompt_lookup_max: LookupMax = None

    @model_validator(mode="after")
    def _min_is_within_max(self) -> NgramConfig:
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        if lowest is not None and highest is not None and lowest > highest:
            raise ValueError(
                f"prompt_lookup_min ({lowest}) must not be above prompt_lookup_max ({highest})"
            )
        return self

    def resolve(self, facts: Facts) -> NgramConfig:  # noqa: ARG002
        shortest = self.prompt_lookup_min or 1
        return self.model_copy(
            update={
                "draft_length": self.draft_length or DEFAULT_DRAFT_LENGTH,
                "prompt_lookup_min": shortest,
                "prompt_lookup_max": self.prompt_lookup_max or max(shortest, DEFAULT_LONGEST),
            }
        )

    def build(self, parts: Parts) -> Built:
        from d3d.methods.ngram.drafter import NgramDrafter

        chosen = self.resolve(parts.facts)
        shortest, longest = chosen.prompt_lookup_min or 1, chosen.prompt_lookup_max or 1
        return Built(parts.target, NgramDrafter(chosen.max_draft_length, shortest, longest))
