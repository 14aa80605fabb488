"""The default target: our own decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from d3d.engine.clock import Span, Stopwatch, cuda_clock
from d3d.engine.drafter import NO_DRAFT, Draft, Target
from d3d.engine.engine import PREFILL_ROWS
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.model.drafter import DrafterModel
from d3d.model.finite import cause_of
from d3d.model.from_target import clean_rows_are_of
from d3d.model.kv_cache import SPARE_TOKENS, KVCache, Window
from d3d.model.masks.dense import causal, tree
from d3d.model.transformer import Transformer

NO_TREES: Mapping[int, Sequence[int]] = {}


class NativeTarget(Target):
    """Runs a `Transformer` as the target."""

    verifies_trees = True

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache = model.new_cache()
        self._stopwatch = (
            Stopwatch(cuda_clock(model.device)) if model.device.type == "cuda" else None
        )

    @property
    def vocab_size(self) -> int:
        return self.model.config.num_tokens

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_held(self) -> int:
        return len(self.cache)

    def cache_for(self, model: DrafterModel) -> KVCache | None:
        return self.cache if clean_rows_are_of(model, self.model) else None

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        results: list[LogitRows | None] = []
        for request in requests:
            rows = None
            if num_rows > 0:
                if request.id not in self.cache:
                    self.cache.open(request.id, len(request) + SPARE_TOKENS)
                start = self.cache.length(request.id)
                chunk = request.token_ids[start : start + num_rows]
                num_rows -= len(chunk)
                is_last = start + len(chunk) == len(request)
                rows = self.forward([request.id], [chunk], last_only=True)[0] if chunk else None
                rows = rows if is_last else None
            results.append(rows)
        return results

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        return self.forward(
            [request.id for request in requests],
            [
                [request.anchor, *draft.token_ids]
                for request, draft in zip(requests, drafts, strict=True)
            ],
            trees={
                request.id: draft.parents
                for request, draft in zip(requests, drafts, strict=True)
                if draft.parents is not None
            },
        )

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int],
        token_ids: Sequence[list[int]],
        *,
        last_only: bool = False,
        trees: Mapping[int, Sequence[int]] = NO_TREES,
    ) -> list[LogitRows]:
        """Append tokens to sequences; returns the logits of all new rows, or of each sequence's
        last. An unknown id begins a sequence. trees: by id, parents of the tokens after the first
        if they are no chain."""
        for sequence_id, tokens in zip(ids, token_ids, strict=True):
            if sequence_id not in self.cache:
                self.cache.open(sequence_id, len(tokens) + SPARE_TOKENS)
        window = self.cache.window(ids)
        by_id = dict(zip(ids, token_ids, strict=True))
        fed = [by_id.get(sequence_id, []) for sequence_id in window.ids]
        place = {sequence_id: row for row, sequence_id in enumerate(window.ids)}
        with self.timed():
            hidden = self._hidden(window, fed, trees)
            picked = [
                hidden[place[sequence_id], len(tokens) - 1 if last_only else 0 : len(tokens)]
                for sequence_id, tokens in zip(ids, token_ids, strict=True)
            ]
            logits = self.model.logits(torch.cat(picked) if len(picked) > 1 else picked[0])
            logits = logits[:, : self.vocab_size]
        window.advance([len(tokens) for tokens in fed])
        return [LogitRows(rows) for rows in logits.split([len(part) for part in picked])]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a pass on the device, for `pass_span`."""
        if self._stopwatch is None:
            yield
            return
        self._stopwatch.begin()
        yield
        self._stopwatch.end()

    def _hidden(
        self, window: Window, token_ids: list[list[int]], trees: Mapping[int, Sequence[int]]
    ) -> Tensor:
        """token_ids: new tokens of each sequence of the window, possibly none."""
        device = self.model.device
        rows = max(len(tokens) for tokens in token_ids)
        lengths = window.lengths
        padded = torch.tensor(
            [tokens + [0] * (rows - len(tokens)) for tokens in token_ids], device=device
        )
        starts = torch.tensor(lengths, device=device)
        positions = starts[:, None] + torch.arange(rows, device=device)
        even = rows == 1 and min(lengths) == max(lengths)
        mask = None if even else causal(starts, rows, window.num_keys(rows))
        for sequence_id, parents in trees.items():
            assert mask is not None  # a tree has two rows or more
            row = window.ids.index(sequence_id)
            among = tree(parents, device)
            start, size = lengths[row], len(among)
            mask[row, :size, start : start + size] = among
            positions[row, :size] = start + among.sum(-1) - 1
        positions.clamp_(max=self.model.config.max_length - 1)  # only padding can exceed it
        return self.model.hidden(self.model.embed(padded), positions, mask, window)

    def keep_path(self, request: Request, path: Sequence[int]) -> None:
        self.cache.keep(request.id, len(request), path)

    def verify_again(self, request: Request) -> LogitRows:
        self.rewind([request])
        self.cache.clear_behind(request.id)
        return self.verify([request], [NO_DRAFT])[0]

    def diagnose(self, request: Request) -> str:
        def run() -> None:
            again, ids = NativeTarget(self.model), request.token_ids
            for start in range(0, len(ids), PREFILL_ROWS):
                again.forward([0], [ids[start : start + PREFILL_ROWS]], last_only=True)

        return cause_of(self.model, run)

    def rewind(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.cache.crop(request.id, len(request) - 1)

    def end(self, request: Request) -> None:
        self.cache.end(request.id)

    def pass_span(self) -> Span | None:
        return None if self._stopwatch is None else self._stopwatch.span()
