"""Keys and values of the tokens seen so far.

A pass appends its rows' keys and values; whoever owns the cache crops what must not stay (rejected
tokens, slots)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from d3d.model.attention import attend


class KeyValueStore(Protocol):
    """Where a pass's keys and values go, and what its queries attend to."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """query [batch, heads, rows, head_dim], key and value of the pass's rows [batch, kv_heads,
        rows, head_dim], mask as in `d3d.model.attention.attend` -> [batch, rows, heads *
        head_dim]."""
        ...


class KVCache:
    """Fixed room for `capacity` tokens of each of `batch` sequences, whose lengths may differ.
    Where some have gone, others may join.

    Sequence b's row i of a pass lands at index `lengths[b] + i`. During a pass the keys reach to
    the longest sequence's last row; a mask hides what is not there for the others."""

    def __init__(
        self,
        num_layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, batch, kv_heads, capacity, head_dim)
        self._all_keys = self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._all_values = self._values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch
        self.sequence_ids = list(range(batch))
        """Which sequence each row holds: they are counted, those that it began with first."""
        self._next_id = batch
        self._index = (torch.empty(0), torch.empty(0))
        self._indexed: tuple[tuple[int, ...], int] | None = None

    @property
    def capacity(self) -> int:
        return self._keys.shape[3]

    def num_keys(self, rows: int) -> int:
        """Keys that a pass of this many rows can look at, itself included."""
        return max(self.lengths) + rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        keys, values = self.append(layer, key, value)
        return attend(query, keys, values, mask)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pass's rows behind what is there; all keys and values to attend to, [batch,
        kv_heads, keys, head_dim]."""
        rows = key.shape[2]
        end = self.num_keys(rows)
        if end > self.capacity:
            raise IndexError(f"the cache holds {self.capacity} tokens a sequence, {end} are needed")
        keys, values = self._keys[layer], self._values[layer]
        if min(self.lengths) == max(self.lengths):
            keys[:, :, end - rows : end] = key
            values[:, :, end - rows : end] = value
        else:
            sequence, place = self._places(rows)
            keys[sequence, :, place] = key.transpose(1, 2)
            values[sequence, :, place] = value.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _places(self, rows: int) -> tuple[Tensor, Tensor]:
        """Index of each sequence's next rows, [batch, 1] and [batch, rows]; made once a pass."""
        wanted = (tuple(self.lengths), rows)
        if self._indexed != wanted:
            starts = torch.tensor(self.lengths, device=self._keys.device)[:, None]
            self._index = (
                torch.arange(len(self.lengths), device=starts.device)[:, None],
                starts + torch.arange(rows, device=starts.device),
            )
            self._indexed = wanted
        return self._index

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` cache places."""
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, rows: list[int]) -> None:
        """Keep the first `rows[b]` rows of the last pass for sequence b; the rest will be
        overwritten."""
        self.lengths = [length + n for length, n in zip(self.lengths, rows, strict=True)]

    def crop(self, lengths: list[int]) -> None:
        """Forget each sequence's tokens from `lengths[b]` on; a length beyond what is cached
        changes nothing."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order. In place: none may move to a higher row. Raises
        ValueError."""
        if any(row < place for place, row in enumerate(rows)):
            raise ValueError(f"rows can only move to the front: {rows}")
        for place, row in enumerate(rows):
            if row > place:
                length = self.lengths[row]
                self._keys[:, place, :, :length] = self._keys[:, row, :, :length]
                self._values[:, place, :, :length] = self._values[:, row, :, :length]
                self._clear(place, length)
        self.lengths = [self.lengths[row] for row in rows]
        self.sequence_ids = [self.sequence_ids[row] for row in rows]
        self._use(0, len(rows))

    def join(self, count: int) -> None:
        """Empty sequences behind the others, where some have gone. Raises IndexError where there is
        no room for them."""
        before, batch = len(self.lengths), self._all_keys.shape[1]
        if before + count > batch:
            raise IndexError(f"the cache holds {batch} sequences, {before + count} are needed")
        self.lengths = [*self.lengths, *[0] * count]
        self.sequence_ids = [*self.sequence_ids, *range(self._next_id, self._next_id + count)]
        self._next_id += count
        self._use(0, before + count)
        for row in range(before, before + count):
            self._clear(row, 0)

    @contextmanager
    def only(self, start: int, stop: int) -> Iterator[None]:
        """Meanwhile passes, lengths and crops are those of sequences start to stop - 1 alone; the
        others are spared the work."""
        lengths = self.lengths
        self.lengths = lengths[start:stop]
        self._use(start, stop)
        try:
            yield
        finally:
            self.lengths = [*lengths[:start], *self.lengths, *lengths[stop:]]
            self._use(0, len(lengths))

    def _use(self, start: int, stop: int) -> None:
        self._keys, self._values = self._all_keys[:, start:stop], self._all_values[:, start:stop]
        self._indexed = None

    def clear_behind(self, row: int) -> None:
        """Forget what rejected tokens and slots have left behind a sequence's tokens."""
        self._clear(row, self.lengths[row])

    def _clear(self, row: int, length: int) -> None:
        # hidden, but a number that is not finite still counts: 0 * it for values, it - inf for keys
        # (the fused kernels add masks)
        self._keys[:, row, :, length:] = 0
        self._values[:, row, :, length:] = 0


class PassThrough:
    """No memory: a pass sees its own rows only, and gradients flow."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        return attend(query, key, value, mask)


class Share(NamedTuple):
    """What one sequence has of a pass that it shares with others."""

    cache: KVCache
    """Of this sequence alone."""
    rows: Tensor
    """int64: which of the pass's rows are its own, in the order of a pass of its own."""
    num_clean: int
    """How many of them are clean, the first ones; the others are slots."""
    mask: Tensor
    """bool [1, rows, keys] over its own rows and its own cache's places."""


class SideBySide:
    """A pass of batch 1 over rows of several sequences, clean rows first, then slots. Each attends
    to its own cache; the pass's own mask is not looked at."""

    def __init__(self, shares: list[Share]) -> None:
        self._shares = shares
        self._num_clean = sum(share.num_clean for share in shares)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        _, heads, rows, head_dim = query.shape
        out = query.new_empty(1, rows, heads * head_dim)
        for share in self._shares:
            own, visible = share.rows, share.mask
            if rows == self._num_clean:  # slots pass this layer by
                own = own[: share.num_clean]
                visible = visible[
                    :, : share.num_clean, : visible.shape[2] - len(share.rows) + share.num_clean
                ]
            keys, values = share.cache.append(layer, key[:, :, own], value[:, :, own])
            out[:, own] = attend(query[:, :, own], keys, values, visible)
        return out
