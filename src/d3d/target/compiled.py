"""A target whose passes run in the C library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from d3d.engine.drafter import Draft, Target
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.hub.names import gguf_file
from d3d.hub.open_model import read_decoder
from d3d.model.config import DecoderConfig
from d3d.model.kv_cache import SPARE_TOKENS
from d3d.model.masks.dense import tree
from d3d.native.native_pass import NativePass

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class CompiledModel:
    """Causal language model run by the C library; see `d3d.hub.open_model.TargetModel`."""

    source: str
    path: Path
    config: DecoderConfig
    passes: NativePass
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        """That of the arithmetic; the weights are as stored."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_tokens(self) -> int:
        return self.config.num_tokens

    @property
    def max_length(self) -> int:
        return self.config.max_length


def open_compiled(source: str) -> CompiledModel:
    """Load a model into the C library: a GGUF file's quantised weights as they are, else the
    tensors of its directory. Raises InvalidCheckpoint, NativeUnavailable."""
    path, config, tokenizer, ends, stored, fingerprint = read_decoder(source)
    file = gguf_file(source)
    passes = (
        NativePass.from_tensors(stored, config)
        if file is None
        else NativePass.from_gguf(file, config)
    )
    return CompiledModel(source, path, config, passes, tokenizer, ends, fingerprint)


class CompiledTarget(Target):
    """Runs a `NativePass` as the target.

    Its logits have equal bits whatever else is in a pass, so ids are equal whatever is drafted or
    batched, near ties included."""

    verifies_trees = True

    def __init__(self, model: NativePass) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        return self.model.config.num_tokens

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
                    self.model.open(request.id, len(request) + SPARE_TOKENS)
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
        masks, positions = None, None
        if any(draft.parents is not None for draft in drafts):
            starts = [self.model.length(sequence_id) for sequence_id in ids]
            trees = [
                None if draft.parents is None else tree(draft.parents, self.device)
                for draft in drafts
            ]
            masks = [
                None if among is None else F.pad(among, (start, 0), value=True)
                for among, start in zip(trees, starts, strict=True)
            ]
            positions = [
                list(range(start, start + len(tokens)))
                if among is None
                else (start + among.sum(-1) - 1).tolist()
                for among, start, tokens in zip(trees, starts, token_ids, strict=True)
            ]
        logits = self.model.forward(ids, token_ids, masks=masks, positions=positions).logits
        assert logits is not None
        return [LogitRows(rows) for rows in logits.split([len(tokens) for tokens in token_ids])]

    def keep_path(self, request: Request, path: Sequence[int]) -> None:
        first = len(request)
        self.model.keep(request.id, first, [first + node for node in path])

    def rewind(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.model.crop(request.id, len(request) - 1)

    def end(self, request: Request) -> None:
        self.model.end(request.id)
