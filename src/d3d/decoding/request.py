"""One request on its way through the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from d3d.acceptance.sampling import validate_params
from d3d.core.protocols import TargetEngine
from d3d.core.sequence import Sequence, TokenCounts
from d3d.core.types import SamplingParams
from d3d.decoding.stopping import StopScanner
from d3d.engine.rng import fresh_seed
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Request:
    """A sequence, and what ends it."""

    sequence: Sequence
    scanner: StopScanner
    eos_token_ids: frozenset[int]

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None


def new_request(
    target: TargetEngine,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    tokenizer: PreTrainedTokenizerFast | None = None,
    device: torch.device | None = None,
) -> Request:
    """Check a request and make it ready. Without a tokenizer it yields ids and no text.

    Raises InvalidRequest for an empty or too long prompt, ids that the target does not know, and
    impossible parameters."""
    if not prompt_ids:
        raise InvalidRequest("prompt: it is empty; give at least one token")
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < target.vocab_size:
            raise InvalidRequest(
                f"prompt: token id {token_id} is not in the target's vocabulary (0 to {target.vocab_size - 1})"
            )
    validate_params(params, target.vocab_size)
    scanner = StopScanner(
        params,
        prompt_length=len(prompt_ids),
        max_length=target.max_length,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
    )
    sequence = Sequence(
        prompt_ids, params, seed=fresh_seed() if params.seed is None else params.seed
    )
    if params.uses_counts:
        sequence.counts = TokenCounts(prompt_ids, target.vocab_size, device or torch.device("cpu"))
    return Request(sequence, scanner, eos_token_ids)
