"""Model cards (README.md) that a hub understands: of a drafter's checkpoint, and of the causal
language model made from one."""

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
class Made:
    """What a drafter is and where it comes from."""

    config: DrafterConfig
    base: str
    """Name of the model whose layers it is made of."""
    fingerprint: str
    """Of that model's weights."""
    provenance: Mapping[str, Any]
    """As the trainer writes it; anything in it may be missing."""

    @property
    def target(self) -> str:
        """Whose tokens it proposes: the base itself unless the provenance says otherwise."""
        named = self.provenance.get("target")
        return named if isinstance(named, str) and named else self.base

    @property
    def title(self) -> str:
        """The target's name without what else a hand-written provenance says of it."""
        return self.target.split(",")[0]


def drafter_card(made: Made) -> str:
    """README.md of a checkpoint: YAML front matter, then what it is, data, training, figures and
    how to use it."""
    kind = "finetune" if made.config.delta is None else "adapter"
    use = f"""## Use

    d3d generate --target {_to_type(made.title)} --drafter DRAFTER --prompt "What is the capital of France?"

```python
import d3d

model = d3d.load("{_to_type(made.title)}", "DRAFTER")
print(model.generate("What is the capital of France?").text)
```

DRAFTER is this directory, or its id on the hub. What is generated is the target's own text, whatever the drafter proposes.
`d3d export DRAFTER OUT` writes it as a plain causal language model, for engines that draft in parallel with one."""
    return _page(
        _front_matter(made, "d3d", kind),
        [f"# Drafter for {made.title}", _what_it_is(made), *_history(made), use],
    )


def exported_card(made: Made, dtype: str, mask: str, limits: list[str]) -> str:
    """README.md of an exported drafter. `mask`: a paragraph on the mask token; `limits`: what the
    plain model can't do as d3d does."""
    title = f"# Draft model for {made.title}, as a plain causal language model"
    what = f"""A d3d drafter with its deltas merged into the weights ({dtype}), so that `transformers` loads it like any other model of its
family. It is no chat model: it fills blocks of masked places behind a text, all of them in one pass, for another model to check. That is
what engines with parallel drafting do with a draft model, such as vLLM (`"method": "draft_model", "parallel_drafting": true`, and at
most {made.config.block_size} speculative tokens): the last known token, then masks; each row predicts the token after its own place."""
    differs = (
        "\n".join(f"- {limit}" for limit in limits)
        if limits
        else "Nothing: the merged weights are the drafter's on every row."
    )
    sections = [
        title,
        what,
        f"## The mask token\n\n{mask}",
        f"## What differs from the drafter in d3d\n\n{differs}",
    ]
    sections += ["## The drafter it was made of\n\n" + _what_it_is(made), *_history(made)]
    return _page(_front_matter(made, "transformers", "finetune"), sections)


def _page(front_matter: str, sections: list[str]) -> str:
    return f"---\n{front_matter}\n---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(made: Made, library: str, relation: str) -> str:
    """The base is named where it is one of the hub: the hub refuses other names. The licence is for
    the owner to state."""
    base = hub_id(made.base)
    data = ModelCardData(
        library_name=library, pipeline_tag="text-generation", tags=TAGS, base_model=base
    )
    if base is not None:
        data["base_model_relation"] = relation
    return data.to_yaml()


def hub_id(source: str) -> str | None:
    """The hub's id of a named model, without a revision; None for a directory or a file."""
    if source in PRESETS:
        return PRESETS[source].hub_id
    return source.split("@")[0] if is_hub_id(source) and not Path(source).exists() else None


def _to_type(source: str) -> str:
    """What another person can type for it."""
    return source if hub_id(source) else "TARGET"


def _what_it_is(made: Made) -> str:
    config = made.config
    rows = {
        "target": f"{made.target}"
        + (f", weights fingerprint `{made.fingerprint}`" if made.target == made.base else ""),
        "base": f"{made.base}, weights fingerprint `{made.fingerprint}`",
        "layers of the base": f"{len(config.kept_layers)} ({_ranges(config.kept_layers)})",
        "layers of slots": f"{len(config.slot_layers)} ({_ranges(config.slot_layers)})"
        if config.slot_layers
        else "all",
        "a block begins with": "the anchor, as a slot"
        if config.anchor_slot
        else "the place behind the anchor",
        "weights": "full weights of its own"
        if config.delta is None
        else _deltas(config.delta, config.slot_layers),
        "block": f"{config.block_size} tokens, {config.block_attention} attention, alignment `{config.alignment}`",
        "masked place": "a learned vector"
        if config.mask_token_id is None
        else f"token id {config.mask_token_id}",
        "tokens it can draft": f"{config.draft_vocabulary}" if config.draft_vocabulary else "all",
        "previous-token head": f"width {config.previous_token_width}"
        if config.previous_token_width
        else "none",
    }
    return f"""It proposes blocks of tokens by block diffusion, for its target to check: speculative decoding, in which what is written
stays the target's own. It reads token ids only, no hidden states.

{_table(rows)}"""


def _deltas(delta: DeltaConfig, slot_layers: tuple[int, ...] | None) -> str:
    where = (
        "at slots only, so clean tokens keep the base's weights"
        if delta.scope == "slots"
        else "on every row"
    )
    layers = (
        ("all layers" if slot_layers is None else "the layers of slots")
        if delta.layers is None
        else f"layers {_ranges(delta.layers)}"
    )
    return f"low-rank deltas (rank {delta.rank}) on {', '.join(delta.matrices)} of {layers}, that act {where}"


def _ranges(layers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 -> "0 to 2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _history(made: Made) -> list[str]:
    """Data, training and figures, as far as the provenance knows them."""
    known = made.provenance
    found = _part(known, "measured")
    measured = found if "acceptance_length" in found else _part(found, "held_out")
    sections = []
    if sources := _part(known, "sources") or _part(_part(known, "data"), "answers"):
        total = known.get(
            "answers", sum(count for count in sources.values() if isinstance(count, int))
        )
        sections.append(
            f"## Data\n\n{total} answers, written by the target itself:\n\n{_table(sources, 'source', 'answers')}"
        )
    train = _part(_part(known, "config"), "train")
    rows: dict[str, Any] = {name: train[name] for name in TRAINING_KEYS if name in train}
    rows |= {
        name: measured[key]
        for name, key in (("slots seen", "slots"), ("step of this checkpoint", "step"))
        if key in measured
    }
    if rows:
        sections.append(
            f"## Training\n\n{_table(rows)}\n\nAll of it is in `provenance.json` of the drafter's checkpoint."
        )
    if "acceptance_length" in measured:
        sections.append(_figures(measured, _part(known, "held_out") or measured))
    return sections


def _figures(measured: Mapping[str, Any], held_out: Mapping[str, Any]) -> str:
    rows = {
        "acceptance length (tokens a round, the target's own one counted)": measured[
            "acceptance_length"
        ]
    }
    rows |= {
        name: held_out[key]
        for name, key in (("draft length", "draft_length"), ("held-out answers", "answers"))
        if key in held_out
    }
    text = f"## Figures\n\nOf the drafter in d3d, replayed on answers that were not trained on.\n\n{_table(rows)}"
    kept = measured.get("acceptance_at")
    if isinstance(kept, list) and kept:
        shares = {str(place): f"{100 * share:.1f} %" for place, share in enumerate(kept, 1)}
        text += f"\n\n{_table(shares, 'drafted token', 'kept, of all rounds')}"
    return text


def _table(rows: Mapping[str, Any], name: str = "", value: str = "") -> str:
    cells = [f"| {_cell(key)} | {_cell(content)} |" for key, content in rows.items()]
    return "\n".join([f"| {name} | {value} |", "|---|---|", *cells])


def _cell(content: Any) -> str:
    text = f"{content:.3f}" if isinstance(content, float) and content >= 1 else str(content)
    return " ".join(text.split()).replace("|", "\\|")


def _part(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = content.get(key)
    return found if isinstance(found, dict) else {}
