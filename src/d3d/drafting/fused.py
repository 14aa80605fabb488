"""Fused mode: one pass verifies a draft and makes the next, where the drafter is the target with
deltas at slots.

Clean rows of the pass are the target's own, so what they say is the verdict. Behind each of them
hang slots, so that the next draft is there whatever number of tokens is kept. They never saw the
bonus token; they predict what follows it."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.core.protocols import DraftSession, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.block_drafter import NOT_FINITE, last_tokens
from d3d.drafting.fused_layout import fused_layout
from d3d.drafting.fused_offers import LookedUp, Offer
from d3d.drafting.fused_plan import FusedPlan, Survival, plan_rows
from d3d.errors import InvalidRequest
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import clean_rows_are_of
from d3d.model.transformer import Transformer
from d3d.target.native import NativeEngine, NativeSession

NO_SLOTS = FusedPlan(0, ())

CPU_ROW_PRICE = 0.05
"""Tokens that the time of one more row of a pass is worth on a CPU: a row takes 0.03 to 0.05 plain
steps (docs/log.md)."""

LONGEST_COPY = 8
"""Most tokens of a draft that the text brings or goes on with."""

FREE_ROUNDS = 16
"""In one round of so many rows cost nothing: what has never been kept would else never be drafted
again, and might be kept by now."""


def longest_fused_draft(longest_group: int, lookup: int) -> int:
    """Most tokens a draft may have: what a group of slots can draft (a block's first is the
    target's own here), or copies come to."""
    return max(longest_group, LONGEST_COPY if lookup else 0)


def row_price(device: torch.device) -> float:
    """Tokens that a row must promise to be worth its time; 0 where rows are nearly free."""
    return CPU_ROW_PRICE if device.type == "cpu" else 0.0


@dataclass(frozen=True)
class FusedEngine:
    """The target's engine and its drafter in one. The loop takes it as the target, with its
    `drafter`."""

    engine: NativeEngine
    model: DrafterModel
    draft_length: int
    """Most tokens a draft."""
    rows: int
    """Most rows of a pass for each sequence, the anchor's included; a batch adds padding."""
    lookup: int = 0
    """Where the text's last tokens, this many or more, stand earlier in it, what followed them
    there is a draft as well; 0: never."""
    row_price: float = 0.0
    """Tokens that a row must promise to be computed."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest as `check_fused`."""
        check_fused(self.model, self.engine.model)

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    @property
    def drafter(self) -> FusedDrafter:
        return FusedDrafter(self)

    @property
    def longest_draft(self) -> int:
        """Most tokens a draft may have."""
        return longest_fused_draft(self.model.config.longest_slot_draft, self.lookup)

    @property
    def longest_group(self) -> int:
        """Most slots behind a row."""
        return min(self.draft_length, self.model.config.longest_slot_draft)

    def open(self, num_sequences: int, capacity: int) -> FusedSession:
        # a batch is padded to its most clean rows and its most slots; no plan has more than a full
        # group behind every row
        rows = min(self.rows, (self.draft_length + 1) ** 2)
        return FusedSession(self.model, self.engine.open(num_sequences, capacity + 2 * rows))


@dataclass(frozen=True)
class FusedDrafter:
    """The drafting half of a `FusedEngine`; works beside its sessions only."""

    engine: FusedEngine

    @property
    def block_size(self) -> int:
        return self.engine.longest_draft

    def open(self, num_sequences: int, capacity: int) -> DraftSession:  # noqa: ARG002 - the protocol's
        raise ValueError(
            "a fused drafter drafts in the target's own passes: the loop's target must be its FusedEngine"
        )

    def open_beside(self, target: TargetSession) -> DraftSession | None:
        return FusedDrafts(self.engine, target) if isinstance(target, FusedSession) else None


def check_fused(model: DrafterModel, base: Transformer) -> None:
    """Raises InvalidRequest where the drafter's clean rows are not those of `base`, or its slots
    predict what the target chooses."""
    check_fused_config(model.config, clean_rows_are_targets=clean_rows_are_of(model, base))


def check_fused_config(config: DrafterConfig, *, clean_rows_are_targets: bool) -> None:
    """As `check_fused`, without the weights."""
    if not clean_rows_are_targets:
        raise InvalidRequest(
            "mode: fused needs a drafter that is the target itself with deltas at slots only, whose clean rows are the target's; "
            "with this one, serial and plain work"
        )
    if config.anchor_slot:
        raise InvalidRequest(
            "mode: fused drafts behind rows whose bonus token it does not know yet, and this drafter's blocks begin with that token "
            "(anchor_slot); with this one, serial, async and plain work"
        )
    if config.alignment != "next" or config.block_size < 2:
        raise InvalidRequest(
            "mode: fused needs a drafter of alignment next with blocks of two or more, whose slots predict what follows the bonus "
            "token; with this one, serial and plain work"
        )


class Group(NamedTuple):
    """Slots that hang at one row."""

    states: Tensor
    """[size, hidden_size]."""
    logits: Tensor
    """[size, vocab_size]."""


class FusedSession:
    """The target's session, with slots in every pass that verifies; see `TargetSession`."""

    def __init__(self, model: DrafterModel, session: NativeSession) -> None:
        self._model = model
        self._session = session
        self.plans: dict[int, FusedPlan] = {}
        """What the next pass is to hold, by sequence id."""
        self.groups: dict[int, list[Group]] = {}
        """What the last pass has drafted, by sequence id: behind its first row, its second, and so
        on."""
        self.faulty: set[int] = set()
        """Ids of sequences whose slots have spoiled a pass."""

    @property
    def native(self) -> NativeSession:
        """The session underneath; a pass without a plan is one of its own."""
        return self._session

    @property
    def lengths(self) -> list[int]:
        return self._session.lengths

    @property
    def sequence_ids(self) -> list[int]:
        return self._session.cache.sequence_ids

    def crop(self, lengths: list[int]) -> None:
        self._session.crop(lengths)

    def keep(self, rows: list[int]) -> None:
        self._session.keep(rows)

    def join(self, count: int) -> None:
        self._session.join(count)

    @torch.inference_mode()
    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        if last_only:  # prompts; the drafts of those that are on their way stay
            return self._session.forward(token_ids, last_only=True)
        plans, self.plans, self.groups = self.plans, {}, {}
        rows = zip(
            self.sequence_ids, token_ids, strict=True
        )  # fewer than planned where a draft was dropped on its way
        planned = [plans.get(sequence_id, NO_SLOTS).groups[: len(ids)] for sequence_id, ids in rows]
        if not any(map(sum, planned)):
            return self._session.forward(token_ids)
        before = list(self.lengths)
        logits = self._pass(token_ids, planned)
        finite = torch.isfinite(torch.stack([rows.amax() for rows in logits])).tolist()
        if all(finite):
            return logits
        # hidden slots that are not finite still reach clean rows: 0 * inf. The target's answer is
        # computed without them.
        self.faulty.update(
            sequence_id
            for sequence_id, is_finite in zip(self.sequence_ids, finite, strict=True)
            if not is_finite
        )
        self.groups = {}
        self._session.crop(before)
        for row in range(len(before)):
            self._session.cache.clear_behind(row)
        return self._session.forward(token_ids)

    def _pass(self, token_ids: list[list[int]], sizes: list[tuple[int, ...]]) -> list[Tensor]:
        cache, decoder = self._session.cache, self._model.transformer
        layout = fused_layout(self._model.config, cache.lengths, token_ids, sizes)
        hidden = self._model.hidden(
            layout.token_ids, layout.positions, layout.mask, cache, layout.num_slots
        )
        cache.advance([len(ids) for ids in token_ids])
        slots = hidden[:, layout.width :]
        logits, slot_logits = decoder.logits(hidden).split((layout.width, layout.num_slots), dim=1)
        for row, (sequence_id, groups) in enumerate(zip(self.sequence_ids, sizes, strict=True)):
            states = slots[row, : sum(groups)].split(groups)
            scores = slot_logits[row, : sum(groups)].split(groups)
            self.groups[sequence_id] = [Group(*pair) for pair in zip(states, scores, strict=True)]
        return [logits[row, : len(ids)].float() for row, ids in enumerate(token_ids)]


class LastPass(NamedTuple):
    """What a sequence's last pass was."""

    anchor: int
    """Place of its anchor in the text."""
    num_drafted: int
    """Drafted tokens that it verified."""
    of_slots: int
    """How many of them, the first ones, slots have drafted; what follows these was copied."""
    looked_up: bool
    """Whether all came from the text itself."""
    number: int = 0
    """Rounds before it."""


class FusedDrafts:
    """The drafting side of a fused session: picks the group that the verdict calls for, and plans
    the next pass."""

    def __init__(self, engine: FusedEngine, session: FusedSession) -> None:
        self._engine = engine
        self._session = session
        self._sequence_ids: list[int] = []
        self._survival: dict[int, Survival] = {}
        self._looked_up: dict[int, LookedUp] = {}
        """By sequence id; empty where nothing is looked up."""
        self._last: dict[int, LastPass] = {}
        """Of the pass before, by sequence id."""
        self.join(len(session.sequence_ids))

    def keep(self, rows: list[int]) -> None:
        self._sequence_ids = [self._sequence_ids[row] for row in rows]
        self._survival = {
            sequence_id: self._survival[sequence_id] for sequence_id in self._sequence_ids
        }
        self._looked_up = {
            sequence_id: self._looked_up[sequence_id]
            for sequence_id in self._sequence_ids
            if self._engine.lookup
        }
        self._last = {
            sequence_id: self._last[sequence_id]
            for sequence_id in self._sequence_ids
            if sequence_id in self._last
        }

    def join(self, count: int) -> None:
        joined = self._session.sequence_ids[len(self._session.sequence_ids) - count :]
        self._sequence_ids += joined
        length, shortest = self._engine.draft_length, self._engine.lookup
        self._survival |= {
            sequence_id: Survival(self._engine.longest_group) for sequence_id in joined
        }
        self._looked_up |= {
            sequence_id: LookedUp(shortest, length) for sequence_id in joined if shortest
        }

    @torch.inference_mode()
    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        pairs = zip(self._sequence_ids, sequences, lengths, strict=True)
        return [self._draft(*each) for each in pairs]

    def _draft(self, sequence_id: int, sequence: Sequence, length: int) -> DraftBlock:
        if sequence_id in self._session.faulty:
            return DraftBlock(fault=NOT_FINITE)
        offer = Offer((), ())
        if group := self._group(sequence_id, sequence):
            offer = self._choose(group, sequence)
            if not all(0 <= confidence <= 1 for confidence in offer.confidences):
                return DraftBlock(fault=NOT_FINITE)
        of_slots = len(offer.tokens)
        if past := self._looked_up.get(sequence_id):
            most = min(length, self._engine.rows - 1)
            offers = past.gone_on(sequence.token_ids, offer), past.offer(sequence.token_ids)
            offer = max(offers, key=lambda each: each.promise(most))
        room = self._engine.max_length - len(sequence)
        remaining = (
            min(length, room) if length < self._engine.draft_length else room
        )  # a draft cut short says where the answer must end
        number = self._last[sequence_id].number + 1 if sequence_id in self._last else 0
        price = self._engine.row_price if number % FREE_ROUNDS else 0.0
        plan = plan_rows(
            offer.confidences[:length],
            self._survival[sequence_id].shares,
            self._engine.rows,
            remaining,
            price,
        )
        self._session.plans[sequence_id] = plan
        of_slots = 0 if offer.looked_up else min(of_slots, plan.num_drafted)
        self._last[sequence_id] = LastPass(
            len(sequence) - 1, plan.num_drafted, of_slots, offer.looked_up, number
        )
        tokens, copied = offer.tokens[: plan.num_drafted], offer.looked_up and plan.num_drafted > 0
        return DraftBlock(tokens, looked_up=copied, num_slots=sum(plan.groups))

    def _group(self, sequence_id: int, sequence: Sequence) -> Group | None:
        """The slots behind the last token that was kept; None where there are none."""
        last = self._last.get(sequence_id, LastPass(len(sequence) - 2, 0, 0, looked_up=False))
        num_accepted = len(sequence) - last.anchor - 2
        if last.looked_up:
            self._looked_up[sequence_id].survival.add(last.num_drafted, num_accepted)
        else:
            self._survival[sequence_id].add(last.of_slots, num_accepted)
            if last.of_slots < last.num_drafted:
                self._looked_up[sequence_id].add_gone_on(
                    last.of_slots, last.num_drafted, num_accepted
                )
        groups = self._session.groups.get(sequence_id, [])
        return (
            groups[num_accepted]
            if num_accepted < len(groups) and len(groups[num_accepted].states)
            else None
        )

    def _choose(self, group: Group, sequence: Sequence) -> Offer:
        """Tokens, and what the drafter gives each of them."""
        model = self._engine.model
        states, logits = (
            group.states[None],
            model.without_mask_token(group.logits[None], self._engine.vocab_size),
        )
        last = torch.tensor([last_tokens(sequence.token_ids)], device=states.device)
        chosen = model.choose(states, logits, last, own_rows=0, logprobs=True)
        assert chosen.logprobs is not None
        return Offer(tuple(chosen.token_ids[0].tolist()), tuple(chosen.logprobs[0].exp().tolist()))
