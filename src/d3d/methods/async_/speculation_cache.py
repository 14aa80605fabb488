"""Prepared successors, by sequence, round and outcome."""

from __future__ import annotations

from d3d.engine.drafter import Draft
from d3d.methods.async_.messages import Successors
from d3d.methods.async_.outcomes import Outcome


class SpeculationCache:
    """Holds the successors of one round per sequence: the expected one. Those of any other round
    are stale: dropped, and counted.

    So it never holds more than `most_blocks` blocks for each sequence that is not forgotten."""

    def __init__(self, most_blocks: int) -> None:
        """most_blocks: successors of a round; more are dropped, the last ones first."""
        self._most_blocks = most_blocks
        self._expected: dict[int, int] = {}
        self._blocks: dict[int, dict[Outcome, Draft]] = {}
        self.num_stale = 0
        """Answers for rounds that were no longer expected."""

    def __len__(self) -> int:
        """Blocks held."""
        return sum(map(len, self._blocks.values()))

    def expect(self, sequence_id: int, round_id: int) -> None:
        """Accept only this round's successors from now on, and drop those of older rounds."""
        self._expected[sequence_id] = round_id
        self._blocks.pop(sequence_id, None)

    def put(self, successors: Successors) -> bool:
        """Store successors; False if they are stale."""
        if self._expected.get(successors.sequence_id) != successors.round_id:
            self.num_stale += 1
            return False
        self._blocks[successors.sequence_id] = dict(successors.blocks[: self._most_blocks])
        return True

    def take(self, sequence_id: int, round_id: int, outcome: Outcome) -> Draft | None:
        """The successor of an outcome, None if there is none. A round has one verdict, so its other
        blocks are dropped."""
        if self._expected.get(sequence_id) != round_id or sequence_id not in self._blocks:
            return None
        block = self._blocks[sequence_id].get(outcome)
        self.forget(sequence_id)
        return block

    def has(self, sequence_id: int, round_id: int) -> bool:
        """True if the round's successors are here, for any outcomes."""
        return self._expected.get(sequence_id) == round_id and sequence_id in self._blocks

    def forget(self, sequence_id: int) -> None:
        self._expected.pop(sequence_id, None)
        self._blocks.pop(sequence_id, None)
