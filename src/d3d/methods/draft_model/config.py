"""Options of classic speculative decoding with a causal draft model."""

from __future__ import annotations

from typing import ClassVar, Literal

from d3d.errors import InvalidCheckpoint
from d3d.methods.base import DEFAULT_DRAFT_LENGTH, Built, DraftLength, Facts, MethodConfig, Parts


class DraftModelConfig(MethodConfig):
    """Draft token by token with a smaller causal model of the same tokenizer: the model that
    `drafter` names, or the D3D drafter's own causal rows."""

    summary: ClassVar[str] = "a smaller causal model drafts token by token"
    method: Literal["draft_model"] = "draft_model"
    draft_length: DraftLength = None

    def resolve(self, facts: Facts) -> DraftModelConfig:  # noqa: ARG002
        return self.model_copy(update={"draft_length": self.draft_length or DEFAULT_DRAFT_LENGTH})

    def build(self, parts: Parts) -> Built:
        from d3d.hub.fingerprint import first_difference
        from d3d.methods.draft_model.drafter import DraftModelDrafter, autoregressive_head

        chosen = self.resolve(parts.facts)
        model = parts.draft_model
        if model is not None:
            difference = first_difference(model.tokenizer, parts.model.tokenizer)
            if difference is not None:
                raise InvalidCheckpoint(
                    f"{model.source} can't draft for {parts.model.source}: {difference}; take a "
                    "model of the target's own family"
                )
            transformer = model.transformer
        else:
            parts.facts.need_drafter("draft_model")
            assert parts.drafter is not None
            transformer = autoregressive_head(parts.drafter)
        length = chosen.max_draft_length
        return Built(parts.target, DraftModelDrafter(transformer, parts.target.vocab_size, length))
