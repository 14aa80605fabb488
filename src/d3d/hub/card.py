"""Model cards (README.md) as a hub shows them: of a drafter's checkpoint, and of the plain causal
language model that an export makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from d3d.hub.names import is_hub_id
from d3d.hub.presets import PRESETS
from d3d.model.drafter import DeltaConfig, DrafterConfig

CARD_FILE = "README.md"
TAGS = ["d3d", "speculative-decoding", "draft-model", "block-diffusion"]
TRAINING_KEYS = (
    "steps",
    "answers_per_step",
    "learning_rate",
    "weighting",
    "ar_weight",
    "distillation",
    "max_length",
    "precision",
    "seed",
)


@dataclass(frozen=True)
class CardFacts:
    """A drafter and its origin, as a card tells them."""

    config: DrafterConfig
    base: str
    """Name of the model whose layers the drafter is made of."""
    fingerprint: str
    """Fingerprint of that model's weights."""
    provenance: Mapping[str, Any]
    """As the trainer writes it; may lack anything."""

    @property
    def target(self) -> str:
        """Name of the model that the drafter drafts for: the base, unless the provenance names
        another."""
        target = self.provenance.get("target")
        return target if isinstance(target, str) and target else self.base

    @property
    def title(self) -> str:
        """The target's name, without remarks that a hand-written provenance adds to it."""
        return self.target.split(",")[0]


def drafter_card(facts: CardFacts) -> str:
    """README.md of a checkpoint: YAML front matter, then description, data, training, figures and
    usage."""
    kind = "finetune" if facts.config.delta is None else "adapter"
    target = _to_type(facts.title)
    use = f"""## Use

    d3d generate --target {target} --drafter DRAFTER --prompt "What is the capital of France?"

```python
import d3d

model = d3d.load("{target}", "DRAFTER")
print(model.generate("What is the capital of France?").text)
```

DRAFTER is this directory, or its id on the hub. The generated text is the target's own, whatever
the drafter proposes. `d3d export DRAFTER OUT` writes it as a plain causal language model, for
engines that draft in parallel with one."""
    title = f"# Drafter for {facts.title}"
    return _page(facts, "d3d", kind, [title, _description(facts), *_history(facts), use])


def exported_card(facts: CardFacts, dtype: str, mask: str, limits: list[str]) -> str:
    """README.md of an exported drafter. mask: paragraph on the mask token; limits: as of
    `export_limits`."""
    what = f"""A d3d drafter with its deltas merged into the weights ({dtype}), so that
`transformers` loads it like any other model of its family. It is no chat model: it fills blocks of
masked positions after a text, all of them in one pass, for another model to verify. Engines with
parallel drafting use such a draft model, for example vLLM (`"method": "draft_model",
"parallel_drafting": true`, with at most {facts.config.block_size} speculative tokens): the last
known token, then masks; each row predicts the token after its own position."""
    differs = "\n".join(f"- {limit}" for limit in limits)
    sections = [
        f"# Draft model for {facts.title}, as a plain causal language model",
        what,
        f"## The mask token\n\n{mask}",
        "## What differs from the drafter in d3d\n\n"
        + (differs or "Nothing: the merged weights are the drafter's on every row."),
        f"## The drafter it was made of\n\n{_description(facts)}",
    ]
    return _page(facts, "transformers", "finetune", [*sections, *_history(facts)])


def export_limits(config: DrafterConfig) -> list[str]:
    """Abilities of a drafter that it loses as a plain causal language model, a sentence or more
    each."""
    limits = []
    if config.clean_rows_are_base:
        limits.append(
            "The drafter's deltas act at slots only, a plain model's weights on every row: here "
            "clean tokens go through the slots' weights too, which they were not trained for. "
            "Blocks differ from those of d3d, and hardly any of their tokens will be accepted: "
            "this drafter is for d3d. Deltas trained with `scope: all`, and full weights, lose "
            "nothing."
        )
    if config.block_attention == "bidirectional":
        limits.append(
            "The drafter's slots see all of their block, a causal model's the earlier ones only, "
            "which they were not trained for: engines with causal blocks draft worse than d3d "
            "does. Train with `block_attention: causal` for them."
        )
    if config.alignment == "same":
        limits.append(
            "The drafter's slots predict their own positions (`alignment: same`), but engines with "
            "parallel drafting read each row as a prediction of the next position, so their drafts "
            "would be shifted by one. Train with `alignment: next` for them."
        )
    if config.slot_layers is not None:
        limits.append(
            "The drafter's slots skip layers, but a plain model sends every row through all of "
            "them: it drafts with layers that its slots never learned to use. For a thinner plain "
            "model, prune full weights or deltas of `scope: all`, whose layers are removed."
        )
    if config.draft_vocabulary is not None:
        limits.append(
            "The drafter drafts tokens of its draft vocabulary only; a plain model computes all "
            "logits and may draft any token."
        )
    if config.previous_token_width is not None:
        limits.append(
            "The drafter's previous-token head has no place in a plain causal language model: it "
            "is left out, and fewer drafted tokens will be accepted."
        )
    return limits


def vocabulary_limit(vocab_size: int, before: int) -> str:
    """The limit that an added mask token brings: vocabularies of different sizes."""
    return (
        f"The vocabulary has {vocab_size} tokens, the base's {before}. Engines that require draft "
        "model and target to have vocabularies of one size (vLLM does) refuse that; "
        "`d3d export --mask-token-id ID` replaces a reserved token by the mask instead."
    )


def mask_text(token_id: int, token: str | None, config: DrafterConfig, *, tied: bool) -> str:
    """Paragraph on the token at masked positions, and why it is never drafted. tied: if the base's
    head is its embedding."""
    name = f"token id {token_id}" + (f", `{token}`" if token else "")
    text = f"Masked positions are {name}; `config.json` has it as `mask_token_id` and `pard_token`."
    if config.mask_token_id is not None:
        return f"{text} It is a row of the base that no text uses, left as it was in training."
    untied = " Embedding and head, one matrix in the base, are two for that reason." if tied else ""
    return (
        f"{text} Its embedding is the vector that the drafter has learned. Its row of the head is "
        "the mean of all rows, so its logit is the mean of all logits and never above the best: no "
        f"mask is drafted.{untied}"
    )


def _page(facts: CardFacts, library: str, relation: str, sections: list[str]) -> str:
    """Front matter and sections. The base is named only if it is on the hub, which refuses other
    names; the licence is for the owner to state."""
    base = hub_id(facts.base)
    data = ModelCardData(
        library_name=library, pipeline_tag="text-generation", tags=TAGS, base_model=base
    )
    if base is not None:
        data["base_model_relation"] = relation
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def hub_id(source: str) -> str | None:
    """Hub id of a named model, without revision; None for a directory or a file."""
    if source in PRESETS:
        return PRESETS[source].hub_id
    return source.split("@")[0] if is_hub_id(source) and not Path(source).exists() else None


def _to_type(source: str) -> str:
    """The model's name if others can use it too, else a placeholder."""
    return source if hub_id(source) else "TARGET"


def _description(facts: CardFacts) -> str:
    config = facts.config
    weights = f", weights fingerprint `{facts.fingerprint}`"
    deltas = config.delta and _deltas(config.delta, config.slot_layers)
    slots, mask, width = config.slot_layers, config.mask_token_id, config.previous_token_width
    rows = {
        "target": facts.target + (weights if facts.target == facts.base else ""),
        "base": facts.base + weights,
        "layers of the base": f"{len(config.kept_layers)} ({_ranges(config.kept_layers)})",
        "layers of slots": f"{len(slots)} ({_ranges(slots)})" if slots else "all",
        "a block begins with": "the anchor, as a slot"
        if config.anchor_slot
        else "the position after the anchor",
        "weights": deltas or "full weights of its own",
        "block": f"{config.block_size} tokens, {config.block_attention} attention, "
        f"alignment `{config.alignment}`",
        "masked position": "a learned vector" if mask is None else f"token id {mask}",
        "tokens it can draft": str(config.draft_vocabulary or "all"),
        "previous-token head": f"width {width}" if width else "none",
    }
    return (
        "It proposes blocks of tokens by block diffusion, for its target to verify: speculative "
        "decoding,\nin which the generated text stays the target's own. It reads token ids only, "
        f"no hidden states.\n\n{_table(rows)}"
    )


def _deltas(delta: DeltaConfig, slot_layers: tuple[int, ...] | None) -> str:
    rows = "on every row"
    if delta.scope == "slots":
        rows = "at slots only, so clean tokens keep the base's weights"
    layers = "all layers" if slot_layers is None else "the layers of slots"
    if delta.layers is not None:
        layers = f"layers {_ranges(delta.layers)}"
    matrices = ", ".join(delta.matrices)
    return f"low-rank deltas (rank {delta.rank}) on {matrices} of {layers}, that act {rows}"


def _ranges(layers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 -> "0 to 2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _history(facts: CardFacts) -> list[str]:
    """Sections on data, training and figures, as far as the provenance has them."""
    known, sections = facts.provenance, []
    measured = _part(known, "measured")
    if "acceptance_length" not in measured:
        measured = _part(measured, "held_out")
    if sources := _part(known, "sources") or _part(_part(known, "data"), "answers"):
        total = sum(count for count in sources.values() if isinstance(count, int))
        sections.append(
            f"## Data\n\n{known.get('answers', total)} answers, written by the target itself:\n\n"
            + _table(sources, "source", "answers")
        )
    train = _part(_part(known, "config"), "train")
    rows = {name: train[name] for name in TRAINING_KEYS if name in train}
    rows |= _renamed(measured, {"slots": "slots seen", "step": "step of this checkpoint"})
    if rows:
        sections.append(
            f"## Training\n\n{_table(rows)}\n\n"
            "All of it is in `provenance.json` of the drafter's checkpoint."
        )
    if "acceptance_length" in measured:
        sections.append(_figures(measured, _part(known, "held_out") or measured))
    return sections


def _figures(measured: Mapping[str, Any], held_out: Mapping[str, Any]) -> str:
    name = "acceptance length (tokens a round, the target's own one counted)"
    rows = {name: measured["acceptance_length"]}
    rows |= _renamed(held_out, {"draft_length": "draft length", "answers": "held-out answers"})
    text = (
        "## Figures\n\nOf the drafter in d3d, replayed on answers that were not trained on.\n\n"
        + _table(rows)
    )
    rates = measured.get("acceptance_at")
    if isinstance(rates, list) and rates:
        shares = {str(position): f"{100 * rate:.1f} %" for position, rate in enumerate(rates, 1)}
        text += f"\n\n{_table(shares, 'drafted token', 'kept, of all rounds')}"
    return text


def _renamed(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of these keys, as far as there are any, under other names."""
    return {name: content[key] for key, name in names.items() if key in content}


def _table(rows: Mapping[str, Any], name: str = "", value: str = "") -> str:
    cells = [f"| {_cell(key)} | {_cell(content)} |" for key, content in rows.items()]
    return "\n".join([f"| {name} | {value} |", "|---|---|", *cells])


def _cell(content: Any) -> str:
    text = f"{content:.3f}" if isinstance(content, float) and content >= 1 else str(content)
    return " ".join(text.split()).replace("|", "\\|")


def _part(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = content.get(key)
    return part if isinstance(part, dict) else {}
