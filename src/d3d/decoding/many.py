"""Many requests: each is checked before anything is computed, and then they are decoded
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from d3d.decoding.loop import decode
from d3d.decoding.modes import Decoding, Mode, ModeOptions
from d3d.decoding.request import Request
from d3d.decoding.results import Recorder, Settings, StreamChunk
from d3d.errors import InvalidRequest

MODES_OF_MANY: tuple[Mode, ...] = ("plain", "serial", "fused", "async")
DEFAULT_BATCH = 8
"""Requests that are decoded together, unless a number is asked for."""


def check_many(
    prompts: object, per_prompt: Sequence[object] | None, mode: str, max_batch: object
) -> None:
    """Raises InvalidRequest where these can't be what is meant."""
    if not isinstance(prompts, list | tuple):
        raise InvalidRequest(
            f"prompts: give a list of prompts, not {type(prompts).__name__}; for a single one there is generate"
        )
    if per_prompt is not None and len(per_prompt) != len(prompts):
        raise InvalidRequest(
            f"per_prompt: it has {len(per_prompt)} entries for {len(prompts)} prompts; give one for each, {{}} for none"
        )
    if mode not in MODES_OF_MANY:
        raise InvalidRequest(
            f"mode: {mode!r} is not one of those for several requests at once: {', '.join(MODES_OF_MANY)}"
        )
    if not isinstance(max_batch, int) or max_batch < 1:
        raise InvalidRequest(f"max_batch: {max_batch!r} is not a whole number of 1 or more")


def split_options(options: Mapping[str, Any]) -> tuple[ModeOptions, dict[str, Any]]:
    """The options of a mode, and the others: fields of `SamplingParams`."""
    of_mode = {name: value for name, value in options.items() if name in ModeOptions._fields}
    return ModeOptions(**of_mode), {
        name: value for name, value in options.items() if name not in of_mode
    }


def each_request(
    make: Callable[[Any, dict[str, Any]], Request],
    prompts: Sequence[object],
    shared: Mapping[str, Any],
    per_prompt: Sequence[Mapping[str, Any]] | None,
) -> list[Request]:
    """`make`: (prompt, sampling fields) -> request. Raises InvalidRequest that names the first
    prompt with which something is wrong."""
    requests = []
    for index, (prompt, own) in enumerate(
        zip(prompts, per_prompt or [{}] * len(prompts), strict=True)
    ):
        try:
            requests.append(make(prompt, {**shared, **own}))
        except InvalidRequest as error:
            raise InvalidRequest(
                f"prompts[{index}]: {str(error).removeprefix('prompt: ')}"
            ) from error
    return requests


def answer_together(
    chosen: Decoding, requests: list[Request], settings: Sequence[Settings], max_batch: int
) -> Iterator[tuple[int, StreamChunk]]:
    """Pieces of the answers as they come, each with the index of its request. All clocks start with
    the first."""
    recorders = [
        Recorder(request.sequence.prompt_length, each)
        for request, each in zip(requests, settings, strict=True)
    ]
    for event in decode(
        chosen.target, chosen.drafter, requests, chosen.draft_length, max_batch=max_batch
    ):
        yield event.index, recorders[event.index].add(event)
