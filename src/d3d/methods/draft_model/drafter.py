"""Classic speculative decoding: a smaller causal model drafts token by token (Leviathan et al.,
arXiv 2211.17192)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter
from d3d.engine.request import Request
from d3d.engine.sampling import common_prefix
from d3d.errors import InvalidRequest
from d3d.methods.serial.denoise import not_finite, unknown_id
from d3d.model.drafter import DrafterModel
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget


def autoregressive_head(drafter: DrafterModel) -> Transformer:
    """A block drafter's own clean rows as a causal drafter: the baseline for its blocks.

    Raises InvalidRequest for a drafter whose deltas act on clean rows too: without slots it is not
    the model that was trained."""
    if drafter.config.delta is not None and not drafter.config.clean_rows_are_base:
        raise InvalidRequest(
            "draft_model: this drafter's deltas act on clean rows too; name a causal model to "
            "draft with instead"
        )
    return drafter.transformer


class DraftModelDrafter(Drafter):
    """Drafts greedily with a causal model, one pass per token.

    Between drafts its cache may hold drafted tokens; the next draft drops those that were not
    kept."""

    def __init__(self, model: Transformer, target_vocab_size: int, max_draft_length: int) -> None:
        self.max_draft_length = max_draft_length
        self._target_vocab_size = target_vocab_size
        self._model = NativeTarget(model)
        self._held: dict[int, list[int]] = {}
        """Tokens in the cache, by request."""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        vocab_size, limit = self._model.vocab_size, self._model.max_length
        drafts, wanted = {}, {}
        for request in requests:
            # the last drafted token is never run, so a text may fill the whole context
            room = min(request.draft_room(self.max_draft_length), limit - len(request))
            if max(request.token_ids[self._num_settled(request) :]) >= vocab_size:
                drafts[request.id] = unknown_id(vocab_size)
            elif room > 0:
                wanted[request.id] = room
        asked = [request for request in requests if request.id in wanted]
        if asked:
            drafts |= self._draft(asked, wanted)
        return [drafts.get(request.id, NO_DRAFT) for request in requests]

    def _draft(self, requests: list[Request], wanted: dict[int, int]) -> dict[int, Draft]:
        drafted: dict[int, list[int]] = {request.id: [] for request in requests}
        finite = dict.fromkeys(drafted, True)
        feeds = {request.id: self._missing(request) for request in requests}
        while feeds:
            following = {}
            for request_id, logits in self._run(feeds).items():
                tokens = drafted[request_id]
                best = logits.max(-1)
                finite[request_id] &= math.isfinite(best.values.item())
                tokens.append(int(best.indices))
                if len(tokens) < wanted[request_id]:
                    following[request_id] = tokens[-1:]
            feeds = following
        return {
            request.id: Draft(tuple(drafted[request.id]))
            if finite[request.id]
            else not_finite(len(request))
            for request in requests
        }

    def _missing(self, request: Request) -> list[int]:
        """Tokens still to process, always including the anchor. Crops rejected tokens from the
        cache, and catches up if it lacks more than one round can add."""
        held, start = self._held.setdefault(request.id, []), self._num_settled(request)
        shared = start + common_prefix(held[start:], request.token_ids[start:-1])
        if shared < len(held):
            self._model.cache.crop(request.id, shared)
            del held[shared:]
        feed = request.token_ids[shared:]
        if len(feed) > self.max_draft_length + 1:  # in a common pass the others would be padding
            self._run({request.id: feed[:-1]})
            feed = feed[-1:]
        return feed

    def _num_settled(self, request: Request) -> int:
        """Cached tokens that were committed when they were processed: all but the last draft."""
        return max(0, len(self._held.get(request.id, ())) - self.max_draft_length)

    def _run(self, feeds: dict[int, list[int]]) -> dict[int, Tensor]:
        """Logits after each request's tokens, float32 [target_vocab_size]."""
        ids = list(feeds)
        outputs = self._model.forward(
            ids, [feeds[request_id] for request_id in ids], last_only=True
        )
        for request_id in ids:
            self._held[request_id] += feeds[request_id]
        return {
            request_id: rows.logits()[-1, : self._target_vocab_size]
            for request_id, rows in zip(ids, outputs, strict=True)
        }

    def end(self, request: Request) -> None:
        self._held.pop(request.id, None)
        self._model.end(request)

    @property
    def num_held(self) -> int:
        return len(self._held)
