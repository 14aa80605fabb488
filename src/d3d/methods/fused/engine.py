"""Fused mode: one pass verifies a draft and makes the next.

The drafter must be the target with deltas at slots only, so the pass's clean rows give the verdict.
Slots follow each of them, so that the next draft is ready however many tokens are kept. Slots have
not seen the bonus token; they predict what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.engine.clock import Span
from d3d.engine.drafter import Draft, Drafter, Target
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.errors import InvalidRequest
from d3d.methods.estimate import Survival
from d3d.methods.fused.offers import CopiedOffers, Offer
from d3d.methods.fused.plan import NO_SLOTS, PRIOR_KEPT, PRIOR_ROUNDS, RowPlan, plan_rows
from d3d.methods.serial.denoise import last_tokens, not_finite
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import clean_rows_are_of
from d3d.model.kv_cache import KVCache, Window
from d3d.model.layout import MASKED, PassLayout, SlotGroup, lay_out
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget

LONGEST_COPY = 8
"""Maximum length of a draft that is copied from the text, or continued by a copy."""

FREE_ROUNDS = 16
"""Interval, in rounds, at which rows are free of cost. Otherwise tokens that were never kept would
never be drafted again."""


def longest_fused_draft(longest_group: int, lookup: int) -> int:
    """Maximum draft length: what a group of slots can draft (a block's first token is the target's
    own here), or the longest copy."""
    return max(longest_group, LONGEST_COPY if lookup else 0)


def check_fused(model: DrafterModel, base: Transformer) -> None:
    """Raise InvalidRequest if the drafter's clean rows are not those of `base`, or its slots
    predict what the target chooses."""
    check_fused_config(model.config, clean_rows_are_targets=clean_rows_are_of(model, base))


def check_fused_config(config: DrafterConfig, *, clean_rows_are_targets: bool) -> None:
    """Check a drafter's config as `check_fused` does, without the weights."""
    if not clean_rows_are_targets:
        raise InvalidRequest(
            "method: fused needs a drafter that is the target itself with deltas at slots only, "
            "whose clean rows are the target's; with this one, serial and plain work"
        )
    if config.anchor_slot:
        raise InvalidRequest(
            "method: fused drafts behind rows whose bonus token it does not know yet, and this "
            "drafter's blocks begin with that token (anchor_slot); with this one, serial, async "
            "and plain work"
        )
    if config.alignment != "next" or config.block_size < 2:
        raise InvalidRequest(
            "method: fused needs a drafter of alignment next with blocks of two or more, whose "
            "slots predict what follows the bonus token; with this one, serial and plain work"
        )


class DraftedGroup(NamedTuple):
    """States and logits of the slots that follow one row."""

    states: Tensor
    """[size, hidden_size]."""
    logits: Tensor
    """[size, vocab_size]."""


@dataclass
class _FusedRequest:
    """State of a request in fused mode."""

    survival: Survival
    copies: CopiedOffers | None
    groups: list[DraftedGroup] = field(default_factory=list)
    """Groups drafted by the last pass: after its first row, its second, and so on."""
    plan: RowPlan = NO_SLOTS
    """Rows of the next pass."""
    last: _LastPass | None = None
    faulty: bool = False
    """True if its slots have spoilt a pass."""


class _LastPass(NamedTuple):
    """Plan of a request's last pass."""

    anchor: int
    """Position of its anchor in the text."""
    num_drafted: int
    of_slots: int
    """Number of first drafted tokens that came from slots; the rest was copied."""
    looked_up: bool
    """True if all came from the text itself."""
    number: int = 0
    """Number of rounds before it."""


class FusedTarget(Target, Drafter):
    """Target and drafter in one: `propose` picks the group that fits the verdict and plans the pass
    that `verify` runs."""

    def __init__(
        self,
        native: NativeTarget,
        model: DrafterModel,
        draft_length: int,
        rows: int,
        *,
        lookup: int = 0,
        row_price: float = 0.0,
    ) -> None:
        """draft_length: maximum draft length; rows: maximum rows of a pass per request, the
        anchor's included (a batch adds padding); lookup: see `FusedConfig`; row_price: expected
        tokens that justify a row. Raises InvalidRequest as `check_fused`."""
        check_fused(model, native.model)
        longest_group = model.config.longest_slot_draft
        self.native, self.model = native, model
        self.max_draft_length = min(draft_length, longest_fused_draft(longest_group, lookup))
        self.longest_group = min(draft_length, longest_group)
        self.rows, self.lookup, self.row_price = rows, lookup, row_price
        self._members: dict[int, _FusedRequest] = {}

    @property
    def vocab_size(self) -> int:
        return self.native.vocab_size

    @property
    def max_length(self) -> int:
        return self.native.max_length

    @property
    def device(self) -> torch.device:
        return self.native.device

    @property
    def num_held(self) -> int:
        return len(self._members) + self.native.num_held

    def cache_for(self, model: DrafterModel) -> KVCache | None:
        return self.native.cache_for(model)

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        return self.native.prefill(requests, num_rows)

    def rewind(self, requests: Sequence[Request]) -> None:
        self.native.rewind(requests)

    def verify_again(self, request: Request) -> LogitRows:
        if member := self._members.get(request.id):
            member.groups = []
        return self.native.verify_again(request)

    def diagnose(self, request: Request) -> str:
        return self.native.diagnose(request)

    def pass_span(self) -> Span | None:
        return self.native.pass_span()

    def suspend(self, request: Request) -> None:
        self._members.pop(request.id, None)

    def end(self, request: Request) -> None:
        self.suspend(request)
        self.native.end(request)

    # Drafter

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._propose(request, self._member(request)) for request in requests]

    def set_plan(self, request: Request, plan: RowPlan) -> None:
        """Set the rows of a request's next pass, beside its anchor and its draft."""
        self._member(request).plan = plan

    def plan_of(self, request: Request) -> RowPlan:
        """Planned rows of a request's next pass."""
        return self._member(request).plan

    def _member(self, request: Request) -> _FusedRequest:
        if request.id not in self._members:
            copies = CopiedOffers(self.lookup, self.max_draft_length) if self.lookup else None
            survival = Survival(self.longest_group, PRIOR_KEPT, PRIOR_ROUNDS)
            self._members[request.id] = _FusedRequest(survival, copies)
        return self._members[request.id]

    def _propose(self, request: Request, member: _FusedRequest) -> Draft:
        if member.faulty:
            return not_finite(len(request))
        offer = Offer((), ())
        if group := self._group(request, member):
            offer = self._choose(group, request)
            if not all(0 <= confidence <= 1 for confidence in offer.confidences):
                return not_finite(len(request))
        of_slots, length = len(offer.tokens), request.draft_room(self.max_draft_length)
        if copies := member.copies:
            most = min(length, self.rows - 1)
            offers = copies.continued(request.token_ids, offer), copies.offer(request.token_ids)
            offer = max(offers, key=lambda each: each.promise(most))
        room = self.max_length - len(request)
        # a draft cut short marks the end of the answer
        remaining = min(length, room) if length < self.max_draft_length else room
        number = 0 if member.last is None else member.last.number + 1
        price = self.row_price if number % FREE_ROUNDS else 0.0
        shares = member.survival.shares
        plan = plan_rows(offer.confidences[:length], shares, self.rows, remaining, price)
        member.plan = plan
        of_slots = 0 if offer.looked_up else min(of_slots, plan.num_drafted)
        anchor = len(request) - 1
        member.last = _LastPass(anchor, plan.num_drafted, of_slots, offer.looked_up, number)
        tokens, copied = offer.tokens[: plan.num_drafted], offer.looked_up and plan.num_drafted > 0
        return Draft(tokens, looked_up=copied, num_slots=sum(plan.groups))

    def _group(self, request: Request, member: _FusedRequest) -> DraftedGroup | None:
        """Slots after the last kept token, after learning from the verdict; None if there are
        none."""
        last = member.last or _LastPass(len(request) - 2, 0, 0, looked_up=False)
        num_accepted = len(request) - last.anchor - 2
        if last.looked_up and member.copies is not None:
            member.copies.survival.add(last.num_drafted, num_accepted)
        else:
            member.survival.add(last.of_slots, num_accepted)
            if last.of_slots < last.num_drafted and member.copies is not None:
                member.copies.add_continued(last.of_slots, last.num_drafted, num_accepted)
        groups = member.groups
        is_there = num_accepted < len(groups) and len(groups[num_accepted].states)
        return groups[num_accepted] if is_there else None

    def _choose(self, group: DraftedGroup, request: Request) -> Offer:
        """Chosen tokens, and the drafter's probability of each."""
        states = group.states[None]
        logits = self.model.without_mask_token(group.logits[None], self.vocab_size)
        last = torch.tensor([last_tokens(request.token_ids)], device=states.device)
        chosen = self.model.choose(states, logits, last, own_rows=0, logprobs=True)
        assert chosen.logprobs is not None
        probabilities = chosen.logprobs[0].exp().tolist()
        return Offer(tuple(chosen.token_ids[0].tolist()), tuple(probabilities))

    # Target

    @torch.inference_mode()
    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        plans = []
        for request, draft in zip(requests, drafts, strict=True):
            member = self._members.get(request.id)
            # fewer rows than planned if a draft was dropped on its way
            groups = () if member is None else member.plan.groups[: len(draft.token_ids) + 1]
            plans.append(groups)
            if member is not None:
                member.plan, member.groups = NO_SLOTS, []
        if not any(map(sum, plans)):
            return self.native.verify(requests, drafts)
        before = [self.native.cache.length(request.id) for request in requests]
        results = self._pass(requests, drafts, plans)
        finite = torch.isfinite(torch.stack([rows.raw.amax() for rows in results])).tolist()
        if all(finite):
            return results
        # slots that are not finite still reach clean rows, though hidden: 0 * inf. The target's
        # answer is computed without them.
        for request, length, is_finite in zip(requests, before, finite, strict=True):
            if member := self._members.get(request.id):
                member.faulty |= not is_finite
                member.groups = []
            self.native.cache.crop(request.id, length)
        for sequence_id in (
            self.native.cache.ids
        ):  # the pass also appended slots after sequences that are not in it
            self.native.cache.clear_behind(sequence_id)
        return self.native.verify(requests, drafts)

    def _pass(
        self,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        plans: Sequence[tuple[int, ...]],
    ) -> list[LogitRows]:
        window = self.native.cache.window([request.id for request in requests])
        place = {sequence_id: row for row, sequence_id in enumerate(window.ids)}
        trunks: list[list[int]] = [[0] for _ in window.ids]  # any token for sequences between them
        sizes: list[tuple[int, ...]] = [() for _ in window.ids]
        for request, draft, plan in zip(requests, drafts, plans, strict=True):
            trunks[place[request.id]] = [request.anchor, *draft.token_ids]
            sizes[place[request.id]] = plan
        layout = fused_layout(self.model.config, window.lengths, trunks, sizes)
        hidden, logits = self._run(layout, window)
        rows = []
        kept = [0] * len(window.ids)
        for request, draft, plan in zip(requests, drafts, plans, strict=True):
            row, num_slots = place[request.id], sum(plan)
            kept[row] = len(draft.token_ids) + 1
            states = hidden[row, layout.width : layout.width + num_slots].split(plan)
            scores = logits[row, layout.width : layout.width + num_slots].split(plan)
            if member := self._members.get(request.id):
                pairs = zip(states, scores, strict=True)
                member.groups = [DraftedGroup(*pair) for pair in pairs]
            rows.append(LogitRows(logits[row, : kept[row], : self.vocab_size]))
        window.advance(kept)
        return rows

    def _run(self, layout: PassLayout, window: Window) -> tuple[Tensor, Tensor]:
        """Run a pass; returns states and logits of all rows."""
        with self.native.timed():
            positions = layout.rows.position
            hidden = self.model.hidden(
                layout.token_ids, positions, layout.mask, window, layout.num_slots
            )
            return hidden, self.model.transformer.logits(hidden)


def fused_layout(
    config: DrafterConfig,
    cached: Sequence[int],
    trunks: Sequence[list[int]],
    sizes: Sequence[tuple[int, ...]],
) -> PassLayout:
    """Layout of a fused pass. trunks[b]: anchor and drafted tokens of sequence b; sizes[b][i]:
    number of slots that follow its row i, with fewer entries than rows if the last rows have
    none."""
    groups = [
        [
            SlotGroup(start + row, start + row + 1, [MASKED] * size)
            for row, size in enumerate(each)
            if size
        ]
        for start, each in zip(cached, sizes, strict=True)
    ]
    return lay_out(config.block_attention, cached, trunks, groups)
