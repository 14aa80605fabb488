"""Times single passes with the code that decodes: one target, one drafter, no rounds between."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from d3d.api import Model
from d3d.engine.drafter import Draft
from d3d.engine.metrics import ratio
from d3d.engine.request import Request
from d3d.engine.sampling import sample_match
from d3d.errors import InvalidRequest
from d3d.hub.open_model import OpenModel
from d3d.lab.plan.handover import handover_seconds
from d3d.lab.plan.profile import Kind
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.serial.denoise import BlockDenoiser
from d3d.model.drafter import DrafterModel
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget

CATCH_UP = 3
"""Committed tokens that a drafter with its own cache reads in the pass that drafts."""
HANDOVERS = 20
GENERATED = 24
"""Tokens of the answers that `rest` and the passes of async mode are read from."""


class TimedPass(NamedTuple):
    """A pass to time; see `d3d.lab.plan.profile.Point`."""

    kind: Kind
    size: int
    draft_length: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size or ''}, context {self.context}"


class PassProbe:
    """Verifications and drafts after one text, in a cache of their own. Each leaves the caches as
    they were."""

    def __init__(self, target: Transformer, drafter: DrafterModel | None, text: list[int]) -> None:
        self.target = NativeTarget(target)
        self.request = open_request(self.target, text)
        self._drafter, self._denoiser = drafter, None
        if drafter is not None:
            shared = self.target.cache_for(drafter)
            cache = drafter.transformer.new_cache() if shared is None else shared
            if shared is None:
                cache.open(self.request.id, len(text))
            self._left = len(text) - (CATCH_UP if shared is None else 1)
            self._denoiser = BlockDenoiser(drafter, self.target.vocab_size, cache)

    def verify(self, rows: int) -> None:
        """The anchor and rows - 1 drafted tokens, up to the verdict."""
        draft = Draft(tuple(self.request.token_ids[: rows - 1]))
        (logits,) = self.target.verify([self.request], [draft])
        sample_match(logits, draft.token_ids, self.request)
        self.target.rewind([self.request])

    def draft(self, draft_length: int) -> None:
        """A block; a drafter with its own cache catches up with CATCH_UP tokens first."""
        assert self._denoiser is not None
        request = self.request
        self._denoiser.draft([request.id], [request.token_ids], [draft_length])
        self._denoiser.cache.crop(request.id, self._left)


def open_request(target: NativeTarget | FusedTarget, text: list[int]) -> Request:
    """A request whose anchor is the text's last token; the cache holds the tokens before it."""
    request = Request(text[:-1])
    target.prefill([request], len(text))
    request.token_ids.append(text[-1])
    return request


@dataclass
class Probes:
    """Probes of one model. State is set up on first use, and kept."""

    model: Model
    placement: str
    outcomes: int
    """Most outcomes of a packed pass."""
    _passes: dict[int, PassProbe] = field(default_factory=dict)
    _packed: dict[int, PackedSession] = field(default_factory=dict)
    _fused: dict[tuple[int, int], tuple[FusedTarget, Request]] = field(default_factory=dict)

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

    @property
    def _drafter(self) -> DrafterModel:
        assert self.model.parts.drafter is not None
        return self.model.parts.drafter

    def _text(self, context: int) -> list[int]:
        """Random tokens that both models know: the cost of a pass does not depend on them."""
        rng, known = random.Random(context), self.model.target.vocab_size
        if self.model.parts.drafter is not None:
            known = min(known, self._drafter.transformer.config.vocab_size)
        return [rng.randrange(known) for _ in range(context)]

    def _probe(self, context: int) -> PassProbe:
        if context not in self._passes:
            target = native(self.model)[1].model
            self._passes[context] = PassProbe(target, self.model.parts.drafter, self._text(context))
        return self._passes[context]

    def _verify(self, timed: TimedPass) -> float:
        probe = self._probe(timed.context)
        if timed.size == 1:  # plain rounds follow each other, so their caches are warmer
            probe.verify(1)
        started = time.perf_counter()
        probe.verify(timed.size)
        return time.perf_counter() - started

    def _draft(self, timed: TimedPass) -> float:
        probe = self._probe(timed.context)
        probe.draft(1)  # it has read the text
        started = time.perf_counter()
        probe.draft(timed.size)
        return time.perf_counter() - started

    def _prepare(self, timed: TimedPass) -> float:
        text, width = self._text(timed.context), timed.draft_length
        if timed.context not in self._packed:
            drafter = PackedDrafter(self._drafter, self.model.parts.target.vocab_size)
            self._packed[timed.context] = drafter.open(self.outcomes)
        session = self._packed[timed.context]
        draft = session.draft(text, width)  # outcomes are guessed from its confidences
        started = time.perf_counter()
        outcomes = session.likely_outcomes(text, draft.token_ids, timed.size)
        session.prepare(text, draft.token_ids, outcomes, width)
        return time.perf_counter() - started

    def _fused_pass(self, timed: TimedPass) -> float:
        """The rounds of a fused generation: its context grows with its samples."""
        key = (timed.context, timed.size)
        if key not in self._fused:
            length = min(DEFAULT_FUSED_DRAFT_LENGTH, self._drafter.config.longest_slot_draft)
            target = NativeTarget(native(self.model)[1].model)
            fused = FusedTarget(target, self._drafter, length, timed.size)
            self._fused[key] = fused, open_request(fused, self._text(timed.context))
        engine, request = self._fused[key]
        started = time.perf_counter()
        drafts = engine.propose([request])
        (logits,) = engine.verify([request], drafts)
        verdict = sample_match(logits, drafts[0].token_ids, request)
        request.token_ids.extend(verdict.token_ids)
        engine.rewind([request])
        return time.perf_counter() - started

    def _rest(self, timed: TimedPass) -> float:
        result = self.model.generate(
            self._text(timed.context), method="plain", max_tokens=GENERATED, ignore_eos=True
        )
        assert result.timing.tpot_s is not None
        total = result.timing.tpot_s * (result.usage.completion_tokens - 1)
        passes = sum(round_.t_draft + round_.t_verify for round_ in result.rounds)
        return ratio(max(0.0, total - passes), len(result.rounds))

    def _async_passes(self, timed: TimedPass) -> list[float]:
        """Passes of an async generation at the default budget."""
        result = self.model.generate(
            self._text(timed.context),
            method="async",
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
            if round_.preparation and round_.readiness != "unprepared"
            for span in round_.preparation.passes[place : place + 1]
        ]
        return [end - start for start, end in spans]


def native(model: Model) -> tuple[OpenModel, NativeTarget]:
    """Model and target of d3d's own decoder. Raises InvalidRequest for another engine."""
    target = model.parts.target
    if not isinstance(model.target, OpenModel) or not isinstance(target, NativeTarget):
        raise InvalidRequest(
            "profile: only passes of d3d's own decoder are measured; load the model without another"
        )
    return model.target, target


def can_fuse(model: Model) -> bool:
    """True if fused mode works with this drafter."""
    if model.parts.drafter is None:
        return False
    try:
        FusedTarget(native(model)[1], model.parts.drafter, 1, 2)
    except InvalidRequest:
        return False
    return True
