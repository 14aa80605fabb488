"""Types of a request's keyword arguments, so that type checkers see every option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    min_tokens: int
    max_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None


class SpeculationOptions(TypedDict, total=False):
    """Options of the methods (`d3d.config`), under d3d's names and those of vLLM and
    transformers."""

    method: str | None
    mode: str | None
    """Alias of method."""
    draft_length: int | None
    num_denoise_steps: int | None
    draft_confidence: float | None
    lookup: int | None
    least_kept: float | None
    rows: int | None
    outcomes: int | None
    miss_policy: str | None
    placement: str | None
    prompt_lookup_min: int | None
    prompt_lookup_max: int | None
    num_speculative_tokens: int | None
    num_assistant_tokens: int | None
    assistant_confidence_threshold: float | None
    prompt_lookup_num_tokens: int | None
    """Name in transformers: number of tokens that prompt lookup drafts."""
    speculative_config: Mapping[str, Any] | str | None


class RequestOptions(SamplingOptions, SpeculationOptions, total=False):
    """Options of a request."""

    raw: bool
    """Use the text as is, without the chat template."""
    thinking: bool | None
    """Passed to the chat template as `enable_thinking`."""


def split_options(options: RequestOptions) -> tuple[dict[str, Any], SpeculationOptions]:
    """Split options into sampling fields (everything unrecognised) and speculation options."""
    spec = {name: value for name, value in options.items() if name in _SPECULATION}
    others = {"raw", "thinking", *spec}
    sampling = {name: value for name, value in options.items() if name not in others}
    return sampling, cast("SpeculationOptions", spec)


_SPECULATION = frozenset(SpeculationOptions.__annotations__)
