"""What coordinator and draft worker say to each other. Every message that belongs to a round names
it; docs/async.md has the table.

A text travels as what is new in it: `new_tokens` follow the first `start` tokens that the worker
has been told before."""

from __future__ import annotations

from dataclasses import dataclass

from d3d.engine.drafter import Draft
from d3d.methods.async_.outcomes import Outcome

# coordinator -> worker


@dataclass(frozen=True)
class Open:
    """A sequence begins (or is begun again, by a worker that knows nothing of it)."""

    sequence_id: int
    outcome_budget: int


@dataclass(frozen=True)
class DraftNow:
    """DraftNow one block behind the text, now. It is answered by `Drafted` or `Failed`."""

    sequence_id: int
    round_id: int
    start: int
    new_tokens: tuple[int, ...]
    draft_length: int


@dataclass(frozen=True)
class Prepare:
    """`draft` is being verified behind the text: prepare its likely outcomes. It is answered by
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
    """Requests for several sequences that are verified in one batch, so that the worker has them
    all at once. Each is answered."""

    requests: tuple[DraftNow | Prepare, ...]


@dataclass(frozen=True)
class Forget:
    """The sequence has ended or was given up."""

    sequence_id: int


@dataclass(frozen=True)
class Stop:
    """The worker ends."""


# worker -> coordinator


@dataclass(frozen=True)
class Ready:
    """The drafter is loaded."""

    pid: int


@dataclass(frozen=True)
class Drafted:
    """The answer to `DraftNow`. Times in seconds of `time.perf_counter`, which on one machine is
    one clock for all processes."""

    sequence_id: int
    round_id: int
    block: Draft
    started: float
    ended: float


@dataclass(frozen=True)
class Successors:
    """The answer to `Prepare`: what to draft next, by outcome of that round."""

    sequence_id: int
    round_id: int
    blocks: tuple[tuple[Outcome, Draft], ...]
    started: float
    ended: float


@dataclass(frozen=True)
class Failed:
    """The answer to a request that raised; the worker has dropped the sequence. Without a sequence
    the worker itself could not start."""

    sequence_id: int | None
    round_id: int
    error: str


WorkRequest = DraftNow | Prepare
ToWorker = Open | DraftNow | Prepare | Together | Forget | Stop
FromWorker = Ready | Drafted | Successors | Failed
