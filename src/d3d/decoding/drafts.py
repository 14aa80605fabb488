"""The drafting half of a round: who still drafts, and which blocks the target may see."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import NamedTuple

from d3d.core.protocols import Closable, Drafter, DraftSession, SelfDrafter, TargetSession, Watcher
from d3d.core.types import DraftBlock, RoundStats
from d3d.decoding.request import Request

NO_DRAFT = DraftBlock()


class Limits(NamedTuple):
    """What blocks must keep to, and how many requests there are at a time."""

    draft_length: int
    """Most tokens a block."""
    capacity: int
    """Tokens that a sequence and its draft can come to."""
    vocab_size: int
    batch: int
    """Most requests that draft together."""


class Drafts:
    """A drafter's session for the requests that still draft.

    Those that are new join it. Those that have ended leave, and so does a request whose block was
    faulty; when the drafter itself fails, all do, and no other drafts any more. The session is
    opened when the first block is wanted, so the first token waits for no drafter."""

    def __init__(self, drafter: Drafter, target: TargetSession, limits: Limits) -> None:
        """`target`: the session that verifies the blocks."""
        self._drafter = drafter
        self._target = target
        self._session: DraftSession | None = None
        self._members: list[Request] = []
        self._seen: set[int] = set()
        """Everybody who has been a member, by identity."""
        self._limits = limits
        self._faulty: set[int] = set()
        self._failure: DraftBlock | None = None

    def blocks(self, requests: ListLike[Request]) -> list[DraftBlock]:
        """One block for each of `requests`, the target's sequences in their order; an empty one
        where nothing is drafted. A fault is told once."""
        try:
            blocks = self._draft(requests)
        except Exception as error:  # whatever a drafter dies of, the answers go on
            self._failure = DraftBlock(fault=f"the drafter failed: {type(error).__name__}: {error}")
            blocks = [self._failure for _ in self._members]
        self._faulty = {row for row, block in enumerate(blocks) if block.fault is not None}
        drafted = {id(member): block for member, block in zip(self._members, blocks, strict=True)}
        return [drafted.get(id(request), NO_DRAFT) for request in requests]

    def prefilled(self, seconds: float) -> None:
        """Tell a drafter that wants to know how long the prompts took."""
        if isinstance(self._drafter, Watcher):
            self._drafter.prefilled(self._target, seconds)

    def observe(self, rounds: ListLike[RoundStats]) -> None:
        """Tell it what a round came to."""
        if isinstance(self._drafter, Watcher):
            self._drafter.observe(rounds)

    def close(self) -> None:
        """Let the session go, whether or not its requests have ended."""
        session, self._session = self._session, None
        if isinstance(session, Closable):
            session.close()

    def _draft(self, requests: ListLike[Request]) -> list[DraftBlock]:
        self._change_members(requests)
        if self._failure is not None:
            return [self._failure for _ in self._members]
        # The bonus token comes on top, so a last token needs no draft.
        lengths = [
            min(self._limits.draft_length, member.scanner.remaining - 1) for member in self._members
        ]
        if max(lengths, default=0) < 1:
            return [NO_DRAFT for _ in self._members]
        if self._session is None:
            self._session = self._open(requests)
        blocks = self._session.draft([member.sequence for member in self._members], lengths)
        return [
            _checked(block, length, self._limits.vocab_size)
            for block, length in zip(blocks, lengths, strict=True)
        ]

    def _open(self, requests: ListLike[Request]) -> DraftSession:
        members = set(map(id, self._members))
        rows = [row for row, request in enumerate(requests) if id(request) in members]
        self._members = [requests[row] for row in rows]
        session = (
            self._drafter.open_beside(self._target)
            if isinstance(self._drafter, SelfDrafter)
            else None
        )
        room = len(requests)
        if session is None:
            session, room, rows = (
                self._drafter.open(self._limits.batch, self._limits.capacity),
                self._limits.batch,
                list(range(len(rows))),
            )
        if len(rows) < room:
            session.keep(rows)
        return session

    def _change_members(self, requests: ListLike[Request]) -> None:
        staying = without_holes(
            [
                not member.finished and row not in self._faulty
                for row, member in enumerate(self._members)
            ]
        )
        joining = [
            request for request in requests if id(request) not in self._seen
        ]  # in the target's session they are the last ones
        have_left = len(staying) < len(self._members)
        self._members = [*(self._members[row] for row in staying), *joining]
        self._seen |= set(map(id, joining))
        if not self._members or self._failure is not None:
            self.close()
        if self._session is None:
            return
        if have_left:
            self._session.keep(staying)
        if joining:
            self._session.join(len(joining))


def without_holes(alive: ListLike[bool]) -> list[int]:
    """The living rows, in an order that moves as few as possible: the last ones fill the holes."""
    living = [row for row, lives in enumerate(alive) if lives]
    count = len(living)
    spare = [row for row in living if row >= count]
    return [row if alive[row] else spare.pop() for row in range(count)]


def _checked(block: DraftBlock, length: int, vocab_size: int) -> DraftBlock:
    """Only ids that the target knows may reach it, and no more than were asked for."""
    if any(not 0 <= token_id < vocab_size for token_id in block.token_ids):
        return DraftBlock(
            fault=f"the drafter proposed an id outside of the target's vocabulary of {vocab_size}"
        )
    return block._replace(token_ids=block.token_ids[:length])
