"""The seams: what the loop asks of a target, of a drafter, and of an acceptance rule.

State of a generation lives in a session, so a second request on the same engine starts from
nothing. Row i of a session belongs to sequence i of the list that it is called with; `keep` drops
the rows of sequences that have ended, `join` appends others."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock, Outcome, RoundStats, Verdict


class TargetSession(Protocol):
    """The target's cached rows of one generation."""

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence."""
        ...

    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        """Append `token_ids[i]`, or nothing, to sequence i and return its float32 logits, shape
        [len(token_ids[i]), vocab_size] (or [1, vocab_size], the last row, where `last_only`; [0,
        vocab_size] where there is none)."""
        ...

    def crop(self, lengths: list[int]) -> None:
        """Forget every cached token of sequence i from `lengths[i]` on."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order; none may move to a higher row. It may be none
        at all, until others join."""
        ...

    def join(self, count: int) -> None:
        """Append empty sequences behind the others; never more at a time than the session was
        opened with."""
        ...


@runtime_checkable
class TimedSession(Protocol):
    """A target's session that knows when its device really worked."""

    def pass_span(self) -> tuple[float, float] | None:
        """Start and end of the last pass, in seconds of `time.perf_counter`; None where the
        processor's clock says all."""
        ...


class TargetEngine(Protocol):
    """The model whose output is preserved."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        ...

    def open(self, num_sequences: int, capacity: int) -> TargetSession:
        """A fresh session with room for `capacity` tokens a sequence."""
        ...


class DraftSession(Protocol):
    """A drafter's state of one generation."""

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        """Propose at most `lengths[i]` tokens to follow `sequences[i]`; fewer, or none, is
        allowed."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order; none may move to a higher row. It may be none
        at all, until others join."""
        ...

    def join(self, count: int) -> None:
        """Append sequences that it has not seen behind the others; never more at a time than the
        session was opened with. The target's session has been told already."""
        ...


class Drafter(Protocol):
    """Whatever proposes tokens."""

    @property
    def block_size(self) -> int:
        """Most tokens that one block can draft."""
        ...

    def open(self, num_sequences: int, capacity: int) -> DraftSession: ...


@runtime_checkable
class SelfDrafter(Drafter, Protocol):
    """A drafter that may be the target itself with something added: its clean rows are then the
    target's, and so can its cache be."""

    def open_beside(self, target: TargetSession) -> DraftSession | None:
        """A session on the target's own cache, for all its sequences; None where this target is
        another model."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A session that holds something elsewhere, and must hear when it is not needed any more."""

    def close(self) -> None: ...


@runtime_checkable
class Watcher(Protocol):
    """A drafter that wants to know what its drafts have come to."""

    def prefilled(self, target: TargetSession, seconds: float) -> None:
        """The target has read all prompts. It is the session that will verify."""
        ...

    def observe(self, rounds: ListLike[RoundStats]) -> None:
        """A round has ended; one entry for each sequence that was in it."""
        ...


class PreparingSession(Protocol):
    """What a draft worker asks of a drafter, for one sequence. `text` is the sequence's committed
    tokens, and only ever grows."""

    def draft(self, text: list[int], draft_length: int) -> DraftBlock:
        """At most `draft_length` tokens to follow `text`."""
        ...

    def likely_outcomes(self, text: list[int], draft: ListLike[int], budget: int) -> list[Outcome]:
        """At most `budget` verdicts to expect on `draft` behind `text`, the likeliest first."""
        ...

    def prepare(
        self, text: list[int], draft: ListLike[int], outcomes: ListLike[Outcome], draft_length: int
    ) -> dict[Outcome, DraftBlock]:
        """The successor of each outcome, or of fewer."""
        ...


class Preparer(Protocol):
    """A drafter that needs nothing of the target, and so can draft while the target verifies."""

    def open(self, capacity: int, outcome_budget: int) -> PreparingSession:
        """For a sequence of up to `capacity` tokens and passes of up to `outcome_budget`
        outcomes."""
        ...


class DraftTask(NamedTuple):
    """What `PreparingSession.draft` is called with, and which session's."""

    session: PreparingSession
    text: list[int]
    draft_length: int


class PrepareTask(NamedTuple):
    """What `PreparingSession.prepare` is called with, and which session's."""

    session: PreparingSession
    text: list[int]
    draft: ListLike[int]
    outcomes: ListLike[Outcome]
    draft_length: int


@runtime_checkable
class JointPreparer(Preparer, Protocol):
    """A preparer that can work for several sequences in one pass. Its answers are those of the
    sessions alone; each session may have one task at a time."""

    def draft_together(self, tasks: ListLike[DraftTask]) -> list[DraftBlock]: ...

    def prepare_together(self, tasks: ListLike[PrepareTask]) -> list[dict[Outcome, DraftBlock]]: ...


class Transport(Protocol):
    """One end of a line between two parties. Messages arrive whole and in order, or not at all."""

    def send(self, message: object) -> None:
        """Never waits for the other side. Raises Disconnected where the line is known to be
        gone."""
        ...

    def receive(self, timeout_s: float) -> object | None:
        """The next message, None after `timeout_s` seconds without one. Raises Disconnected where
        none can come any more."""
        ...

    def close(self) -> None:
        """The other side will find itself disconnected, once it has read what was sent before."""
        ...


class AcceptanceRule(Protocol):
    """Decides which drafted tokens stand. Pure: the same arguments give the same verdict."""

    def __call__(
        self,
        logits: Tensor,
        draft_tokens: ListLike[int],
        sequence: Sequence,
        eos_token_ids: frozenset[int],
    ) -> Verdict:
        """`logits`: float32 [len(draft_tokens) + 1, vocab_size]; row i follows the committed tokens
        and the first i drafted ones. The verdict is not yet cut by stops."""
        ...
