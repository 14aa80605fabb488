"""Messages between coordinator and draft worker. Each that belongs to a round names it;
docs/guide/async.md has the table.

Texts are sent as differences: `new_tokens` follow the first `start` tokens, which the worker has
already."""

from __future__ import annotations

from dataclasses import dataclass

from d3d.engine.drafter import Draft
from d3d.methods.async_.outcomes import Outcome

# coordinator -> worker


@dataclass(frozen=True)
class Open:
    """A sequence begins, or is sent anew to a worker that does not have it."""

    sequence_id: int
    outcome_budget: int


@dataclass(frozen=True)
class DraftNow:
    """Draft a block to follow the text, at once. Answered by `Drafted` or `Failed`."""

    sequence_id: int
    round_id: int
    start: int
    new_tokens: tuple[int, ...]
    draft_length: int


@dataclass(frozen=True)
class Prepare:
    """`draft`, which follows the text, is being verified: prepare its likely outcomes. Answered by
    `Successors` or `Failed`."""

    sequence_id: int
    round_id: int
    start: int
    new_tokens: tuple[int, ...]
    draft: tuple[int, ...]
    draft_length: int
    """Most tokens of a successor."""
    outcome_budget: int


@dataclass(frozen=True)
class Together:
    """Requests for several sequences that are verified in one batch, sent as one message so that
    they can share a pass. Each is answered."""

    requests: tuple[DraftNow | Prepare, ...]


@dataclass(frozen=True)
class Forget:
    """A sequence has ended, or needs no more drafts."""

    sequence_id: int


@dataclass(frozen=True)
class Stop:
    """The worker is to end."""


# worker -> coordinator


@dataclass(frozen=True)
class Ready:
    """The drafter is loaded."""

    pid: int


@dataclass(frozen=True)
class Drafted:
    """Answer to `DraftNow`. Times in seconds of `time.perf_counter`, which all processes of a
    machine share."""

    sequence_id: int
    round_id: int
    block: Draft
    started: float
    ended: float


@dataclass(frozen=True)
class Successors:
    """Answer to `Prepare`: the next draft for each outcome of that round."""

    sequence_id: int
    round_id: int
    blocks: tuple[tuple[Outcome, Draft], ...]
    started: float
    ended: float


@dataclass(frozen=True)
class Failed:
    """A request raised, and the worker has forgotten its sequence. Without a sequence id: the
    worker itself could not start."""

    sequence_id: int | None
    round_id: int
    error: str


WorkRequest = DraftNow | Prepare
ToWorker = Open | DraftNow | Prepare | Together | Forget | Stop
FromWorker = Ready | Drafted | Successors | Failed
