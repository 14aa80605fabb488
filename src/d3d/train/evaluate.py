"""Acceptance without the target: replay rounds of greedy drafting against answers that the target
has written.

What a drafter proposes depends on the committed prefix alone, so the blocks at all anchors of an
answer are computed in wide passes and the rounds are walked afterwards. A sampled answer is
replayed like a greedy one: a drafted token is kept while it is the target's own draw
(`d3d.acceptance.sample_match`), and the recorded tokens are these draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.core.prefix import common_prefix
from d3d.model.choice import SEEN_TOKENS
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import KVCache
from d3d.train.acceptance import Acceptance
from d3d.train.blocks import clean_pass, hang_blocks, slot_pass
from d3d.train.corpus import Sample

__all__ = [
    "Acceptance",
    "Predicted",
    "by_source",
    "fused_blocks",
    "predict_blocks",
    "replay",
    "replay_fused",
    "walk",
]

SLOTS_A_PASS = 1024


class Predicted(NamedTuple):
    """What the drafter proposes at each anchor."""

    tokens: Tensor
    """int64 [anchors, draft_length]"""
    ranks: Tensor | None = None
    """int64 [anchors, draft_length + 1], or one column less where a block has no room for the last:
    how many tokens, the drafted one left out, the drafter holds for likelier than the text's own at
    that place. Past the text's end it means nothing."""


@torch.no_grad()
def predict_blocks(
    model: DrafterModel, token_ids: Tensor, first: int, draft_length: int, *, recall: bool = False
) -> Predicted:
    """The block that the drafter proposes at each anchor first..len - 2 of a text, and with
    `recall` the ranks of what came.

    token_ids: int64 [length]; draft_length: at most the drafter's block_size.
    """
    hidden, cache = clean_pass(model, token_ids)
    anchors = torch.arange(first, len(token_ids) - 1, device=token_ids.device)
    chunks = anchors.split(
        max(1, SLOTS_A_PASS // max(1, model.config.num_slots(draft_length + recall)))
    )
    parts = [
        _predict(model, token_ids, hidden, cache, chunk, draft_length, recall=recall)
        for chunk in chunks
    ]
    ranks = [part.ranks for part in parts if part.ranks is not None]
    return Predicted(
        torch.cat([part.tokens for part in parts]), torch.cat(ranks) if ranks else None
    )


def _predict(
    model: DrafterModel,
    token_ids: Tensor,
    hidden: Tensor,
    cache: KVCache,
    anchors: Tensor,
    draft_length: int,
    *,
    recall: bool,
) -> Predicted:
    one_more = recall and draft_length < model.config.block_size
    # where slots see each other, one more of them would change the others, so the last guess needs
    # a pass of its own
    together = one_more and model.config.block_attention == "causal"
    logits = _block_logits(model, token_ids, hidden, cache, anchors, draft_length + together)
    tokens = logits[:, :draft_length].argmax(-1)
    if not recall:
        return Predicted(tokens)
    ranks = [_ranks(logits, token_ids, anchors, 0, tokens)]
    if one_more and not together:
        last = _block_logits(model, token_ids, hidden, cache, anchors, draft_length + 1)[
            :, draft_length:
        ]
        ranks.append(_ranks(last, token_ids, anchors, draft_length, tokens[:, :0]))
    return Predicted(tokens, torch.cat(ranks, dim=1))


def _block_logits(
    model: DrafterModel,
    token_ids: Tensor,
    hidden: Tensor,
    cache: KVCache,
    anchors: Tensor,
    length: int,
) -> Tensor:
    """Float32 logits of the drafted tokens of each anchor's block, [anchors, length, vocab_size],
    as drafting has them.

    The one place where evaluation looks at how tokens are chosen: `DrafterModel.choose_in_turn`,
    then the best of each row."""
    config = model.config
    rows = [hidden[anchors][:, None]] if config.own_rows else []
    if num_slots := config.num_slots(length):
        slots = slot_pass(model, cache, hang_blocks(token_ids, anchors, num_slots, config))
        rows.append(slots.view(len(anchors), num_slots, -1))
    states = torch.cat(rows, dim=1)
    logits = model.draft_logits(states, model.transformer.config.vocab_size)
    last = torch.stack(
        [token_ids[(anchors - back).clamp(min=0)] for back in range(SEEN_TOKENS)], dim=1
    )
    model.choose_in_turn(states, logits, last, own_rows=config.own_rows)
    return logits


@torch.no_grad()
def fused_blocks(
    model: DrafterModel, token_ids: Tensor, first: int, draft_length: int
) -> list[list[int]]:
    """What fused mode drafts at each anchor first..len - 2 of a text (`d3d.drafting.fused`): its
    slots hang at the token before, and the anchor's own id is told to the previous-token head
    alone. Nothing at `first`, which the prefill gives."""
    _, cache = clean_pass(model, token_ids)
    blocks: list[list[int]] = [[]]
    places = torch.arange(first, len(token_ids) - 2, device=token_ids.device)
    for chunk in places.split(max(1, SLOTS_A_PASS // draft_length)) if len(places) else ():
        slots = slot_pass(
            model, cache, hang_blocks(token_ids, chunk, draft_length, model.config)
        ).view(len(chunk), draft_length, -1)
        logits = model.without_mask_token(
            model.transformer.logits(slots), model.transformer.config.vocab_size
        )
        last = torch.stack(
            [token_ids[(chunk + 1 - back).clamp(min=0)] for back in range(SEEN_TOKENS)], dim=1
        )
        blocks += model.choose(slots, logits, last, own_rows=0).token_ids.tolist()
    return blocks


def _ranks(
    logits: Tensor, token_ids: Tensor, anchors: Tensor, start: int, drafted: Tensor
) -> Tensor:
    """Ranks of the text's tokens in rows start, start + 1, ... of their blocks, [anchors, rows];
    `drafted` [anchors, <= rows] is left out. Among equals the lowest id is first, as for argmax."""
    places = anchors[:, None] + 1 + start + torch.arange(logits.shape[1], device=anchors.device)
    truth = token_ids[places.clamp(max=len(token_ids) - 1)]
    value = logits.gather(-1, truth[..., None])
    ranks = (logits > value).sum(-1)
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    ranks += ((logits == value) & (vocabulary < truth[..., None])).sum(-1)
    with_draft = ranks[:, : drafted.shape[1]]
    with_draft -= (with_draft > 0).long()  # the drafted token is the best of its row
    return ranks


def walk(
    blocks: list[list[int]],
    answer_ids: list[int],
    acceptance: Acceptance,
    ranks: list[list[int]] | None = None,
) -> None:
    """Walk the rounds of one answer; `blocks[i]` is the block whose anchor is answer token i,
    `ranks[i]` the ranks of what came."""
    anchor, last = 0, len(answer_ids) - 1
    while anchor < last:
        truth = answer_ids[anchor + 1 :]
        num_accepted = common_prefix(blocks[anchor], truth)
        committed = min(num_accepted + 1, len(truth))
        acceptance.add_round(num_accepted, committed)
        if ranks is not None and num_accepted < min(len(truth), len(ranks[anchor])):
            acceptance.add_bonus(num_accepted, ranks[anchor][num_accepted])
        anchor += committed


def replay(
    model: DrafterModel,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
    *,
    recall: bool = False,
) -> Acceptance:
    """Rounds of greedy drafting over recorded answers; the first answer token belongs to no round.
    `recall` costs about a third more, and fills `bonus_recall`."""
    acceptance = Acceptance(draft_length)
    for sample in samples:
        if len(sample.answer_ids) > 1:
            token_ids = torch.tensor(sample.token_ids, device=model.transformer.device)
            tokens, ranks = predict_blocks(
                model, token_ids, len(sample.prompt_ids), draft_length, recall=recall
            )
            of_answer = Acceptance(draft_length)
            walk(
                tokens.tolist(),
                sample.answer_ids,
                of_answer,
                None if ranks is None else ranks.tolist(),
            )
            acceptance.add_answer(of_answer)
        on_sample()
    return acceptance


def replay_fused(
    model: DrafterModel,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Rounds of fused decoding with slots behind every row: its acceptance length is the tokens a
    pass, where rows cost nothing."""
    acceptance = Acceptance(draft_length)
    for sample in samples:
        if len(sample.answer_ids) > 1:
            token_ids = torch.tensor(sample.token_ids, device=model.transformer.device)
            of_answer = Acceptance(draft_length)
            walk(
                fused_blocks(model, token_ids, len(sample.prompt_ids), draft_length),
                sample.answer_ids,
                of_answer,
            )
            acceptance.add_answer(of_answer)
        on_sample()
    return acceptance


def by_source(samples: Iterable[Sample]) -> dict[tuple[str, float], list[Sample]]:
    """Samples by source and temperature."""
    groups: dict[tuple[str, float], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.source, sample.temperature), []).append(sample)
    return groups
