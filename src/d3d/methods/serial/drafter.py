"""Serial mode's drafter: blocks of a D3D drafter, drafted before the target verifies.

Three ways to skip a pass that would not pay: prompt lookup copies the draft from the text
(`lookup`); if few drafted tokens are kept, only every eighth round drafts (`least_kept`); and a
draft is cut at the first token of low confidence (`draft_confidence`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter
from d3d.engine.request import Request
from d3d.engine.sampling import common_prefix
from d3d.methods.estimate import Estimate
from d3d.methods.ngram.lookup import PromptLookup
from d3d.methods.serial.denoise import BlockDenoiser
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import SPARE_TOKENS, KVCache

NEWEST_SHARE = 0.2
"""Weight of the newest draft in the running mean of kept tokens."""
PROBE_INTERVAL = 8
"""Probe interval while paused, in rounds."""
PRIOR_KEPT = 2.0
"""Prior mean of kept tokens per draft; a higher threshold counts as met at first, too."""


class BlockDrafter(Drafter):
    """Proposes blocks with a `DrafterModel`.

    With the target's own cache (if the drafter's clean rows are the target's) it computes slots
    only, and leaves the cache unchanged."""

    def __init__(
        self,
        model: DrafterModel,
        target_vocab_size: int,
        *,
        draft_length: int | None = None,
        shared_cache: KVCache | None = None,
        num_denoise_steps: int = 1,
        draft_confidence: float | None = None,
        lookup: int = 0,
        least_kept: float = 0.0,
    ) -> None:
        """draft_length: maximum draft length; None for the block size. shared_cache: the target's
        (`Target.cache_for`). For the rest see `SerialConfig`."""
        block_size = model.config.block_size
        self.max_draft_length = min(draft_length or block_size, block_size)
        self.model = model
        self._cache = model.transformer.new_cache() if shared_cache is None else shared_cache
        self._is_shared = shared_cache is not None
        self._denoiser = BlockDenoiser(
            model,
            target_vocab_size,
            self._cache,
            num_denoise_steps=num_denoise_steps,
            with_confidences=draft_confidence is not None,
        )
        self._confidence, self._lookup, self._least_kept = draft_confidence, lookup, least_kept
        self._pasts: dict[int, PromptLookup] = {}
        self._histories: dict[int, DraftHistory] = {}

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = {}
        asked = []
        for request in requests:
            room = request.draft_room(self.max_draft_length)
            if copied := self._copy(request, room):
                drafts[request.id] = Draft(copied, looked_up=True)
            elif self._is_due(request, room):
                asked.append(request)
        if asked:
            made = self._draft(asked)
            drafts |= {request.id: draft for request, draft in zip(asked, made, strict=True)}
        return [drafts.get(request.id, NO_DRAFT) for request in requests]

    def _copy(self, request: Request, room: int) -> tuple[int, ...]:
        if not self._lookup:
            return ()
        if request.id not in self._pasts:
            self._pasts[request.id] = PromptLookup(self._lookup)
        return self._pasts[request.id].copy(request.token_ids, room)

    def _is_due(self, request: Request, room: int) -> bool:
        """True if this round should draft for the request."""
        if not self._least_kept:
            return room > 0
        if request.id not in self._histories:
            self._histories[request.id] = DraftHistory(self._least_kept)
        history = self._histories[request.id]
        history.look(request.token_ids)
        return room > 0 and history.begin_round()

    def _draft(self, requests: list[Request]) -> list[Draft]:
        ids = [request.id for request in requests]
        texts = [request.token_ids for request in requests]
        lengths = [request.draft_room(self.max_draft_length) for request in requests]
        if self._is_shared:
            drafts = self._draft_beside(ids, texts, lengths)
        else:
            for request in requests:
                if request.id not in self._cache:
                    self._cache.open(request.id, len(request) + SPARE_TOKENS)
            drafts = self._denoiser.draft(ids, texts, lengths)
        for request, draft in zip(requests, drafts, strict=True):
            if request.id in self._histories:
                self._histories[request.id].begin_draft(draft.token_ids, len(request))
        return [
            confident_prefix(draft, self._confidence, num_sure=self._num_sure(request))
            for request, draft in zip(requests, drafts, strict=True)
        ]

    def _draft_beside(
        self, ids: list[int], texts: list[list[int]], lengths: list[int]
    ) -> list[Draft]:
        """Draft after the target's own cached rows."""
        before = {sequence_id: self._cache.length(sequence_id) for sequence_id in self._cache.ids}
        drafts: list[Draft] = []
        try:
            drafts = self._denoiser.draft(ids, texts, lengths)
        finally:
            has_failed = not drafts or any(draft.fault is not None for draft in drafts)
            # a pass appends slots after all sequences of its window, not only those that draft
            for sequence_id, length in before.items():
                self._cache.crop(sequence_id, length)
                if has_failed:
                    self._cache.clear_behind(sequence_id)
        return drafts

    def _num_sure(self, request: Request) -> int:
        """Number of first drafted tokens that are the target's own choice: those predicted by its
        own rows, if decoding is greedy and any token can be drafted."""
        config = self.model.config
        is_own = self._is_shared and config.draft_vocabulary is None and request.params.greedy
        return config.own_rows if is_own else 0

    def num_missing(self, request: Request) -> int:
        """Committed tokens that a draft for this request would have to process first."""
        if self._is_shared:
            return 0
        held = self._cache.length(request.id) if request.id in self._cache else 0
        return len(request) - held

    def end(self, request: Request) -> None:
        self._pasts.pop(request.id, None)
        self._histories.pop(request.id, None)
        if not self._is_shared:
            self._cache.end(request.id)

    @property
    def num_held(self) -> int:
        num_cached = 0 if self._is_shared else len(self._cache)
        return len(self._pasts) + len(self._histories) + num_cached


def confident_prefix(draft: Draft, least: float | None, *, num_sure: int = 0) -> Draft:
    """Longest prefix of a draft whose probability of being kept whole is at least `least`; may be
    empty. None cuts nothing.

    A further drafted row costs the target the same whatever it holds, and gains a token with the
    probability that it and all before it are kept. num_sure: first tokens that are certain,
    whatever the drafter's confidence."""
    if least is None or draft.fault is not None:
        return draft
    sure = (1.0,) * min(num_sure, len(draft.confidences))
    chances = sure + draft.confidences[num_sure:]
    length = sum(chance >= least for chance in accumulate(chances, mul))
    return draft._replace(
        token_ids=draft.token_ids[:length], confidences=draft.confidences[:length]
    )


@dataclass
class DraftHistory:
    """Acceptance of one request's drafts. It decides which rounds draft, from text and drafts
    alone, never from a clock."""

    least_kept: float
    kept: Estimate = field(init=False)
    """Mean number of kept tokens per draft, without the bonus token."""
    paused: int = 0
    """Rounds without a draft since the last one."""
    draft: tuple[int, ...] | None = None
    """Last draft, until its outcome is known."""
    place: int = 0
    """Position in the text of the draft's first token."""

    def __post_init__(self) -> None:
        prior = max(PRIOR_KEPT, self.least_kept)
        self.kept = Estimate(prior, weight=1 / NEWEST_SHARE, decay=NEWEST_SHARE)

    def begin_draft(self, draft: tuple[int, ...], place: int) -> None:
        self.draft, self.place = draft, place

    def look(self, text: Sequence[int]) -> None:
        """Count the tokens of the last draft that the text has kept."""
        if self.draft is not None:
            self.kept.add(common_prefix(self.draft, text[self.place :]))
            self.draft = None

    def begin_round(self) -> bool:
        """Begin a round; True if it should draft."""
        if self.kept.value >= self.least_kept or self.paused >= PROBE_INTERVAL - 1:
            self.paused = 0
            return True
        self.paused += 1
        return False
