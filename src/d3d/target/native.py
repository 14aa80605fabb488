"""The default target engine: our own decoder behind the TargetEngine protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from d3d.engine.clock import Span, Stopwatch, cuda_clock
from d3d.model.masks.dense import causal
from d3d.model.transformer import Transformer

PREFILL_ROWS = 1024
"""Rows of a pass, all sequences together, that a long prompt is cut into: small intermediates stay
in memory that is warm."""


class NativeEngine:
    """Runs a `Transformer` as the target."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    def open(self, num_sequences: int, capacity: int) -> NativeSession:
        return NativeSession(self.model, num_sequences, capacity)


class NativeSession:
    """The cache of one generation; see `TargetSession`."""

    def __init__(self, model: Transformer, num_sequences: int, capacity: int) -> None:
        self.model = model
        self.cache = model.new_cache(num_sequences, capacity)
        self._stopwatch = (
            Stopwatch(cuda_clock(model.device)) if model.device.type == "cuda" else None
        )

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @torch.inference_mode()
    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        fed = [row for row, ids in enumerate(token_ids) if ids]
        if not fed:
            return [self._nothing() for _ in token_ids]
        first, end = fed[0], fed[-1] + 1
        if self._stopwatch is not None:
            self._stopwatch.begin()
        with self.cache.only(first, end):  # a sequence that joins others does not make them padding
            logits = self._forward(token_ids[first:end], last_only)
        if self._stopwatch is not None:
            self._stopwatch.end()
        return [
            *(self._nothing() for _ in token_ids[:first]),
            *logits,
            *(self._nothing() for _ in token_ids[end:]),
        ]

    def _nothing(self) -> Tensor:
        return torch.empty((0, self.model.config.vocab_size), device=self.model.device)

    def _forward(self, token_ids: list[list[int]], last_only: bool) -> list[Tensor]:
        outputs: list[list[Tensor]] = [[] for _ in token_ids]
        longest = max(len(ids) for ids in token_ids)
        step = max(32, PREFILL_ROWS // len(token_ids))
        for start in range(0, longest, step):
            chunk = [ids[start : start + step] for ids in token_ids]
            wanted = [
                _wanted_rows(len(part), start + len(part) == len(ids), last_only)
                for part, ids in zip(chunk, token_ids, strict=True)
            ]
            for i, logits in enumerate(self._pass(chunk, wanted)):
                if logits is not None:
                    outputs[i].append(logits)
        return [
            parts[0] if len(parts) == 1 else torch.cat([self._nothing(), *parts])
            for parts in outputs
        ]

    def _pass(self, token_ids: list[list[int]], wanted: list[slice | None]) -> list[Tensor | None]:
        device = self.model.device
        rows = max(len(ids) for ids in token_ids)
        padded = torch.tensor([ids + [0] * (rows - len(ids)) for ids in token_ids], device=device)
        starts = torch.tensor(self.cache.lengths, device=device)
        positions = starts[:, None] + torch.arange(rows, device=device)
        positions.clamp_(max=self.model.config.max_length - 1)  # only padding can reach beyond
        even = rows == 1 and len(set(self.cache.lengths)) == 1
        mask = None if even else causal(starts, rows, self.cache.num_keys(rows))
        hidden = self.model.hidden(self.model.embed(padded), positions, mask, self.cache)
        self.cache.advance([len(ids) for ids in token_ids])
        picked = [hidden[i, rows_i] for i, rows_i in enumerate(wanted) if rows_i is not None]
        if not picked:
            return [None] * len(wanted)
        logits = iter(
            self.model.logits(torch.cat(picked)).float().split([len(part) for part in picked])
        )
        return [None if rows_i is None else next(logits) for rows_i in wanted]

    def pass_span(self) -> Span | None:
        return None if self._stopwatch is None else self._stopwatch.span()

    def crop(self, lengths: list[int]) -> None:
        self.cache.crop(lengths)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)

    def join(self, count: int) -> None:
        self.cache.join(count)


def _wanted_rows(rows: int, is_last: bool, last_only: bool) -> slice | None:
    """Which rows of a pass need logits: all, or only the last of the sequence's last pass."""
    if rows == 0 or (last_only and not is_last):
        return None
    return slice(rows - 1, rows) if last_only else slice(0, rows)
