"""The Python interface: `d3d.load(...)`, then `.generate(...)`, `.stream(...)` or `.add(...)`.

>>> with d3d.load("smollm2-135m") as model:
...     print(model.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from d3d.config import asked_method, request_config
from d3d.engine.engine import Engine
from d3d.engine.params import SamplingParams
from d3d.engine.request import Request, new_request
from d3d.engine.round import TokenLogprob
from d3d.engine.score import score
from d3d.errors import InvalidRequest
from d3d.handle import Handle, Stepper, Turn
from d3d.hub.open_model import OpenModel, TargetModel
from d3d.methods.base import Built, MethodConfig, Parts
from d3d.model.drafter import DrafterModel
from d3d.model.int8 import precision
from d3d.request_options import RequestOptions as RequestOptions
from d3d.request_options import SpeculationOptions as SpeculationOptions
from d3d.request_options import check_many, sampling_params, split_options
from d3d.results import GenerationResult, Recorder, StreamChunk, settings_of
from d3d.text.prompts import Messages as Messages
from d3d.text.prompts import Prompt as Prompt
from d3d.text.prompts import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BACKENDS = ("native", "c", "transformers")

DEFAULT_BATCH = 8
"""Default number of requests decoded together."""

MOST_BUILT = 32
"""Methods, each with its options, that a model keeps for later requests."""


class Model:
    """A target and, unless it decodes plainly only, a drafter. As a context manager it closes
    itself.

    `add`, `cancel` and iteration are safe from any thread; one thread steps at a time."""

    def __init__(
        self,
        parts: Parts,
        *,
        preset: MethodConfig | None = None,
        backend: str = "native",
    ) -> None:
        """preset: default method and options of requests."""
        self.parts = parts
        self.preset = preset
        self.backend = backend
        self.max_batch = DEFAULT_BATCH
        """Maximum number of requests from `add` that are decoded together; read when a method's
        first request comes."""
        self._turn = Turn()
        self._making = threading.RLock()
        """Held while a method is built, or its engine made."""
        self._built: dict[MethodConfig, Built] = {}
        self._steppers: dict[MethodConfig, Stepper] = {}
        """For requests that `add` starts."""
        self._batches: dict[int, Stepper] = {}
        """For calls of `stream_many` under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def target(self) -> TargetModel:
        return self.parts.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.target.tokenizer

    @property
    def drafter(self) -> DrafterModel | None:
        return self.parts.drafter

    @property
    def has_drafter(self) -> bool:
        return self.parts.drafter is not None or self.parts.draft_model is not None

    @property
    def max_length(self) -> int:
        """Maximum number of tokens, prompt and answer together."""
        return self.parts.target.max_length

    @property
    def dtype_name(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def quantize(self) -> str | None:
        """Weight quantization, such as "int8"; None if the weights are the checkpoint's."""
        return self.target.quantize if isinstance(self.target, OpenModel) else None

    @property
    def precision(self) -> str:
        """Dtype and weight quantization, for display."""
        return precision(self.dtype_name, self.quantize)

    @property
    def device_name(self) -> str:
        return str(self.target.device)

    @property
    def drafter_fingerprint(self) -> str | None:
        """Hex digest of the drafter's weights, configuration and draft vocabulary; None without a
        drafter."""
        return None if self.parts.drafter is None else self.parts.drafter_fingerprint

    @property
    def default_method(self) -> str:
        """Method of a request that names none."""
        return self.config().method

    def config(self, **options: Unpack[SpeculationOptions]) -> MethodConfig:
        """Resolve a request's method and options against the preset. Raises InvalidRequest."""
        asked = asked_method(options)
        if asked.drafter is not None:
            raise InvalidRequest(
                "speculative_config: model: the drafter is named when the model is loaded: "
                "d3d.load(target, drafter)"
            )
        return request_config(
            self.preset,
            asked,
            has_drafter=self.parts.drafter is not None,
            has_draft_model=self.parts.draft_model is not None,
        )

    def built(self, config: MethodConfig) -> Built:
        """Target and drafter of a method, built on first use. Raises InvalidRequest,
        WorkerFailed."""
        self._turn.check_process()
        with self._making:
            if config not in self._built:
                with self._turn:  # it may measure passes of the target
                    self._built[config] = config.build(self.parts)
                self._forget_idle()
            built = self._built[config] = self._built.pop(config)  # the last one used is last
        if built.drafter is not None:
            built.drafter.ready()
        return built

    def engine(self, config: MethodConfig, *, max_batch: int = DEFAULT_BATCH) -> Engine:
        """Create an engine for a method. Raises InvalidRequest, WorkerFailed."""
        built = self.built(config)
        return Engine(built.target, built.drafter, max_batch=max_batch)

    # One request

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerationResult:
        """Generate the whole answer. Options as for `add`."""
        handle = self.add(prompt, **options)
        try:
            return handle.result()
        finally:
            self._abandon(handle)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Iterator[StreamChunk]:
        """Stream an answer: the first token at once, then one chunk per round.

        Raises InvalidRequest before any computation; the clock starts with the first `next`.
        Options as for `add`."""
        config, request = self._prepared(prompt, options)
        self.built(config)

        def chunks() -> Iterator[StreamChunk]:
            handle = self._start(config, request, options.get("thinking"))
            try:
                yield from handle
            finally:
                self._abandon(handle)

        return chunks()

    def add(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Handle:
        """Start a request beside those that are running; use it to build a server or a notebook.

        method: a key of `d3d.config.METHODS` (default: `default_method`). Its options, sampling
        fields and the rest are listed in `RequestOptions`. Raises InvalidRequest before any
        computation, and WorkerFailed if async mode's draft worker does not start."""
        config, request = self._prepared(prompt, options)
        return self._start(config, request, options.get("thinking"))

    def step(self) -> bool:
        """Advance all added requests by one round; False if there is no work."""
        steps = [stepper.step() for stepper in list(self._steppers.values())]
        return any(moved is not None for moved in steps)

    def _prepared(self, prompt: Prompt, options: RequestOptions) -> tuple[MethodConfig, Request]:
        sampling, spec = split_options(options)
        config = self.config(**spec)
        return config, self._request(prompt, sampling, options)

    def _start(self, config: MethodConfig, request: Request, thinking: bool | None) -> Handle:
        # each time: its draft worker may have ended
        engine = self.engine(config, max_batch=self.max_batch)
        with self._making:
            stepper = self._steppers.setdefault(config, Stepper(engine, self._turn))
            return self._add(stepper, config, request, thinking)

    def _forget_idle(self) -> None:
        """Forget methods beyond `MOST_BUILT` that have no requests, those unused for longest
        first. Workers stay: methods share them."""
        for config in list(self._built)[:-1]:
            stepper = self._steppers.get(config)
            is_idle = stepper is None or not stepper.engine.has_work
            if len(self._built) > MOST_BUILT and is_idle:
                del self._built[config]
                self._steppers.pop(config, None)

    def _add(
        self, stepper: Stepper, config: MethodConfig, request: Request, thinking: bool | None
    ) -> Handle:
        drafter = stepper.engine.drafter
        settings = settings_of(config, drafter, request, thinking, self.quantize)
        handle = Handle(request, Recorder(request.prompt_length, settings), stepper)
        stepper.add(handle)
        return handle

    @staticmethod
    def _abandon(handle: Handle) -> None:
        """Cancel a request whose reader has left, and release its state."""
        if not handle.finished:
            handle.cancel()
            handle.settle()

    # Many requests

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        max_batch: int = DEFAULT_BATCH,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Generate all answers, in the order of the prompts. Arguments as for `stream_many`."""
        chunks = self.stream_many(prompts, max_batch=max_batch, per_prompt=per_prompt, **options)
        results = {index: chunk.result for index, chunk in chunks if chunk.result is not None}
        return [results[index] for index in range(len(prompts))]

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        *,
        max_batch: int = DEFAULT_BATCH,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[tuple[int, StreamChunk]]:
        """Stream several answers as (prompt index, chunk); each equals what `generate` gives.

        At most `max_batch` requests are decoded together; when one ends, the next joins. options:
        as for `add`, shared by all; per_prompt: sampling fields for each prompt, which override
        them. Raises as `add` does, naming the prompt. All clocks start with the first chunk, so
        ttft_s includes the time in the queue."""
        check_many(prompts, per_prompt, max_batch)
        sampling, spec = split_options(options)
        config = self.config(**spec)
        requests = []
        for index, prompt in enumerate(prompts):
            overrides = {} if per_prompt is None else per_prompt[index]
            try:
                requests.append(self._request(prompt, {**sampling, **overrides}, options))
            except InvalidRequest as error:
                reason = str(error).removeprefix("prompt: ")
                raise InvalidRequest(f"prompts[{index}]: {reason}") from error
        engine = self.engine(config, max_batch=max_batch)
        return self._together(engine, config, requests, options.get("thinking"))

    def _together(
        self,
        engine: Engine,
        config: MethodConfig,
        requests: list[Request],
        thinking: bool | None,
    ) -> Iterator[tuple[int, StreamChunk]]:
        stepper = Stepper(engine, self._turn)
        self._batches[id(stepper)] = stepper
        try:
            handles = [self._add(stepper, config, request, thinking) for request in requests]
            place = {handle.id: index for index, handle in enumerate(handles)}
            while (moved := stepper.step()) is not None:
                for handle in moved:
                    for chunk in handle.taken():
                        yield place[handle.id], chunk
                    if handle.request.error is not None:
                        raise handle.request.error
            for index, handle in enumerate(handles):
                if handle.request.finish_reason == "cancelled":  # by `close`
                    yield index, StreamChunk("", (), 0, handle.result())
        finally:
            del self._batches[id(stepper)]
            stepper.cancel_all()
            stepper.settle()

    def close(self) -> None:
        """Cancel all requests and stop workers. The model stays usable; a later request restarts
        what it needs. No effect in a forked process."""
        if not self._turn.is_here:
            return
        with self._turn:
            for stepper in (*self._steppers.values(), *self._batches.values()):
                stepper.cancel_all()
                stepper.drop_cancelled()
            for built in list(self._built.values()):
                if built.drafter is not None:
                    built.drafter.close()
            for running in self.parts.workers.values():  # also those of methods forgotten since
                running.coordinator.close()

    def score(self, token_ids: Sequence[int], *, num_top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of all tokens but the first, given those before them. num_top:
        alternatives per token. Other requests go on in between. Raises InvalidRequest as `add`."""
        new_request(self.parts.target, list(token_ids), SamplingParams())  # checks them
        passes = score(self.parts.target, token_ids, num_top)
        entries: list[TokenLogprob] = []
        while True:
            with self._turn:
                part = next(passes, None)
            if part is None:
                return entries
            entries += part

    # Requests and their settings

    def encode(
        self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest as `d3d.text.prompts.encode_prompt` does."""
        return encode_prompt(self.tokenizer, prompt, raw=raw, thinking=thinking)

    def _request(
        self, prompt: Prompt, sampling: Mapping[str, Any], options: RequestOptions
    ) -> Request:
        params = sampling_params(sampling)
        raw, thinking = options.get("raw", False), options.get("thinking")
        return new_request(
            self.parts.target,
            self.encode(prompt, raw=raw, thinking=thinking),
            params,
            eos_token_ids=self.target.eos_token_ids,
            tokenizer=self.tokenizer,
        )
