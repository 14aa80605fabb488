"""A request's tokens. Only `Sequence.commit` extends them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from d3d.core.types import FinishReason, SamplingParams


class TokenCounts:
    """How often each token id occurs in the prompt and in the answer; int32 tensors of shape
    [vocab_size]."""

    def __init__(self, prompt_ids: Iterable[int], vocab_size: int, device: torch.device) -> None:
        ids = torch.tensor(list(prompt_ids), dtype=torch.long, device=device)
        self.prompt = torch.bincount(ids, minlength=vocab_size).to(torch.int32)
        self.answer = torch.zeros_like(self.prompt)

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.answer[token_id] += 1


class Sequence:
    """Prompt plus committed answer of one request."""

    def __init__(self, prompt_ids: list[int], params: SamplingParams, *, seed: int = 0) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.params = params
        self.seed = seed
        self.counts: TokenCounts | None = None
        self.finish_reason: FinishReason | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def anchor(self) -> int:
        """The last committed token."""
        return self.token_ids[-1]

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def answer_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    def commit(self, token_ids: Iterable[int]) -> None:
        """Extend the committed prefix."""
        new = list(token_ids)
        self.token_ids.extend(new)
        if self.counts is not None:
            self.counts.add(new)
