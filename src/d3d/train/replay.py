"""Acceptance and hit rate without the target and without a clock: replay rounds of drafting on
answers that the target has written.

A drafter's proposal depends only on the committed prefix, so wide passes compute the blocks at all
anchors of an answer, and the rounds are walked afterwards. A sampled answer is replayed like a
greedy one: a drafted token is kept while it equals the target's own sample
(`d3d.engine.sampling`), and the recorded tokens are these samples."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.engine.drafter import NO_DRAFT
from d3d.engine.sampling import common_prefix
from d3d.errors import InvalidRequest, NotFinite
from d3d.methods.async_.outcomes import Outcome, within_budget
from d3d.methods.async_.preparer import Preparer, PreparingSession
from d3d.model.choice import SEEN_TOKENS
from d3d.model.drafter import DrafterModel
from d3d.train.acceptance import BUDGETS, HitCounts, RoundCounts
from d3d.train.blocks import clean_pass, hang_blocks, slot_pass
from d3d.train.corpus import Sample

SLOTS_A_PASS = 1024


class Predicted(NamedTuple):
    """The drafter's proposals at each anchor."""

    tokens: Tensor
    """int64 [anchors, draft_length]."""
    ranks: Tensor | None = None
    """int64 [anchors, draft_length + 1], or a column less if the block has no slot for the last:
    number of tokens, the drafted one left out, that the drafter holds likelier than the text's own
    token there. Meaningless past the text's end."""


@torch.no_grad()
def predict_blocks(
    model: DrafterModel, token_ids: Tensor, first: int, draft_length: int, *, recall: bool = False
) -> Predicted:
    """The drafter's block at each anchor first..len - 2 of a text; `recall` adds ranks.

    token_ids: int64 [length]; draft_length: at most the drafter's block_size."""
    config, (hidden, cache) = model.config, clean_pass(model, token_ids)
    one_more = recall and draft_length < config.block_size
    # if slots see each other, one more would change the others, so the last guess needs its own
    # pass
    together = one_more and config.block_attention == "causal"

    def logits_at(anchors: Tensor, length: int) -> Tensor:
        """Float32 [anchors, length, vocab_size], of tokens chosen as in drafting."""
        rows = [hidden[anchors][:, None]] if config.own_rows else []
        if num_slots := config.num_slots(length):
            slots = slot_pass(model, cache, hang_blocks(token_ids, anchors, num_slots, config))
            rows.append(slots.view(len(anchors), num_slots, -1))
        states = torch.cat(rows, dim=1)
        logits = model.draft_logits(states, model.transformer.config.num_tokens)
        last = _last_tokens(token_ids, anchors)
        model.choose_in_turn(states, logits, last, own_rows=config.own_rows)
        return logits

    tokens, ranks = [], []
    anchors = torch.arange(first, len(token_ids) - 1, device=token_ids.device)
    slots = max(1, config.num_slots(draft_length + recall))
    for chunk in anchors.split(max(1, SLOTS_A_PASS // slots)):
        logits = logits_at(chunk, draft_length + together)
        best = logits[:, :draft_length].max(-1)
        _check_finite(best.values, chunk)
        drafted = best.indices
        tokens.append(drafted)
        if recall:
            columns = [_ranks(logits, token_ids, chunk, 0, drafted)]
            if one_more and not together:
                last = logits_at(chunk, draft_length + 1)[:, draft_length:]
                columns.append(_ranks(last, token_ids, chunk, draft_length, drafted[:, :0]))
            ranks.append(torch.cat(columns, dim=1))
    return Predicted(torch.cat(tokens), torch.cat(ranks) if ranks else None)


def _last_tokens(token_ids: Tensor, places: Tensor) -> Tensor:
    """The tokens at `places` and before, latest first, int64 [places, SEEN_TOKENS]."""
    return torch.stack(
        [token_ids[(places - back).clamp(min=0)] for back in range(SEEN_TOKENS)], dim=1
    )


@torch.no_grad()
def fused_blocks(
    model: DrafterModel, token_ids: Tensor, first: int, draft_length: int
) -> list[list[int]]:
    """Blocks of fused mode at each anchor first..len - 2 of a text (`d3d.methods.fused`): the
    slots hang at the token before the anchor, and only the previous-token head sees the anchor's
    id. Empty at `first`, since the prefill prepares no draft."""
    _, cache = clean_pass(model, token_ids)
    vocab_size = model.transformer.config.num_tokens
    blocks: list[list[int]] = [[]]
    places = torch.arange(first, len(token_ids) - 2, device=token_ids.device)
    for chunk in places.split(max(1, SLOTS_A_PASS // draft_length)) if len(places) else ():
        batch = hang_blocks(token_ids, chunk, draft_length, model.config)
        slots = slot_pass(model, cache, batch).view(len(chunk), draft_length, -1)
        logits = model.without_mask_token(model.transformer.logits(slots), vocab_size)
        last = _last_tokens(token_ids, chunk + 1)
        chosen = model.choose(slots, logits, last, own_rows=0)
        _check_finite(chosen.best, chunk + 1)
        blocks += chosen.token_ids.tolist()
    return blocks


def _check_finite(best: Tensor, anchors: Tensor) -> None:
    """best: the largest logits of each anchor's rows, [anchors, rows]. Raises NotFinite."""
    bad = ~best.isfinite().all(-1)
    if bool(bad.any()):
        position = int(anchors[bad][0]) + 1
        raise NotFinite("the drafter's logits are", "a replayed draft pass", position)


def _ranks(
    logits: Tensor, token_ids: Tensor, anchors: Tensor, start: int, drafted: Tensor
) -> Tensor:
    """Ranks of the text's tokens in rows start, start + 1, ... of their blocks, [anchors, rows],
    without the `drafted` ones, [anchors, <= rows]. Among equals the lowest id is first, as in
    argmax."""
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
    draft_length: int,
    ranks: list[list[int]] | None = None,
    *,
    is_cut: bool = False,
) -> RoundCounts:
    """Rounds of one answer. `blocks[i]` is the block whose anchor is answer token i, `ranks[i]` the
    ranks of the answer's tokens there. is_cut: the answer ended at a limit, so that its last token
    was not drafted (`Request.draft_room`)."""
    counts, anchor, last = RoundCounts(draft_length), 0, len(answer_ids) - 1
    while anchor < last:
        truth = answer_ids[anchor + 1 :]
        room = len(truth) - is_cut
        num_accepted = common_prefix(blocks[anchor], truth[:room])
        committed = min(num_accepted + 1, len(truth))
        counts.add_round(num_accepted, committed)
        if ranks is not None and num_accepted < min(room, len(ranks[anchor])):
            counts.add_bonus(num_accepted, ranks[anchor][num_accepted])
        anchor += committed
    return counts


def replay(
    model: DrafterModel,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
    *,
    ends: Container[int] | None = None,
    recall: bool = False,
) -> RoundCounts:
    """Rounds of serial drafting on recorded answers; an answer's first token belongs to no round.
    ends: tokens that end an answer, all others having been cut at a limit; None if none was.
    `recall` fills `bonus_recall` and takes about a third more time."""

    def rounds_of(sample: Sample) -> RoundCounts:
        token_ids = torch.tensor(sample.token_ids, device=model.transformer.device)
        first = len(sample.prompt_ids)
        tokens, ranks = predict_blocks(model, token_ids, first, draft_length, recall=recall)
        ranked = None if ranks is None else ranks.tolist()
        is_cut = _is_cut(sample, ends)
        return walk(tokens.tolist(), sample.answer_ids, draft_length, ranked, is_cut=is_cut)

    return _over_answers(samples, draft_length, rounds_of, on_sample)


def replay_fused(
    model: DrafterModel,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
    *,
    ends: Container[int] | None = None,
) -> RoundCounts:
    """Rounds of fused mode with slots behind every row: the acceptance length is that of passes
    whose rows cost nothing, an upper bound. ends: see `replay`."""

    def rounds_of(sample: Sample) -> RoundCounts:
        token_ids = torch.tensor(sample.token_ids, device=model.transformer.device)
        blocks = fused_blocks(model, token_ids, len(sample.prompt_ids), draft_length)
        return walk(blocks, sample.answer_ids, draft_length, is_cut=_is_cut(sample, ends))

    return _over_answers(samples, draft_length, rounds_of, on_sample)


def replay_outcomes(
    preparer: Preparer,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
    *,
    ends: Container[int] | None = None,
    budgets: tuple[int, ...] = BUDGETS,
) -> tuple[RoundCounts, HitCounts]:
    """Rounds of async mode on recorded answers, as if every successor came in time. ends: see
    `replay`.

    Does a draft worker's work in its own order: draft after the committed tokens, list the likely
    outcomes, and look up the recorded verdict among them. Outcomes come best first, so one list for
    the largest budget serves all smaller ones."""
    hits = HitCounts(draft_length, budgets)

    def rounds_of(sample: Sample) -> RoundCounts:
        session = preparer.open(max(budgets))
        return _walk_outcomes(session, sample, draft_length, hits, is_cut=_is_cut(sample, ends))

    return _over_answers(samples, draft_length, rounds_of, on_sample), hits


def _walk_outcomes(
    session: PreparingSession,
    sample: Sample,
    draft_length: int,
    hits: HitCounts,
    *,
    is_cut: bool,
) -> RoundCounts:
    counts = RoundCounts(draft_length)
    token_ids, anchor = sample.token_ids, len(sample.prompt_ids)
    while anchor < len(token_ids) - 1:
        text, truth = token_ids[: anchor + 1], token_ids[anchor + 1 :]
        room = min(draft_length, len(truth) - 1) if is_cut else draft_length
        made = session.draft(text, room) if room else NO_DRAFT
        if made.fault is not None:
            raise InvalidRequest(f"the drafter can't be replayed: {made.fault}")
        draft = made.token_ids
        num_accepted = common_prefix(draft, truth)
        committed = min(num_accepted + 1, len(truth))
        counts.add_round(num_accepted, committed)
        anchor += committed
        if anchor < len(token_ids) - 1:
            outcomes = session.likely_outcomes(text, draft, max(hits.sizes))
            verdict = Outcome(num_accepted, token_ids[anchor])
            hits.add_round(num_accepted, partial(_is_listed, verdict, outcomes, len(draft)))
    return counts


def _is_cut(sample: Sample, ends: Container[int] | None) -> bool:
    return ends is not None and sample.answer_ids[-1] not in ends


def _is_listed(verdict: Outcome, outcomes: list[Outcome], drafted: int, budget: int) -> bool:
    return verdict in within_budget(outcomes, budget, drafted)


def _over_answers(
    samples: Iterable[Sample],
    draft_length: int,
    rounds_of: Callable[[Sample], RoundCounts],
    on_sample: Callable[[], None],
) -> RoundCounts:
    counts = RoundCounts(draft_length)
    for sample in samples:
        if len(sample.answer_ids) > 1:
            counts.add_answer(rounds_of(sample))
        on_sample()
    return counts


def by_source(samples: Iterable[Sample]) -> dict[tuple[str, float], list[Sample]]:
    """Samples by source and temperature."""
    groups: dict[tuple[str, float], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.source, sample.temperature), []).append(sample)
    return groups
