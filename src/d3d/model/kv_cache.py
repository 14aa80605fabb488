"""Key-value cache.

A pass appends its rows' keys and values; the owner of the cache crops what must not stay (rejected
tokens, slots)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from d3d.model.attention import attend

SPARE_TOKENS = 64
"""Room to open a sequence with beyond its first tokens, for the beginning of its answer."""


class KeyValueStore(Protocol):
    """Storage of a pass's keys and values, and attention over them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """query [batch, heads, rows, head_dim], key and value of the pass's rows [batch, kv_heads,
        rows, head_dim], mask as in `d3d.model.attention.attend` -> [batch, rows, heads *
        head_dim]."""
        ...


class KVCache:
    """Keys and values of several sequences, by id.

    It has room for as many tokens of each sequence as the longest holds, and a little more: it
    grows in steps as tokens come, shrinks when sequences have ended, and is freed with the last of
    them. A pass works on a `Window` of it. The cache assigns batch places itself: when a sequence
    ends, the last one takes its place."""

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = num_layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.ids: list[int] = []
        """Sequence ids, in the order of their places."""
        self.lengths: list[int] = []
        """Tokens kept of each sequence, in the same order."""
        self.keys = self.values = self._empty(0, 0)
        """[layers, places, kv_heads, capacity, head_dim]."""

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self.ids

    @property
    def capacity(self) -> int:
        """Tokens for which each sequence has room at present."""
        return self.keys.shape[3]

    def length(self, sequence_id: int) -> int:
        return self.lengths[self.ids.index(sequence_id)]

    def open(self, sequence_id: int, capacity: int = 0) -> None:
        """Begin an empty sequence. capacity: tokens that it will hold soon; it may grow beyond.
        Raises ValueError for an id in use."""
        if sequence_id in self.ids:
            raise ValueError(f"sequence {sequence_id} is in the cache already")
        place, places = len(self.ids), self.keys.shape[1]
        if place == places or capacity > self.capacity:
            wanted = places if place < places else max(1, 2 * places)
            self._resize(wanted, max(capacity, self.capacity))
        else:
            self._clear(place, 0)
        self.ids.append(sequence_id)
        self.lengths.append(0)

    def end(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        if sequence_id not in self.ids:
            return
        place, last = self.ids.index(sequence_id), len(self.ids) - 1
        if place < last:
            length = self.lengths[last]
            self.keys[:, place, :, :length] = self.keys[:, last, :, :length]
            self.values[:, place, :, :length] = self.values[:, last, :, :length]
            self._clear(place, length)
            self.ids[place], self.lengths[place] = self.ids[last], length
        self.ids.pop()
        self.lengths.pop()
        self._shrink()

    def window(self, ids: Sequence[int]) -> Window:
        """Window over these sequences for one pass. It includes sequences that lie between them, so
        check its `ids`. Raises KeyError for an unknown id."""
        try:
            places = [self.ids.index(sequence_id) for sequence_id in ids]
        except ValueError:
            raise KeyError(f"not all of {list(ids)} are in the cache") from None
        return Window(self, min(places), max(places) + 1)

    def crop(self, sequence_id: int, length: int) -> None:
        """Forget a sequence's tokens from `length` on; a longer length changes nothing."""
        place = self.ids.index(sequence_id)
        self.lengths[place] = min(self.lengths[place], length)

    def keep(self, sequence_id: int, start: int, rows: Sequence[int]) -> None:
        """Of a sequence's tokens from `start` on, keep only these, numbered from `start`; they
        close up."""
        place, end = self.ids.index(sequence_id), start + len(rows)
        moved = torch.tensor(rows, device=self.keys.device) + start
        for store in (self.keys, self.values):
            store[:, place, :, start:end] = store[:, place][:, :, moved]
        self.lengths[place] = end

    def clear_behind(self, sequence_id: int) -> None:
        """Erase what rejected tokens and slots left after a sequence's tokens."""
        place = self.ids.index(sequence_id)
        self._clear(place, self.lengths[place])

    def reserve(self, capacity: int) -> None:
        """Make room for this many tokens of each sequence."""
        if capacity > self.capacity:
            self._resize(self.keys.shape[1], max(capacity, self.capacity * 3 // 2))

    def _shrink(self) -> None:
        """Free what ended sequences have left, once less than a quarter is in use."""
        if not self.ids:
            self.keys = self.values = self._empty(0, 0)
            return
        places, longest = len(self.ids), max(self.lengths)
        if 4 * places * longest < self.keys.shape[1] * self.capacity:
            self._resize(places, longest * 3 // 2)

    def _resize(self, places: int, capacity: int) -> None:
        # one after the other, so that both are never there twice
        self.keys = self._resized(self.keys, places, capacity)
        self.values = self._resized(self.values, places, capacity)

    def _resized(self, old: Tensor, places: int, capacity: int) -> Tensor:
        new = self._empty(places, capacity)
        # including rows after the kept tokens: a pass may be under way
        kept = slice(min(capacity, old.shape[3]))
        new[:, : len(self.ids), :, kept] = old[:, : len(self.ids), :, kept]
        return new

    @torch.inference_mode(False)  # a pass that makes it grow may be in it, what comes after not
    def _empty(self, places: int, capacity: int) -> Tensor:
        layers, kv_heads, head_dim = self._shape
        return torch.zeros(
            (layers, places, kv_heads, capacity, head_dim), dtype=self._dtype, device=self._device
        )

    def _clear(self, place: int, length: int) -> None:
        # hidden, but a number that is not finite still counts: 0 * it for values, it - inf for keys
        # (the fused kernels add masks)
        self.keys[:, place, :, length:] = 0
        self.values[:, place, :, length:] = 0


class Window:
    """Neighbouring sequences of a `KVCache`, as one pass reads and writes them.

    Row i of sequence b is stored at index `lengths[b] + i`. The keys reach to the longest
    sequence's last row; a mask hides those that shorter sequences lack."""

    def __init__(self, cache: KVCache, start: int, stop: int) -> None:
        self._cache, self._start, self._stop = cache, start, stop
        self.ids = cache.ids[start:stop]
        self._index = (torch.empty(0), torch.empty(0))
        self._indexed: tuple[tuple[int, ...], int] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens kept of each sequence."""
        return self._cache.lengths[self._start : self._stop]

    def num_keys(self, rows: int) -> int:
        """Keys visible to a pass of this many rows, its own included."""
        return max(self.lengths) + rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        keys, values = self.append(layer, key, value)
        return attend(query, keys, values, mask)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pass's rows after the kept tokens; returns all keys and values to attend to,
        [batch, kv_heads, keys, head_dim]."""
        cache, lengths, rows = self._cache, self.lengths, key.shape[2]
        longest = max(lengths)
        end = longest + rows
        if end > cache.capacity:
            cache.reserve(end)
        keys = cache.keys[layer, self._start : self._stop]
        values = cache.values[layer, self._start : self._stop]
        if min(lengths) == longest:
            keys[:, :, longest:end] = key
            values[:, :, longest:end] = value
        else:
            sequence, place = self._places(lengths, rows)
            keys[sequence, :, place] = key.transpose(1, 2)
            values[sequence, :, place] = value.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _places(self, lengths: list[int], rows: int) -> tuple[Tensor, Tensor]:
        """Index of each sequence's next rows, [batch, 1] and [batch, rows]; computed once per
        pass."""
        wanted = (tuple(lengths), rows)
        if self._indexed != wanted:
            starts = torch.tensor(lengths, device=self._cache.keys.device)[:, None]
            self._index = (
                torch.arange(len(lengths), device=starts.device)[:, None],
                starts + torch.arange(rows, device=starts.device),
            )
            self._indexed = wanted
        return self._index

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` tokens."""
        places = slice(self._start, self._stop)
        return self._cache.keys[layer, places, :, :end], self._cache.values[layer, places, :, :end]

    def advance(self, rows: Sequence[int]) -> None:
        """Keep the first `rows[b]` rows of the last pass for sequence b; the rest will be
        overwritten."""
        self._set([length + n for length, n in zip(self.lengths, rows, strict=True)])

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget each sequence's tokens from `lengths[b]` on; a longer length changes nothing."""
        self._set([min(old, new) for old, new in zip(self.lengths, lengths, strict=True)])

    def _set(self, lengths: list[int]) -> None:
        self._cache.lengths[self._start : self._stop] = lengths


class PassThrough:
    """Store without memory: a pass sees its own rows only, and gradients flow."""

    def attend(
        self,
        layer: int,  # noqa: ARG002 - the protocol's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        return attend(query, key, value, mask)


class Share(NamedTuple):
    """One sequence's share of a pass over several."""

    window: Window
    """Window over this sequence alone."""
    rows: Tensor
    """int64: indices of its rows in the pass, in the order of a pass of its own."""
    num_clean: int
    """Number of its clean rows, which come first; the others are slots."""
    mask: Tensor
    """bool [1, rows, keys] over its own rows and cache."""


class SideBySide:
    """A pass of batch 1 over rows of several sequences, clean rows first, then slots. Each attends
    to its own cache; the mask passed in is ignored."""

    def __init__(self, shares: list[Share]) -> None:
        self._shares = shares
        self._num_clean = sum(share.num_clean for share in shares)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,  # noqa: ARG002 - each share has its own
    ) -> Tensor:
        _, heads, rows, head_dim = query.shape
        out = query.new_empty(1, rows, heads * head_dim)
        for share in self._shares:
            indices, visible = share.rows, share.mask
            if rows == self._num_clean:  # slots skip this layer
                indices = indices[: share.num_clean]
                visible = visible[
                    :, : share.num_clean, : visible.shape[2] - len(share.rows) + share.num_clean
                ]
            keys, values = share.window.append(layer, key[:, :, indices], value[:, :, indices])
            out[:, indices] = attend(query[:, :, indices], keys, values, visible)
        return out
