"""Interfaces of targets and drafters, as the engine calls them.

Both keep per-request state under the request's `id` until `end`. Defaults do nothing, so a method
implements only what it needs, without `isinstance` checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from d3d.engine.clock import Span
from d3d.engine.round import Preparation, Round
from d3d.engine.sampling import LogitRows, Parents

if TYPE_CHECKING:
    from d3d.engine.request import Request


class Draft(NamedTuple):
    """Tokens proposed to follow the anchor; may be empty. They form a chain, or a tree."""

    token_ids: tuple[int, ...] = ()
    fault: str | None = None
    """Reason why drafting failed (for example non-finite logits); None if it did not."""
    preparation: Preparation | None = None
    """Async mode only."""
    confidences: tuple[float, ...] = ()
    """Drafter's probability of each token given those before it; empty if not requested."""
    looked_up: bool = False
    """True if prompt lookup copied the draft, without a model."""
    num_slots: int = 0
    """Fused mode: slots of the pass that verifies it."""
    parents: Parents = None
    """In a tree: index of the token that each token follows, an earlier one or -1, the anchor; None
    for a chain."""

    @property
    def depth(self) -> int:
        """Most tokens that can be accepted together."""
        return (
            len(self.token_ids) if self.parents is None else max(_depths(self.parents), default=0)
        )

    def cut(self, depth: int, num_nodes: int, *, as_chain: bool = False) -> Draft:
        """Keep the first `num_nodes` tokens of at most this depth; as_chain: of those only the
        first path."""
        if self.parents is None:
            length = min(depth, num_nodes)
            kept = self.token_ids[:length]
            return self if len(self.token_ids) <= length else self._replace(token_ids=kept)
        depths = _depths(self.parents)
        nodes = [node for node, level in enumerate(depths) if level <= depth][:num_nodes]
        if as_chain:
            path = [-1]
            for node in nodes:
                if self.parents[node] == path[-1]:
                    path.append(node)
            nodes = path[1:]
        place = {node: index for index, node in enumerate((-1, *nodes), -1)}
        parents = tuple(place[self.parents[node]] for node in nodes)
        return self._replace(
            token_ids=tuple(self.token_ids[node] for node in nodes),
            confidences=tuple(self.confidences[node] for node in nodes if self.confidences),
            parents=None if parents == tuple(range(-1, len(nodes) - 1)) else parents,
        )


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token of a tree, from 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


NO_DRAFT = Draft()


class Drafter(ABC):
    """Proposes tokens."""

    max_draft_length: int
    """Maximum draft length; 0 if it never drafts."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of tokens in a draft; more than `max_draft_length` if it drafts trees."""
        return self.max_draft_length

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """Draft for each request: at most `request.draft_room(self.max_draft_length)` tokens deep,
        possibly nothing."""

    def ready(self) -> None:
        """Start workers before requests join. Raises WorkerFailed."""

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        """Report a prefill: prompt tokens read, and the seconds it took."""

    def num_missing(self, request: Request) -> int:  # noqa: ARG002
        """Committed tokens that a draft for this request would have to process first."""
        return 0

    def suspend(self, request: Request) -> None:
        """Prepare for rounds without this drafter: drop state that can't be resumed."""

    def observe(self, rounds: Sequence[Round]) -> None:
        """Report a finished round, one entry per request."""

    def end(self, request: Request) -> None:
        """Forget a finished, failed or cancelled request; unknown ones are ignored."""

    def close(self) -> None:
        """Stop workers and threads; `ready` restarts them."""

    def report(self) -> Any:
        """The drafter's own decisions, for the result; None if there are none."""
        return None

    @property
    def num_held(self) -> int:
        """Number of requests with state."""
        return 0


class NoDrafter(Drafter):
    """Drafter of plain decoding: it proposes nothing."""

    max_draft_length = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [NO_DRAFT for _ in requests]


class Target(ABC):
    """The model whose output is preserved.

    Between rounds its cache holds each request's committed tokens except the anchor."""

    verifies_trees = False
    """False if drafts must be chains; a tree is then cut to its first path."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Maximum sequence length in tokens, prompt and answer together."""

    @property
    def device(self) -> torch.device:
        """Device of its logits."""
        return torch.device("cpu")

    @abstractmethod
    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        """Process at most `num_rows` further prompt tokens, the first request's first. Returns the
        last row's logits for each request whose prompt is complete, None for the others."""

    @abstractmethod
    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        """Append each request's anchor and draft; returns the logits of these rows."""

    def keep_path(self, request: Request, path: Sequence[int]) -> None:
        """Keep these tokens of a draft tree right after the anchor; called between `verify` and
        `rewind`, before the request is extended. For targets that verify trees."""
        raise NotImplementedError

    def verify_again(self, request: Request) -> LogitRows:
        """Verify the anchor of a request alone, in place of a pass that gave logits that are not
        finite."""
        self.rewind([request])
        return self.verify([request], [NO_DRAFT])[0]

    def diagnose(self, request: Request) -> str:  # noqa: ARG002
        """Why the logits after a request's tokens are not finite, and what to do; empty if
        unknown."""
        return ""

    @abstractmethod
    def rewind(self, requests: Sequence[Request]) -> None:
        """Drop rejected tokens: each cache ends before the request's anchor again."""

    @abstractmethod
    def end(self, request: Request) -> None:
        """Forget a finished, failed or cancelled request; unknown ones are ignored."""

    def pass_span(self) -> Span | None:
        """Start and end of the last pass on the device, in seconds of `time.perf_counter`; None if
        the processor's clock suffices."""
        return None

    def cache_for(self, model: Any) -> Any:  # noqa: ARG002
        """Cache shared with a drafter whose clean rows equal the target's; None if there is
        none."""
        return None

    @property
    def num_held(self) -> int:
        """Number of requests with state."""
        return 0


def guarded(drafter: Drafter, vocab_size: int, *, trees: bool = False) -> Guarded:
    """Wrap a drafter so that it can only cost time: an error, a token outside the target's
    vocabulary or a malformed tree ends drafting for the requests concerned, and is reported once.
    trees: False if the target verifies chains only."""
    return Guarded(drafter, vocab_size, trees)


MOST_FAILURES = 3
"""Errors in a row after which a drafter is asked no more."""


class Guarded(Drafter):
    """Drafter wrapped by `guarded`."""

    def __init__(self, drafter: Drafter, vocab_size: int, trees: bool) -> None:
        self.drafter, self._vocab_size, self._trees = drafter, vocab_size, trees
        self.max_draft_length = drafter.max_draft_length
        self._spoilt: set[int] = set()
        """Ids of requests that are no longer drafted for."""
        self._num_failures = 0
        """Errors in a row."""
        self._last_failure = ""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        members = [request for request in requests if request.id not in self._spoilt]
        if not any(request.draft_room(self.max_draft_length) for request in members):
            return [NO_DRAFT for _ in requests]
        checked = self._asked(members)
        by_id = {}
        for request, draft in zip(members, checked, strict=True):
            by_id[request.id] = draft
            if draft.fault is not None:
                self._tell(partial(self.drafter.suspend, request))
                self._spoilt.add(request.id)
        return [by_id.get(request.id, NO_DRAFT) for request in requests]

    def ready(self) -> None:
        self.drafter.ready()

    def _asked(self, requests: list[Request]) -> list[Draft]:
        """The drafter's proposals, or the reason why there are none."""
        if self._num_failures >= MOST_FAILURES:
            told = f"the drafter failed {MOST_FAILURES} times in a row and is asked no more"
            return [Draft(fault=f"{told}: {self._last_failure}") for _ in requests]
        try:
            drafts = self.drafter.propose(requests)
            checked = [self._checked(*pair) for pair in zip(requests, drafts, strict=True)]
        except Exception as error:  # a drafter's failure must not end the answers
            self._num_failures += 1
            self._last_failure = f"{type(error).__name__}: {error}"
            return [Draft(fault=f"the drafter failed: {self._last_failure}") for _ in requests]
        self._num_failures = 0
        return checked

    def _checked(self, request: Request, draft: Draft) -> Draft:
        """Limit a draft to the request's room; reject ids outside the target's vocabulary, and
        malformed trees."""
        if any(not 0 <= token_id < self._vocab_size for token_id in draft.token_ids):
            return Draft(
                fault="the drafter proposed an id outside of the target's vocabulary "
                f"of {self._vocab_size}"
            )
        if draft.parents is not None and not _is_tree(draft.parents, len(draft.token_ids)):
            return Draft(fault=f"the drafter proposed a malformed tree: parents {draft.parents}")
        room = request.draft_room(self.max_draft_length)
        return draft.cut(room, self.drafter.max_nodes, as_chain=not self._trees)

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
        """Call a hook, ignoring errors: a broken drafter may only cost time."""
        try:
            notify()
        except Exception:  # if the drafter is broken, its next proposal fails
            return


def _is_tree(parents: Sequence[int], num_tokens: int) -> bool:
    """True if every token's parent is the anchor or an earlier token."""
    return len(parents) == num_tokens and all(
        isinstance(parent, int) and -1 <= parent < node for node, parent in enumerate(parents)
    )
