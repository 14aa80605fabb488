"""A target whose passes run in the C library."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.engine.drafter import Draft, Target
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.native.native_pass import NativePass
from d3d.target.native import SPARE_TOKENS


class CompiledTarget(Target):
    """Runs a `NativePass` as the target.

    Its logits have equal bits whatever else is in a pass, so ids are equal whatever is drafted or
    batched, near ties included."""

    def __init__(self, model: NativePass) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    @property
    def num_held(self) -> int:
        return len(self.model)

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        results: list[LogitRows | None] = []
        for request in requests:
            rows = None
            if num_rows > 0:
                if request.id not in self.model:
                    self.model.open(request.id, request.longest + SPARE_TOKENS)
                start = self.model.length(request.id)
                chunk = request.token_ids[start : start + num_rows]
                num_rows -= len(chunk)
                if chunk:
                    is_last = start + len(chunk) == len(request)
                    wanted = [len(chunk) - 1] if is_last else []
                    logits = self.model.forward([request.id], [chunk], wanted=wanted).logits
                    rows = LogitRows(logits) if is_last and logits is not None else None
            results.append(rows)
        return results

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        ids = [request.id for request in requests]
        token_ids = [
            [request.anchor, *draft.token_ids]
            for request, draft in zip(requests, drafts, strict=True)
        ]
        logits = self.model.forward(ids, token_ids).logits
        assert logits is not None
        return [LogitRows(rows) for rows in logits.split([len(tokens) for tokens in token_ids])]

    def rewind(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.model.crop(request.id, len(request) - 1)

    def end(self, request: Request) -> None:
        self.model.end(request.id)
