"""Acceptance without the target: replay rounds of greedy drafting against answers that the target has written.

What a drafter proposes depends on the committed prefix alone, so the blocks at all anchors of an answer are computed in wide
passes and the rounds are walked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from d3d.models.drafter import DrafterModel
from d3d.training.blocks import clean_pass, hang_blocks, slot_pass
from d3d.training.corpus import Sample

SLOTS_A_PASS = 1024


@dataclass
class Acceptance:
    """Counts over rounds; adding is how several answers come together."""

    draft_length: int
    rounds: int = 0
    committed: int = 0
    histogram: list[int] = field(default_factory=list)
    """Rounds by num_accepted, 0..draft_length."""

    def __post_init__(self) -> None:
        self.histogram = self.histogram or [0] * (self.draft_length + 1)

    def add_round(self, num_accepted: int, num_committed: int) -> None:
        self.rounds += 1
        self.committed += num_committed
        self.histogram[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """Share of rounds in which drafted token 1, 2, ... was kept."""
        return [sum(self.histogram[j:]) / self.rounds if self.rounds else 0.0 for j in range(1, self.draft_length + 1)]


@torch.no_grad()
def predict_blocks(model: DrafterModel, token_ids: Tensor, first: int, draft_length: int) -> Tensor:
    """The block that the drafter proposes at each anchor first..len - 2: int64 [anchors, draft_length]."""
    config = model.config
    vocab_size = model.transformer.config.vocab_size
    hidden, cache = clean_pass(model, token_ids)
    anchors = torch.arange(first, len(token_ids) - 1, device=token_ids.device)
    num_slots = config.num_slots(draft_length)
    parts = [model.draft_logits(hidden[anchors], vocab_size).argmax(-1)[:, None]] if config.alignment == "next" else []
    if num_slots and len(anchors):
        chunks = anchors.split(max(1, SLOTS_A_PASS // num_slots))
        slots = [
            model.draft_logits(slot_pass(model, cache, hang_blocks(chunk, num_slots, config.alignment)), vocab_size).argmax(-1)
            for chunk in chunks
        ]
        parts.append(torch.cat(slots).view(len(anchors), num_slots))
    return torch.cat(parts, dim=1)


def walk(blocks: list[list[int]], answer_ids: list[int], acceptance: Acceptance) -> None:
    """Walk the rounds of one answer; `blocks[i]` is the block whose anchor is answer token i."""
    anchor, last = 0, len(answer_ids) - 1
    while anchor < last:
        truth = answer_ids[anchor + 1 :]
        num_accepted = 0
        for drafted, wanted in zip(blocks[anchor], truth, strict=False):
            if drafted != wanted:
                break
            num_accepted += 1
        committed = min(num_accepted + 1, len(truth))
        acceptance.add_round(num_accepted, committed)
        anchor += committed


def replay(model: DrafterModel, samples: Iterable[Sample], draft_length: int, on_sample: Callable[[], None] = lambda: None) -> Acceptance:
    """Rounds of greedy drafting over recorded answers; the first answer token belongs to no round."""
    acceptance = Acceptance(draft_length)
    for sample in samples:
        if len(sample.answer_ids) > 1:
            token_ids = torch.tensor(sample.token_ids, device=model.transformer.device)
            blocks = predict_blocks(model, token_ids, len(sample.prompt_ids), draft_length)
            walk(blocks.tolist(), sample.answer_ids, acceptance)
        on_sample()
    return acceptance
