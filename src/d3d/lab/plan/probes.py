"""One timed pass at a time, by the code that decodes: what a round does with an engine and a
drafter, without the rounds between."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from d3d.api import Model
from d3d.core.protocols import DraftSession, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.drafting.fused import FusedSession
from d3d.engine.sampling import sample_match
from d3d.errors import InvalidRequest
from d3d.hub.open_model import OpenModel
from d3d.lab.plan.handover import handover_seconds
from d3d.lab.plan.profile import Kind
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH
from d3d.methods.fused.engine import FusedEngine
from d3d.target.native import NativeEngine

CATCH_UP = 3
"""Committed tokens that a drafter with a cache of its own reads in the pass that drafts."""

HANDOVERS = 20
GENERATED = 24
"""Tokens of an answer from which the rest of a round, or async mode, is read off."""

GREEDY = SamplingParams()


class Cell(NamedTuple):
    """What is timed: see `d3d.lab.plan.profile.Point`."""

    kind: Kind
    size: int
    draft_length: int
    context: int


@dataclass
class _Fused:
    """A fused generation; it goes on by a token a pass, so its context grows with its samples."""

    session: FusedSession
    drafts: DraftSession
    sequence: Sequence


@dataclass
class Probes:
    """Of one model. Sessions are opened when they are first wanted, and kept."""

    model: Model
    placement: str
    outcomes: int
    """The most that a packed pass may have."""
    longest: int
    """Most tokens of a draft."""
    passes: int
    """Most passes that one session will serve."""
    _targets: dict[int, TargetSession] = field(default_factory=dict)
    _drafts: dict[int, tuple[DraftSession, bool]] = field(default_factory=dict)
    _packed: dict[int, PackedSession] = field(default_factory=dict)
    _fused: dict[tuple[int, int], _Fused] = field(default_factory=dict)

    def seconds(self, cell: Cell) -> list[float]:
        """Time a cell once: one sample of a pass, several of what is read off a generation."""
        if cell.kind == "verify":
            return [self._verify(cell)]
        if cell.kind == "draft":
            return [self._draft(cell)]
        if cell.kind == "packed":
            return [self._prepare(cell)]
        if cell.kind == "fused":
            return [self._fused_pass(cell)]
        if cell.kind == "switch":
            return handover_seconds(self.placement, HANDOVERS)
        if cell.kind == "rest":
            return [self._rest(cell)]
        return self._beside(cell)

    def _text(self, context: int) -> list[int]:
        """Any tokens that both models know will do: what a pass costs does not depend on them."""
        rng, known = random.Random(context), self.model.target.vocab_size
        if self.model.drafter is not None:
            known = min(known, self.model.drafter.model.transformer.config.vocab_size)
        return [rng.randrange(known) for _ in range(context)]

    def _target(self, context: int) -> TargetSession:
        """Its cache holds the text but for the anchor, as between rounds."""
        if context not in self._targets:
            session = self.model.engine.open(1, context + self.longest + 2)
            session.forward([self._text(context)[:-1]], last_only=True)
            self._targets[context] = session
        return self._targets[context]

    def _verify(self, cell: Cell) -> float:
        session, text = self._target(cell.context), self._text(cell.context)
        sequence, drafted = Sequence(text, GREEDY), text[: cell.size - 1]
        if (
            cell.size == 1
        ):  # plain rounds follow each other, and find caches warmer than a pass behind one of another kind
            session.forward([[text[-1]]])
            session.crop([cell.context - 1])
        started = time.perf_counter()
        (logits,) = session.forward([[text[-1], *drafted]])
        sample_match(logits, drafted, sequence, frozenset())
        session.crop([cell.context - 1])
        return time.perf_counter() - started

    def _draft(self, cell: Cell) -> float:
        text = self._text(cell.context)
        if cell.context not in self._drafts:
            assert self.model.drafter is not None
            beside = self.model.drafter.open_beside(self._target(cell.context))
            self._drafts[cell.context] = (
                beside or self.model.drafter.open(1, cell.context + self.longest),
                beside is None,
            )
        session, own_cache = self._drafts[cell.context]
        if own_cache:
            session.draft([Sequence(text[: max(1, cell.context - CATCH_UP)], GREEDY)], [1])
        started = time.perf_counter()
        session.draft([Sequence(text, GREEDY)], [cell.size])
        return time.perf_counter() - started

    def _prepare(self, cell: Cell) -> float:
        text, width = self._text(cell.context), cell.draft_length
        if cell.context not in self._packed:
            assert self.model.drafter is not None
            drafter = PackedDrafter(self.model.drafter.model, self.model.engine.vocab_size)
            self._packed[cell.context] = drafter.open(
                cell.context + self.longest + 1, self.outcomes
            )
        session = self._packed[cell.context]
        block = session.draft(text, width)  # whose places the outcomes are guessed from
        started = time.perf_counter()
        outcomes = session.likely_outcomes(text, block.token_ids, cell.size)
        session.prepare(text, block.token_ids, outcomes, width)
        return time.perf_counter() - started

    def _fused_pass(self, cell: Cell) -> float:
        key = (cell.context, cell.size)
        if key not in self._fused:
            self._fused[key] = self._open_fused(*key)
        one = self._fused[key]
        started = time.perf_counter()
        (block,) = one.drafts.draft([one.sequence], [self.longest])
        (logits,) = one.session.forward([[one.sequence.anchor, *block.token_ids]])
        verdict = sample_match(logits, block.token_ids, one.sequence, frozenset())
        one.sequence.commit(
            verdict.token_ids[-1:] if not verdict.num_accepted else verdict.token_ids
        )
        one.session.crop([len(one.sequence) - 1])
        return time.perf_counter() - started

    def _open_fused(self, context: int, rows: int) -> _Fused:
        assert self.model.drafter is not None
        width = min(DEFAULT_FUSED_DRAFT_LENGTH, self.model.drafter.model.config.longest_slot_draft)
        engine = FusedEngine(native(self.model)[1], self.model.drafter.model, width, rows)
        session = engine.open(1, context + (self.passes + 2) * (width + 1))
        sequence = Sequence(self._text(context), GREEDY)
        session.forward([sequence.token_ids[:-1]], last_only=True)
        drafts = engine.drafter.open_beside(session)
        assert drafts is not None
        return _Fused(session, drafts, sequence)

    def _rest(self, cell: Cell) -> float:
        result = self.model.generate(
            self._text(cell.context), mode="plain", max_tokens=GENERATED, ignore_eos=True
        )
        assert result.timing.tpot_s is not None
        total = result.timing.tpot_s * (result.usage.completion_tokens - 1)
        return max(0.0, total - sum(one.t_draft + one.t_verify for one in result.rounds)) / len(
            result.rounds
        )

    def _beside(self, cell: Cell) -> list[float]:
        """In async mode at its default budget: verifications, preparations, drafts that a miss
        asked for, or an answer's first draft."""
        result = self.model.generate(
            self._text(cell.context),
            mode="async",
            draft_length=cell.draft_length,
            outcomes=DEFAULT_OUTCOMES,
            placement=self.placement,
            max_tokens=GENERATED,
            ignore_eos=True,
        )
        if cell.kind == "async_verify":
            return [one.t_verify for one in result.rounds if one.draft_length == cell.draft_length]
        if cell.kind == "async_read":  # nothing where patience was at an end before
            first = result.rounds[0]
            return (
                [end - start for start, end in first.preparation.passes]
                if first.draft_length and first.preparation
                else []
            )
        prepared = [
            one.preparation
            for one in result.rounds
            if one.preparation is not None and one.preparation.readiness != "unprepared"
        ]
        of_kind = (
            slice(0, 1) if cell.kind == "async_packed" else slice(1, 2)
        )  # the second is a draft that a miss asked for
        return [end - start for one in prepared for start, end in one.passes[of_kind]]


def native(model: Model) -> tuple[OpenModel, NativeEngine]:
    """Target and engine of d3d's own decoder. Raises InvalidRequest for another one."""
    if not isinstance(model.target, OpenModel) or not isinstance(model.engine, NativeEngine):
        raise InvalidRequest(
            "profile: passes of d3d's own engine are measured; load the model without another one"
        )
    return model.target, model.engine


def can_fuse(model: Model) -> bool:
    """Whether fused mode works with this drafter."""
    if model.drafter is None:
        return False
    try:
        FusedEngine(native(model)[1], model.drafter.model, 1, 2)
    except InvalidRequest:
        return False
    return True
