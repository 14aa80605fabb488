"""Arguments of requests: types of the keyword arguments, for type checkers, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from pydantic import ValidationError

from d3d.engine.params import SamplingParams
from d3d.errors import InvalidRequest, first_problem


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
    """Use the text as is, without the chat template; it may spell control tokens."""
    thinking: bool | None
    """Passed to the chat template as `enable_thinking`."""


def split_options(options: RequestOptions) -> tuple[dict[str, Any], SpeculationOptions]:
    """Split options into sampling fields (everything unrecognised) and speculation options."""
    spec = {name: value for name, value in options.items() if name in _SPECULATION}
    others = {"raw", "thinking", *spec}
    sampling = {name: value for name, value in options.items() if name not in others}
    return sampling, cast("SpeculationOptions", spec)


_SPECULATION = frozenset(SpeculationOptions.__annotations__)


def check_many(prompts: object, per_prompt: Sequence[object] | None, max_batch: object) -> None:
    """Check arguments of `stream_many`. Raises InvalidRequest."""
    if not isinstance(prompts, list | tuple):
        raise InvalidRequest(
            f"prompts: give a list of prompts, not {type(prompts).__name__}; for a single one "
            "there is generate"
        )
    if per_prompt is not None and not (
        isinstance(per_prompt, list | tuple)
        and all(isinstance(each, Mapping) for each in per_prompt)
    ):
        raise InvalidRequest(f"per_prompt: {per_prompt!r} is not a list of mappings")
    if per_prompt is not None and len(per_prompt) != len(prompts):
        raise InvalidRequest(
            f"per_prompt: it has {len(per_prompt)} entries for {len(prompts)} prompts; give one "
            "for each, {} for none"
        )
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise InvalidRequest(f"max_batch: {max_batch!r} is not a whole number of 1 or more")


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Validate sampling parameters. Raises InvalidRequest naming the first unknown or impossible
    field."""
    try:
        return SamplingParams(**fields)
    except ValidationError as error:
        raise InvalidRequest(first_problem(error, SamplingParams.model_fields)) from error
