"""Visibility rules: predicates over a query and a key, and the unions of them that d3d uses.

The same predicate serves the dense mask, the element-wise reference and FlexAttention: each takes
`Rows` whose fields broadcast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

BlockAttention = Literal["causal", "bidirectional"]

CLEAN = -1
"""`block` of a clean token; slots have 0, 1, 2, ..."""

TRUNK = 0
"""`document` of rows that all branches of a packed pass share; branch i's own rows have i + 1."""

GUESS = 1 << 20
"""Offset of a guess slot's `block` from that of the block it sees. No row sees a guess slot."""

NOWHERE = 1 << 40
"""Position of a key that no row sees: an empty cache place, or padding."""


@dataclass(frozen=True)
class Rows:
    """Fields of rows from which masks are computed; int64 tensors of one shape (or shapes that
    broadcast)."""

    position: Tensor
    """Place in the text."""
    anchor: Tensor
    """Slots: position of their block's anchor. Clean tokens: their own position."""
    block: Tensor
    """CLEAN, or the number of the block that a slot belongs to."""
    document: Tensor
    """Document number; packed texts never see each other."""

    def __getitem__(self, index: Any) -> Rows:
        return Rows(
            self.position[index], self.anchor[index], self.block[index], self.document[index]
        )

    @staticmethod
    def concatenate(*parts: Rows) -> Rows:
        """Join along the last dimension."""

        def join(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts], dim=-1)

        return Rows(join("position"), join("anchor"), join("block"), join("document"))

    @staticmethod
    def clean(position: Tensor) -> Rows:
        return Rows(
            position, position, torch.full_like(position, CLEAN), torch.zeros_like(position)
        )


Rule = Callable[[Rows, Rows], Tensor]
"""(query, key) -> bool, element-wise with broadcasting."""


def clean_sees_clean(query: Rows, key: Rows) -> Tensor:
    """Clean tokens are causal and never see slots."""
    return (
        (query.block == CLEAN)
        & (key.block == CLEAN)
        & (key.position <= query.position)
        & (key.document == query.document)
    )


def slot_sees_clean(query: Rows, key: Rows) -> Tensor:
    """Slots see the clean tokens up to and including their anchor."""
    return (
        (query.block != CLEAN)
        & (key.block == CLEAN)
        & (key.position <= query.anchor)
        & (key.document == query.document)
    )


def slot_sees_block(query: Rows, key: Rows) -> Tensor:
    """Slots see all slots of their own block."""
    return (query.block != CLEAN) & (key.block == query.block) & (key.document == query.document)


def slot_sees_earlier(query: Rows, key: Rows) -> Tensor:
    """Slots see the earlier slots of their own block, and themselves."""
    return slot_sees_block(query, key) & (key.position <= query.position)


def branch_sees_trunk(query: Rows, key: Rows) -> Tensor:
    """A branch's anchor and slots see the trunk's clean tokens before that anchor."""
    return (
        (query.document != TRUNK)
        & (key.document == TRUNK)
        & (key.block == CLEAN)
        & (key.position < query.anchor)
    )


def guess_sees_block(query: Rows, key: Rows) -> Tensor:
    """A guess slot sees all slots of its block."""
    return (
        (key.block != CLEAN) & (query.block == key.block + GUESS) & (key.document == query.document)
    )


def packed_rules(attention: BlockAttention) -> tuple[Rule, ...]:
    """Rules of a packed pass: those of one block, and those that branches add."""
    return (*block_rules(attention), branch_sees_trunk, guess_sees_block)


def block_rules(attention: BlockAttention) -> tuple[Rule, ...]:
    """The rules whose union is the drafter's mask."""
    return (
        clean_sees_clean,
        slot_sees_clean,
        slot_sees_earlier if attention == "causal" else slot_sees_block,
    )


def union(rules: tuple[Rule, ...]) -> Rule:
    def any_of(query: Rows, key: Rows) -> Tensor:
        seen = rules[0](query, key)
        for rule in rules[1:]:
            seen = seen | rule(query, key)
        return seen

    return any_of
