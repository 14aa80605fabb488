"""The seams: what the engine asks of a target and of a drafter.

Both keep what belongs to a request under its `id` until `end`. Defaults do nothing, so a method
implements what it needs and nothing is found out by `isinstance`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from d3d.engine.clock import Span
from d3d.engine.round import Preparation, Round
from d3d.engine.sampling import LogitRows

if TYPE_CHECKING:
    from d3d.engine.request import Request


class Draft(NamedTuple):
    """Tokens proposed for the positions after the anchor, perhaps none."""

    token_ids: tuple[int, ...] = ()
    fault: str | None = None
    """Why the drafter could not draft (for example non-finite logits); None if all is well."""
    preparation: Preparation | None = None
    """Async mode only."""
    confidences: tuple[float, ...] = ()
    """The drafter's probability of each token, given those before it; empty if nobody asked."""
    looked_up: bool = False
    """Whether prompt lookup copied it from the text, and no model was asked."""
    num_slots: int = 0
    """Fused mode: slots of the pass that is to verify it."""


NO_DRAFT = Draft()


class Drafter(ABC):
    """Proposes tokens."""

    max_draft_length: int
    """Most tokens of a draft; 0 if it never drafts."""

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """A draft for each request, at most `request.draft_room(self.max_draft_length)` tokens;
        fewer, or none, is allowed."""

    def ready(self) -> None:
        """Start what drafting needs, before requests join. Raises WorkerFailed if it can't."""

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        """The target has read prompts of so many tokens; how long it took."""

    def num_missing(self, request: Request) -> int:  # noqa: ARG002
        """Committed tokens that a draft for this request would have to compute first."""
        return 0

    def suspend(self, request: Request) -> None:
        """Rounds without this drafter follow: drop what it can't go on from afterwards."""

    def observe(self, rounds: Sequence[Round]) -> None:
        """A round has ended; one entry for each request that was in it."""

    def end(self, request: Request) -> None:
        """The request is finished, cancelled or failed: forget it. Harmless if it is unknown."""

    def close(self) -> None:
        """Stop workers and threads. A later `propose` may start them again."""

    def report(self) -> Any:
        """What a result should say about the drafter's own decisions; None for nothing."""
        return None

    @property
    def num_held(self) -> int:
        """Requests that it holds state for."""
        return 0


class NoDrafter(Drafter):
    """Plain decoding."""

    max_draft_length = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [NO_DRAFT for _ in requests]


class Target(ABC):
    """The model whose output is preserved.

    Between rounds its cache holds each request's committed tokens minus the anchor."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""

    @property
    def device(self) -> torch.device:
        """Where its logits are."""
        return torch.device("cpu")

    @abstractmethod
    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        """Read at most `num_rows` further prompt tokens, the first request's first. The logits of
        the last row for each request whose prompt is read, None for the others."""

    @abstractmethod
    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        """Append each request's anchor and draft; the logits of these rows."""

    @abstractmethod
    def rewind(self, requests: Sequence[Request]) -> None:
        """Forget what a round has rejected: the cache ends before each anchor again."""

    @abstractmethod
    def end(self, request: Request) -> None:
        """The request is finished, cancelled or failed: forget it. Harmless if it is unknown."""

    def pass_span(self) -> Span | None:
        """Start and end of the last pass on the device, in seconds of `time.perf_counter`; None if
        the processor's clock says it all."""
        return None

    def cache_for(self, model: Any) -> Any:  # noqa: ARG002
        """The cache that this target shares with a drafter whose clean rows are its own; None if
        it has none to share."""
        return None

    @property
    def num_held(self) -> int:
        """Requests that it holds state for."""
        return 0


def guarded(drafter: Drafter, vocab_size: int) -> Guarded:
    """A drafter that can only cost time: whatever it raises, or proposes beyond the target's
    vocabulary, ends drafting for the requests concerned, once, with a note."""
    return Guarded(drafter, vocab_size)


class Guarded(Drafter):
    """See `guarded`."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter, self._vocab_size = drafter, vocab_size
        self.max_draft_length = drafter.max_draft_length
        self._spoilt: set[int] = set()
        """Ids of requests that are not drafted for any more."""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        members = [request for request in requests if request.id not in self._spoilt]
        if not any(request.draft_room(self.max_draft_length) for request in members):
            return [NO_DRAFT for _ in requests]
        try:
            drafts = self.drafter.propose(members)
            checked = [self._checked(*pair) for pair in zip(members, drafts, strict=True)]
        except Exception as error:  # whatever a drafter dies of, the answers go on
            fault = f"the drafter failed: {type(error).__name__}: {error}"
            checked = [Draft(fault=fault) for _ in members]
        by_id = {}
        for request, draft in zip(members, checked, strict=True):
            by_id[request.id] = draft
            if draft.fault is not None:
                self._tell(partial(self.drafter.suspend, request))
                self._spoilt.add(request.id)
        return [by_id.get(request.id, NO_DRAFT) for request in requests]

    def ready(self) -> None:
        self.drafter.ready()

    def _checked(self, request: Request, draft: Draft) -> Draft:
        """Only ids that the target knows may reach it, and no more than there is room for."""
        if any(not 0 <= token_id < self._vocab_size for token_id in draft.token_ids):
            return Draft(
                fault="the drafter proposed an id outside of the target's vocabulary "
                f"of {self._vocab_size}"
            )
        room = request.draft_room(self.max_draft_length)
        if len(draft.token_ids) <= room:
            return draft
        return draft._replace(token_ids=draft.token_ids[:room])

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._tell(lambda: self.drafter.prefilled(seconds, num_tokens))

    def observe(self, rounds: Sequence[Round]) -> None:
        self._tell(lambda: self.drafter.observe(rounds))

    def end(self, request: Request) -> None:
        self._spoilt.discard(request.id)
        self._tell(lambda: self.drafter.end(request))

    def close(self) -> None:
        self.drafter.close()

    def report(self) -> Any:
        return self.drafter.report()

    @property
    def num_held(self) -> int:
        return len(self._spoilt) + self.drafter.num_held

    @staticmethod
    def _tell(notify: Callable[[], None]) -> None:
        """A drafter that can't take a notice still costs time only."""
        try:
            notify()
        except Exception:  # the next proposal shows what is wrong, if anything is
            return
