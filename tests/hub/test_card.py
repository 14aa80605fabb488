"""The README.md of a checkpoint: front matter that a hub reads, and what people want to know; with
whatever the provenance has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from d3d.hub.card import CardFacts, drafter_card, exported_card, hub_id
from d3d.hub.checkpoint import save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.model.drafter import DeltaConfig, DrafterConfig
from d3d.train.config import RunConfig, Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.run import TrainingRun
from support.tiny_model import open_tiny, random_drafter

PROVENANCE = {
    "target": "org/Target-8B",
    "base": "org/Base-1B@main",
    "answers": 1050,
    "sources": {"gsm8k": 700, "mb|pp": 350},
    "config": {
        "train": {"steps": 1500, "learning_rate": 0.001, "weighting": "dpace", "ar_weight": 0.3}
    },
    "held_out": {"answers": 20, "draft_length": 3},
    "measured": {
        "step": 1250,
        "slots": 1554094,
        "acceptance_length": 3.81381,
        "acceptance_at": [1.0, 0.7364, 0.51],
    },
}


def made(
    base: str = "org/Base-1B@main", provenance: dict[str, Any] | None = None, **config: Any
) -> CardFacts:
    fields = {"kept_layers": (0, 1, 2, 5), "delta": DeltaConfig(rank=8), **config}
    return CardFacts(
        DrafterConfig(**fields), base, "f" * 64, PROVENANCE if provenance is None else provenance
    )


def front_matter(card: str) -> dict[str, Any]:
    empty, matter, body = card.split("---\n", 2)
    assert empty == ""
    assert body.startswith("\n# ")
    content: dict[str, Any] = yaml.safe_load(matter)
    assert ModelCard(card).data.to_dict() == content
    return content


def test_the_front_matter_is_what_a_hub_expects() -> None:
    assert front_matter(drafter_card(made())) == {
        "base_model": "org/Base-1B",
        "base_model_relation": "adapter",
        "library_name": "d3d",
        "pipeline_tag": "text-generation",
        "tags": ["d3d", "speculative-decoding", "draft-model", "block-diffusion"],
    }
    assert front_matter(drafter_card(made(delta=None)))["base_model_relation"] == "finetune"
    exported = front_matter(exported_card(made(), "bfloat16", "Token 5.", []))
    assert (exported["library_name"], exported["base_model"]) == ("transformers", "org/Base-1B")


def test_a_base_that_is_a_directory_is_no_base_model_for_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("models/mine", str(tmp_path), "model.gguf"):
        assert hub_id(name) is None
        assert (
            front_matter(drafter_card(made(name)))
            .keys()
            .isdisjoint({"base_model", "base_model_relation"})
        )
    assert hub_id("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    "words",
    [
        "# Drafter for org/Target-8B",
        "| target | org/Target-8B |",
        f"| base | org/Base-1B@main, weights fingerprint `{'f' * 64}` |",
        "| layers of the base | 4 (0 to 2, 5) |",
        "low-rank deltas (rank 8) on qkv, out, gate_up, down of all layers, that act at slots only",
        "16 tokens, causal attention, alignment `next`",
        "1050 answers",
        "| gsm8k | 700 |",
        "| mb\\|pp | 350 |",
        "| steps | 1500 |",
        "| learning_rate | 0.001 |",
        "| weighting | dpace |",
        "| slots seen | 1554094 |",
        "| acceptance length (tokens a round, the target's own one counted) | 3.814 |",
        "| draft length | 3 |",
        "| held-out answers | 20 |",
        "| 2 | 73.6 % |",
        "d3d generate --target org/Target-8B --drafter DRAFTER",
        'model = d3d.load("org/Target-8B", "DRAFTER")',
        "d3d export DRAFTER OUT",
    ],
)
def test_it_says(words: str) -> None:
    assert words in drafter_card(made())


def test_it_describes_the_drafter() -> None:
    card = drafter_card(
        made(
            "models/mine",
            {},
            delta=None,
            block_size=8,
            alignment="same",
            block_attention="bidirectional",
            mask_token_id=7,
        )
    )
    assert "of the layers of slots, that act at slots only" in drafter_card(
        made(slot_layers=(0, 2))
    )
    assert "full weights of its own" in card
    assert "8 tokens, bidirectional attention, alignment `same`" in card
    assert "| masked position | token id 7 |" in card
    assert f"| target | models/mine, weights fingerprint `{'f' * 64}` |" in card, (
        "the base is the target"
    )
    assert "| previous-token head | width 4 |" in drafter_card(made(previous_token_width=4))
    delta = DeltaConfig(rank=2, scope="all", matrices=("qkv", "down"), layers=(0, 1, 5))
    assert "(rank 2) on qkv, down of layers 0 to 1, 5, that act on every row" in drafter_card(
        made(delta=delta)
    )


def test_the_place_of_a_local_target_is_not_for_others_to_type() -> None:
    card = drafter_card(made("/home/me/model", {}))
    assert "--target TARGET --drafter" in card
    assert 'd3d.load("TARGET"' in card


@pytest.mark.parametrize(
    "provenance",
    [
        {},
        {"measured": {"acceptance_length": 1.0}},
        {"target": None, "sources": None, "config": [], "held_out": 3, "measured": "well"},
        {
            "sources": {},
            "config": {"train": None},
            "measured": {"acceptance_length": 2, "acceptance_at": []},
        },
    ],
    ids=str,
)
def test_a_provenance_may_lack_anything(provenance: dict[str, Any]) -> None:
    for card in (
        drafter_card(made(provenance=provenance)),
        exported_card(made(provenance=provenance), "float32", "Token 5.", []),
    ):
        front_matter(card)
        assert "org/Base-1B@main" in card
        assert "None" not in card
        assert "## Data" not in card
        assert ("## Figures" in card) == (isinstance(provenance.get("measured"), dict))


def test_a_measurement_written_by_hand_is_found() -> None:
    card = drafter_card(
        made(
            provenance={
                "data": {"answers": {"chat": 3, "code": 4}},
                "measured": {"held_out": PROVENANCE["measured"]},
            }
        )
    )
    assert "7 answers" in card
    assert "| 3.814 |" in card


def test_an_exported_model_says_what_it_is_not() -> None:
    card = exported_card(
        made(), "bfloat16", "Masked positions are token id 5.", ["It has no head.", "It is slow."]
    )
    assert "(bfloat16)" in card
    assert "Masked positions are token id 5." in card
    assert "- It has no head.\n- It is slow." in card
    assert "at most 16 speculative tokens" in card
    assert "Nothing: the merged weights" in exported_card(made(), "bfloat16", "", [])


def test_a_checkpoint_carries_it_and_loads_without_it(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    save_drafter(
        tmp_path / "d",
        random_drafter(base),
        base,
        provenance={"measured": {"acceptance_length": 1.25}},
    )
    card = (tmp_path / "d" / "README.md").read_text()
    assert front_matter(card)["library_name"] == "d3d"
    assert "| 1.250 |" in card
    assert base.fingerprint in card
    (tmp_path / "d" / "README.md").unlink()
    assert load_drafter(tmp_path / "d", base).config.block_size == 6


def test_the_trainer_writes_it(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    texts = [
        Sample(
            [first, 9],
            torch.randint(3, 200, (12,), generator=torch.Generator().manual_seed(first)).tolist(),
            "mine",
            0.0,
            0,
        )
        for first in (5, 6, 7)
    ]
    train = TrainConfig(
        steps=1,
        warmup=0,
        answers_per_step=1,
        stages=(Stage(share=1.0, block_size=4, anchors=4),),
        weighting="dpace",
    )
    config = RunConfig.model_validate(
        {
            "drafter": {"block_size": 4, "delta": {"rank": 2}},
            "train": train,
            "evaluate_draft_length": 3,
        }
    )
    run = TrainingRun(tmp_path, base, config, texts[:2], texts[2:])
    run.run(lambda _: None)
    card = (tmp_path / "best" / "README.md").read_text()
    front_matter(card)
    for words in (
        "2 answers",
        "| mine | 2 |",
        "| weighting | dpace |",
        "| held-out answers | 1 |",
        "| draft length | 3 |",
        "| drafted token | kept, of all rounds |",
    ):
        assert words in card, words
    assert f"| slots seen | {run.trainer.slots_seen} |" in card
    assert f"| {run.best:.3f} |" in card
