"""What to tell people who export a drafter; printed by the command and written into the model
card."""

from __future__ import annotations

from d3d.model.drafter import DrafterConfig


def limits(config: DrafterConfig) -> list[str]:
    """What a plain causal language model can't do as this drafter does."""
    found = []
    if config.clean_rows_are_base:
        found.append(
            "The drafter's deltas act at slots only, a plain model's weights on every row: here clean tokens go through the slots' "
            "weights, too, which they were not trained for. Blocks differ from those of d3d, and hardly any of their tokens will be "
            "kept: this drafter is for d3d. Deltas trained with `scope: all`, and full weights, lose nothing."
        )
    if config.block_attention == "bidirectional":
        found.append(
            "The drafter's slots see all of their block, a causal model's the earlier ones only, which they were not trained for: engines "
            "with causal blocks draft worse than d3d does. Train with `block_attention: causal` for them."
        )
    if config.alignment == "same":
        found.append(
            "The drafter's slots predict their own places (`alignment: same`), but engines with parallel drafting read each row as a "
            "prediction of the next place, so their drafts would be shifted by one. Train with `alignment: next` for them."
        )
    if config.slot_layers is not None:
        found.append(
            "The drafter's slots pass layers by, and a plain model sends every row through all of them: the model drafts with layers that "
            "its slots never learned to use. For a thinner plain model prune full weights or deltas of `scope: all`, whose layers go."
        )
    if config.draft_vocabulary is not None:
        found.append(
            "The drafter drafts tokens of its draft vocabulary only; a plain model computes all logits and may draft any token."
        )
    if config.previous_token_width is not None:
        found.append(
            "The drafter's previous-token head has no place in a plain causal language model: it is left out, and fewer drafted tokens "
            "will be kept."
        )
    return found


def grown(vocab_size: int, before: int) -> str:
    """What an added mask token means for engines."""
    return (
        f"The vocabulary has {vocab_size} tokens, the base's {before}. Engines that want draft model and target to have vocabularies of "
        "one size (vLLM does) refuse that; `d3d export --mask-token-id ID` puts the mask in the place of a reserved token instead."
    )


def mask_text(token_id: int, token: str | None, config: DrafterConfig, *, tied: bool) -> str:
    """Which token stands for a masked place, and why it is never drafted. `tied`: of the base."""
    name = f"token id {token_id}" + (f", `{token}`" if token else "")
    where = f"Masked places are {name}; `config.json` names it as `mask_token_id` and `pard_token`."
    if config.mask_token_id is not None:
        return f"{where} It is a row of the base that no text uses, and the drafter was trained with it as it is."
    untied = " Embedding and head, one matrix in the base, are two for that reason." if tied else ""
    return (
        f"{where} Its embedding is the vector that the drafter has learned. Its row of the head is the mean of all rows, so its logit is "
        f"the mean of all logits and never above the best: no mask is drafted.{untied}"
    )
