"""The Python interface: `d3d.load(...)`, then `.generate(...)` or `.stream(...)`.

>>> model = d3d.load("smollm2-135m")
>>> model.generate("What is the capital of France?").text
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from pydantic import ValidationError

from d3d.core.protocols import TargetEngine
from d3d.core.types import SamplingParams
from d3d.decoding.auto import AutoDrafter
from d3d.decoding.auto_modes import USUAL_ROWS, Surroundings, auto_decoding
from d3d.decoding.loop import decode
from d3d.decoding.many import (
    DEFAULT_BATCH,
    answer_together,
    check_many,
    each_request,
    split_options,
)
from d3d.decoding.mode_choice import ModeTimes
from d3d.decoding.modes import (
    DEFAULT_FUSED_DRAFT_LENGTH,
    AsyncOptions,
    Decoding,
    ModeOptions,
    decoding,
)
from d3d.decoding.modes import MODES as MODES
from d3d.decoding.preset_choices import choices_of, filled_in, usual_mode
from d3d.decoding.request import Request, new_request
from d3d.decoding.results import GenerationResult, Recorder, Settings, StreamChunk
from d3d.drafting.block_drafter import BlockDrafter
from d3d.drafting.fused_budget import best_rows
from d3d.errors import InvalidRequest
from d3d.hub.chat import encode_chat
from d3d.hub.checkpoint import read_config
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.names import drafter_of, resolve_drafter
from d3d.hub.open_drafter import ready_apart, ready_drafters
from d3d.hub.open_model import OpenModel, TargetModel, open_model
from d3d.hub.presets import PRESETS, Preset, PresetFile
from d3d.methods.async_.async_drafter import AsyncDrafter
from d3d.methods.async_.auto_placement import room_for_worker
from d3d.methods.async_.coordinator import MissPolicy, Policy
from d3d.methods.async_.opening import Running, open_coordinator
from d3d.methods.async_.placement import available_cores, default_placement
from d3d.model.int8 import precision
from d3d.model.linear import pack_weights
from d3d.target.native import NativeEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, str]]
ENGINES = ("native", "transformers")
Prompt = str | Messages | list[int]


@dataclass(frozen=True)
class Model:
    """A target and, unless it only decodes plainly, a drafter."""

    target: TargetModel
    engine: TargetEngine
    drafter: BlockDrafter | None
    preset: Preset | None = None
    """Whose target and drafter these are."""
    drafter_path: Path | None = None
    """The checkpoint that the drafter came from; async mode with `placement="processes"` loads it
    again."""
    choices: PresetFile | None = None
    """How it decodes where a request does not say: those of a preset file."""
    _running: dict[str, Running] = field(default_factory=dict, repr=False, compare=False)
    """Async mode's, by placement."""
    _times: dict[ModeOptions, dict[int, ModeTimes]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What auto mode has measured, by options."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.target.tokenizer

    @property
    def engine_name(self) -> str:
        return "native" if isinstance(self.engine, NativeEngine) else "transformers"

    @property
    def dtype_name(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def quantize(self) -> str | None:
        """What the linear weights are rounded to; None: they are the checkpoint's, in this
        dtype."""
        return self.target.quantize if isinstance(self.target, OpenModel) else None

    @property
    def precision(self) -> str:
        """What is computed in, and with which weights, for a reader."""
        return precision(self.dtype_name, self.quantize)

    @property
    def device_name(self) -> str:
        return str(self.target.device)

    @cached_property
    def drafter_fingerprint(self) -> str | None:
        """Identity of the drafter's weights, configuration and draft vocabulary, hex; None where
        there is no drafter."""
        if self.drafter is None:
            return None
        model = self.drafter.model
        parts = [weights_fingerprint(model.trainable()), model.config.model_dump_json()]
        if model.draft_ids is not None:
            parts.append(str(model.draft_ids.tolist()))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @cached_property
    def fused_rows(self) -> int:
        """Rows of a fused pass that take least time per token: the preset's, or measured here
        once."""
        assert self.drafter is not None
        assert isinstance(self.engine, NativeEngine), "other engines have no fused mode"
        if self.preset is not None and self.preset.fused_rows is not None:
            return self.preset.fused_rows
        longest = self.drafter.model.config.longest_slot_draft
        return best_rows(self.engine, self.drafter.model, min(DEFAULT_FUSED_DRAFT_LENGTH, longest))

    @property
    def default_mode(self) -> str:
        """That of a request which names none: the preset file's, else serial where there is a
        drafter."""
        return usual_mode(self.choices, has_drafter=self.drafter is not None)

    def options(self, mode: str, options: ModeOptions) -> ModeOptions:
        """Options of a request in this mode: its own, and what it leaves open as the preset file
        has it, where that is of the same mode; see `filled_in` for auto mode."""
        return filled_in(self.choices, mode, options, has_drafter=self.drafter is not None)

    def decoding(self, mode: str, options: ModeOptions) -> Decoding:
        """What the loop is given for a mode; in auto mode for one generation. Raises
        InvalidRequest."""
        options = self.options(mode, options)
        if mode == "auto":
            return auto_decoding(self.engine, self.drafter, options, self._surroundings(options))
        return decoding(
            mode, self.engine, self.drafter, options, lambda: self.fused_rows, self._open_async
        )

    def _surroundings(self, options: ModeOptions) -> Surroundings:
        measured = self.__dict__.get(
            "fused_rows"
        )  # auto mode does not measure rows, but takes what has been measured
        preset = None if self.preset is None else self.preset.fused_rows
        room = room_for_worker(
            self.target.device, len(available_cores()), is_stored=self.drafter_path is not None
        )
        times = self._times.setdefault(options, {})
        return Surroundings(
            preset or measured or USUAL_ROWS, self._open_async, room.placement, room.reason, times
        )

    def encode(
        self, prompt: str | Messages | list[int], *, raw: bool = False, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a prompt: a user's turn, a conversation (both through the chat template),
        text as it is (`raw`), or ids.

        `thinking` is handed to the chat template as `enable_thinking`. Raises InvalidRequest for an
        empty prompt, and for `raw` or `thinking` where they mean nothing."""
        if isinstance(prompt, str):
            check_prompt(prompt, raw=raw)
        elif not isinstance(prompt, list):
            raise InvalidRequest(
                f"prompt: give text, a list of messages or a list of token ids, not {type(prompt).__name__}"
            )
        elif raw:
            raise InvalidRequest(
                "raw: it is for text; messages go through the chat template, and token ids are taken as they are"
            )
        if isinstance(prompt, str) and not raw:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return encode_chat(self.tokenizer, prompt, thinking=thinking)
        if thinking is not None:
            raise InvalidRequest(
                "thinking: it is a switch of the chat template, which this prompt does not go through"
            )
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not all(isinstance(token_id, int) for token_id in prompt):
            raise InvalidRequest(
                "prompt: a list holds messages (role and content) or token ids, nothing else"
            )
        return list(cast("list[int]", prompt))

    def generate(self, prompt: str | Messages | list[int], **options: Any) -> GenerationResult:
        """The whole answer; options as for `stream`."""
        result = None
        for chunk in self.stream(prompt, **options):
            result = chunk.result
        assert result is not None, "the last chunk carries the result"
        return result

    def stream(
        self,
        prompt: str | Messages | list[int],
        *,
        mode: str | None = None,
        draft_length: int | None = None,
        num_denoise_steps: int | None = None,
        rows: int | None = None,
        outcomes: int | None = None,
        miss_policy: str | None = None,
        placement: str | None = None,
        draft_confidence: float | None = None,
        lookup: int | None = None,
        least_kept: float | None = None,
        raw: bool = False,
        thinking: bool | None = None,
        **sampling: Any,
    ) -> Iterator[StreamChunk]:
        """Answer piece by piece: the first token at once, then one chunk a round.

        mode: "plain", "serial", "fused", "async" or "auto" (default: `default_mode`). draft_length,
        num_denoise_steps, rows, outcomes, miss_policy, placement, draft_confidence, lookup,
        least_kept: see `ModeOptions`. sampling: fields of `SamplingParams`. Raises InvalidRequest
        before anything is computed; the clock starts when the first chunk is asked for. The first
        request in async mode starts a draft worker and waits for it (WorkerFailed where it does not
        come up), which `close` ends."""
        mode = mode or self.default_mode
        of_mode = ModeOptions(
            draft_length,
            num_denoise_steps,
            rows,
            outcomes,
            miss_policy,
            placement,
            draft_confidence,
            lookup,
            least_kept,
        )
        options = self.options(mode, of_mode)
        request = self._request(prompt, sampling, raw=raw, thinking=thinking)
        chosen = self.decoding(mode, options)
        return self._run(request, chosen, self._settings(mode, chosen, options, request, thinking))

    def generate_many(self, prompts: Sequence[Prompt], **options: Any) -> list[GenerationResult]:
        """All answers, in the order of the prompts; options as for `stream_many`."""
        results = {
            index: chunk.result
            for index, chunk in self.stream_many(prompts, **options)
            if chunk.result is not None
        }
        return [results[index] for index in range(len(prompts))]

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        *,
        max_batch: int = DEFAULT_BATCH,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        mode: str | None = None,
        raw: bool = False,
        thinking: bool | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, StreamChunk]]:
        """Answers piece by piece as they come, each piece with the index of its prompt; each answer
        is what `generate` gives.

        At most `max_batch` requests are verified in one batch and drafted for in one pass; when one
        has ended, the next joins the others. options: those of `stream`, for all of them;
        per_prompt: sampling fields of each prompt, which override them. Raises as `stream` does,
        and names the prompt. All clocks start with the first piece, so that ttft_s has the time
        spent waiting for a place in it."""
        mode = mode or self.default_mode
        check_many(prompts, per_prompt, mode, max_batch)
        asked, shared = split_options(options)
        of_mode = self.options(mode, asked)
        requests = each_request(
            partial(self._request, raw=raw, thinking=thinking), prompts, shared, per_prompt
        )
        chosen = self.decoding(mode, of_mode)
        return answer_together(
            chosen,
            requests,
            [self._settings(mode, chosen, of_mode, one, thinking) for one in requests],
            max_batch,
        )

    def _request(
        self, prompt: Prompt, sampling: dict[str, Any], *, raw: bool, thinking: bool | None
    ) -> Request:
        params = sampling_params(sampling)
        return new_request(
            self.engine,
            self.encode(prompt, raw=raw, thinking=thinking),
            params,
            eos_token_ids=self.target.eos_token_ids,
            tokenizer=self.tokenizer,
            device=self.target.device,
        )

    def _settings(
        self,
        mode: str,
        chosen: Decoding,
        options: ModeOptions,
        request: Request,
        thinking: bool | None,
    ) -> Settings:
        """What the request's result says of what was asked for."""
        seed = None if request.sequence.params.greedy else request.sequence.seed
        report = chosen.drafter.report if isinstance(chosen.drafter, AutoDrafter) else None
        return Settings(
            mode,
            chosen.draft_length,
            options.num_denoise_steps or 1,
            seed,
            thinking,
            self.quantize,
            report,
            looks_up=bool(options.lookup),
            may_pause=bool(options.least_kept),
        )

    def _open_async(self, options: AsyncOptions) -> AsyncDrafter:
        """A drafter whose worker is ready. Raises InvalidRequest, WorkerFailed."""
        assert self.drafter is not None
        assert isinstance(self.target, OpenModel), "other engines have no async mode"
        miss_policy, placement = (
            options.miss_policy or "draft_now",
            options.placement or default_placement(self.target.device),
        )
        if miss_policy not in get_args(MissPolicy):
            raise InvalidRequest(
                f"miss policy: {miss_policy!r} is not one of {', '.join(get_args(MissPolicy))}"
            )
        if placement not in self._running:
            self._running[placement] = open_coordinator(
                placement, self.target, self.drafter.model, self.drafter_path
            )
        running = self._running[placement]
        running.coordinator.ensure_worker()
        policy = Policy(options.draft_length, options.outcomes, cast("MissPolicy", miss_policy))
        return AsyncDrafter(running.coordinator, policy, running.threads)

    def close(self) -> None:
        """End what async mode has started. The model stays of use; a later request in async mode
        starts it again."""
        for running in self._running.values():
            running.coordinator.close()

    def _run(self, request: Request, chosen: Decoding, settings: Settings) -> Iterator[StreamChunk]:
        recorder = Recorder(request.sequence.prompt_length, settings)
        for event in decode(chosen.target, chosen.drafter, [request], chosen.draft_length):
            yield recorder.add(event)


def check_prompt(prompt: str, *, raw: bool = False) -> None:
    """Raises InvalidRequest for text that can't be a prompt: empty, or not Unicode."""
    if not (prompt if raw else prompt.strip()):
        raise InvalidRequest("prompt: it is empty; give some text")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"prompt: it is not valid Unicode text at character {error.start}; give it as UTF-8"
        ) from error


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Checked sampling parameters. Raises InvalidRequest that names the first field that is unknown
    or impossible."""
    try:
        return SamplingParams(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(SamplingParams.model_fields)
            raise InvalidRequest(
                f"{name}: there is no such parameter; there are: {known}"
            ) from error
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{name}: {message}" if name else message) from error


def load(
    target: str,
    drafter: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    plain: bool = False,
    engine: str = "native",
    quantize: str | None = None,
) -> Model:
    """Load a target and its drafter.

    target: preset, preset file, directory, GGUF file or hub id. drafter: directory or hub id; a
    preset brings its own. plain: load no drafter. device: auto, cpu, cuda or cuda:N. dtype: auto,
    float32 or bfloat16. engine: what runs the target, d3d's own decoder (native), or transformers
    for any causal language model that can be rewound: slower, and in modes plain and serial only.
    quantize: "int8" rounds the linear weights of both; the target then is another model, to which
    every mode is faithful. Raises InvalidCheckpoint or InvalidRequest.

    A preset file says besides how to decode where a request does not, in which dtype where `dtype`
    is auto, with which weights where `quantize` does not, and with how many threads, which is
    torch's setting for the whole process."""
    if engine not in ENGINES:
        raise InvalidRequest(f"engine: {engine!r} is not one of {', '.join(ENGINES)}")
    if plain and drafter is not None:
        raise InvalidRequest("plain: no drafter is loaded; leave the drafter out, or plain")
    choices = choices_of(target)
    path = None
    if drafter is not None:
        path = resolve_drafter(str(drafter))
    elif not plain:
        path = drafter_of(target)
    if path is not None:
        read_config(path)  # what is no drafter is refused before the target is fetched and read
    if choices is not None:
        target, dtype, quantize = (
            choices.target,
            choices.dtype if dtype == "auto" else dtype,
            quantize or choices.quantize,
        )
        if choices.threads is not None:
            torch.set_num_threads(choices.threads)
    has_own = drafter is None and (choices is None or choices.drafter is None)
    preset = PRESETS.get(target) if has_own else None
    if engine == "transformers":
        return replace(
            _load_transformers(target, path, preset, device=device, dtype=dtype, quantize=quantize),
            choices=choices,
        )
    model = open_model(target, device=device, dtype=dtype, quantize=quantize)
    native = NativeEngine(model.transformer)
    if path is None:
        pack_weights(model.transformer, quantize=quantize)
        return Model(model, native, None, choices=choices)
    (drafter_model,) = ready_drafters(model, [path])
    return Model(
        model, native, BlockDrafter(drafter_model, native.vocab_size), preset, path, choices
    )


def _load_transformers(
    target: str,
    drafter: Path | None,
    preset: Preset | None,
    *,
    device: str,
    dtype: str,
    quantize: str | None,
) -> Model:
    """The target as `transformers` runs it; a drafter runs in d3d's own decoder, with weights and a
    cache of its own."""
    from d3d.target.transformers import TransformersEngine, open_transformers

    if quantize is not None:
        raise InvalidRequest(
            "quantize: only d3d's own engine rounds weights; leave it out, or use the engine native"
        )
    model = open_transformers(target, device=device, dtype=dtype)
    engine = TransformersEngine(model)
    if drafter is None:
        return Model(model, engine, None)
    return Model(
        model, engine, BlockDrafter(ready_apart(model, drafter), engine.vocab_size), preset, drafter
    )
