"""Times single passes with the code that decodes: one engine, one drafter, no rounds between."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from d3d.acceptance.sample_match import sample_match
from d3d.api import Model
from d3d.core.protocols import DraftSession, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.decoding.modes import DEFAULT_FUSED_DRAFT_LENGTH, DEFAULT_OUTCOMES
from d3d.drafting.fused import FusedEngine, FusedSession
from d3d.drafting.packed_pass import PackedDrafter, PackedSession
from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.hub.open_model import OpenModel
from d3d.lab.plan.handover import handover_seconds
from d3d.lab.plan.profile import Kind
from d3d.target.native import NativeEngine

CATCH_UP = 3
"""Committed tokens that a drafter with its own cache reads in the pass that drafts."""
HANDOVERS = 20
GENERATED = 24
"""Tokens of the answers that `rest` and the passes of async mode are read from."""

GREEDY = SamplingParams()


class TimedPass(NamedTuple):
    """What is timed; see `d3d.lab.plan.profile.Point`."""

    kind: Kind
    size: int
    draft_length: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size or ''}, context {self.context}"


@dataclass
class _Fused:
    """A fused generation. Each pass adds a token, so its context grows with its samples."""

    session: FusedSession
    drafts: DraftSession
    sequence: Sequence


@dataclass
class Probes:
    """Of one model. Sessions are opened on first use, and kept."""

    model: Model
    placement: str
    outcomes: int
    """Most outcomes of a packed pass."""
    longest: int
    """Longest draft, in tokens."""
    passes: int
    """Most passes that one session will serve."""
    _targets: dict[int, TargetSession] = field(default_factory=dict)
    _drafts: dict[int, tuple[DraftSession, bool]] = field(default_factory=dict)
    _packed: dict[int, PackedSession] = field(default_factory=dict)
    _fused: dict[tuple[int, int], _Fused] = field(default_factory=dict)

    def seconds(self, timed: TimedPass) -> list[float]:
        """One sample of a pass, or several if they are read from a generation."""
        if timed.kind == "switch":
            return handover_seconds(self.placement, HANDOVERS)
        if timed.kind.startswith("async_"):
            return self._async_passes(timed)
        once = {
            "verify": self._verify,
            "draft": self._draft,
            "packed": self._prepare,
            "fused": self._fused_pass,
            "rest": self._rest,
        }
        return [once[timed.kind](timed)]

    def _text(self, context: int) -> list[int]:
        """Random tokens that both models know: the cost of a pass does not depend on them."""
        rng, known = random.Random(context), self.model.target.vocab_size
        if self.model.drafter is not None:
            known = min(known, self.model.drafter.model.transformer.config.vocab_size)
        return [rng.randrange(known) for _ in range(context)]

    def _target(self, context: int) -> TargetSession:
        """Its cache holds the text without the anchor, as between rounds."""
        if context not in self._targets:
            session = self.model.engine.open(1, context + self.longest + 2)
            session.forward([self._text(context)[:-1]], last_only=True)
            self._targets[context] = session
        return self._targets[context]

    def _verify(self, timed: TimedPass) -> float:
        session, text = self._target(timed.context), self._text(timed.context)
        sequence, drafted = Sequence(text, GREEDY), text[: timed.size - 1]
        if timed.size == 1:  # plain rounds follow each other, so their caches are warmer
            session.forward([[text[-1]]])
            session.crop([timed.context - 1])
        started = time.perf_counter()
        (logits,) = session.forward([[text[-1], *drafted]])
        sample_match(logits, drafted, sequence, frozenset())
        session.crop([timed.context - 1])
        return time.perf_counter() - started

    def _draft(self, timed: TimedPass) -> float:
        text = self._text(timed.context)
        if timed.context not in self._drafts:
            assert self.model.drafter is not None
            beside = self.model.drafter.open_beside(self._target(timed.context))
            opened = beside or self.model.drafter.open(1, timed.context + self.longest)
            self._drafts[timed.context] = opened, beside is None
        session, own_cache = self._drafts[timed.context]
        if own_cache:
            session.draft([Sequence(text[: max(1, timed.context - CATCH_UP)], GREEDY)], [1])
        started = time.perf_counter()
        session.draft([Sequence(text, GREEDY)], [timed.size])
        return time.perf_counter() - started

    def _prepare(self, timed: TimedPass) -> float:
        text, width = self._text(timed.context), timed.draft_length
        if timed.context not in self._packed:
            assert self.model.drafter is not None
            drafter = PackedDrafter(self.model.drafter.model, self.model.engine.vocab_size)
            capacity = timed.context + self.longest + 1
            self._packed[timed.context] = drafter.open(capacity, self.outcomes)
        session = self._packed[timed.context]
        block = session.draft(text, width)  # outcomes are guessed from its confidences
        started = time.perf_counter()
        outcomes = session.likely_outcomes(text, block.token_ids, timed.size)
        session.prepare(text, block.token_ids, outcomes, width)
        return time.perf_counter() - started

    def _fused_pass(self, timed: TimedPass) -> float:
        key = (timed.context, timed.size)
        if key not in self._fused:
            self._fused[key] = self._open_fused(*key)
        session, sequence = self._fused[key].session, self._fused[key].sequence
        started = time.perf_counter()
        (block,) = self._fused[key].drafts.draft([sequence], [self.longest])
        (logits,) = session.forward([[sequence.anchor, *block.token_ids]])
        verdict = sample_match(logits, block.token_ids, sequence, frozenset())
        sequence.commit(verdict.token_ids if verdict.num_accepted else verdict.token_ids[-1:])
        session.crop([len(sequence) - 1])
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

    def _rest(self, timed: TimedPass) -> float:
        result = self.model.generate(
            self._text(timed.context), mode="plain", max_tokens=GENERATED, ignore_eos=True
        )
        assert result.timing.tpot_s is not None
        total = result.timing.tpot_s * (result.usage.completion_tokens - 1)
        passes = sum(round_.t_draft + round_.t_verify for round_ in result.rounds)
        return ratio(max(0.0, total - passes), len(result.rounds))

    def _async_passes(self, timed: TimedPass) -> list[float]:
        """Passes of an async generation at the default budget."""
        result = self.model.generate(
            self._text(timed.context),
            mode="async",
            draft_length=timed.draft_length,
            outcomes=DEFAULT_OUTCOMES,
            placement=self.placement,
            max_tokens=GENERATED,
            ignore_eos=True,
        )
        rounds, length = result.rounds, timed.draft_length
        if timed.kind == "async_verify":
            return [round_.t_verify for round_ in rounds if round_.draft_length == length]
        if timed.kind == "async_read":  # nothing if the target did not wait for the first draft
            first = rounds[0].preparation if rounds[0].draft_length else None
            return [end - start for start, end in first.passes] if first else []
        place = 0 if timed.kind == "async_packed" else 1  # the second is a draft after a miss
        spans = [
            span
            for round_ in rounds
            if round_.preparation and round_.preparation.readiness != "unprepared"
            for span in round_.preparation.passes[place : place + 1]
        ]
        return [end - start for start, end in spans]


def native(model: Model) -> tuple[OpenModel, NativeEngine]:
    """Target and engine of d3d's own decoder. Raises InvalidRequest for another engine."""
    if not isinstance(model.target, OpenModel) or not isinstance(model.engine, NativeEngine):
        raise InvalidRequest(
            "profile: only passes of d3d's own engine are measured; load the model without another"
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
