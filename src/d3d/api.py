"""The Python interface: `d3d.load(...)`, then `.generate(...)` or `.stream(...)`.

>>> model = d3d.load("smollm2-135m")
>>> model.generate("What is 12 * 7?").text
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from d3d.core.errors import InvalidRequest
from d3d.core.types import SamplingParams
from d3d.decoding.loop import decode
from d3d.decoding.request import Request, new_request
from d3d.decoding.results import GenerationResult, Recorder, StreamChunk
from d3d.drafting.block_drafter import BlockDrafter
from d3d.engines.native import NativeEngine
from d3d.models.chat import encode_chat
from d3d.models.checkpoint import load_drafter
from d3d.models.loading import resolve_drafter
from d3d.models.open_model import OpenModel, open_model
from d3d.models.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Mode = Literal["plain", "serial"]
MODES: tuple[Mode, ...] = ("plain", "serial")

DEFAULT_DRAFT_LENGTH = 6

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Model:
    """A target and, unless it only decodes plainly, a drafter."""

    target: OpenModel
    engine: NativeEngine
    drafter: BlockDrafter | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.target.tokenizer

    @property
    def dtype_name(self) -> str:
        return str(self.target.transformer.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        return str(self.target.transformer.device)

    def encode(self, prompt: str | Messages | list[int], *, raw: bool = False, thinking: bool | None = None) -> list[int]:
        """Token ids of a prompt: a user's turn, a conversation (both through the chat template), text as it is (`raw`), or ids.

        `thinking` is handed to the chat template as `enable_thinking`. Raises InvalidRequest for an empty prompt.
        """
        if isinstance(prompt, str) and not prompt.strip():
            raise InvalidRequest("prompt: it is empty; give some text")
        if isinstance(prompt, str) and raw:
            return list(self.tokenizer.encode(prompt))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if prompt and isinstance(prompt[0], dict):
            return encode_chat(self.tokenizer, prompt, thinking=thinking)
        return list(prompt)  # type: ignore[arg-type]

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
        num_denoise_steps: int = 1,
        raw: bool = False,
        thinking: bool | None = None,
        **sampling: Any,
    ) -> Iterator[StreamChunk]:
        """Answer piece by piece: the first token at once, then one chunk a round.

        mode: "plain" or "serial" (default: serial where there is a drafter). draft_length: tokens to draft a round, at most the
        drafter's block_size. sampling: fields of `SamplingParams`. Raises InvalidRequest before anything is computed.
        """
        mode = mode or ("serial" if self.drafter else "plain")
        drafter = self._drafter_for(mode, num_denoise_steps)
        width = self._draft_length(drafter, draft_length)
        request = self._request(self.encode(prompt, raw=raw, thinking=thinking), sampling)
        recorder = Recorder(
            request.sequence.prompt_length,
            mode,
            width,
            num_denoise_steps,
            None if request.sequence.params.greedy else request.sequence.seed,
        )
        return (recorder.add(event) for event in decode(self.engine, drafter, [request], width))

    def _request(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Request:
        try:
            params = SamplingParams(**sampling)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'parameters'}: {first['msg']}") from error
        return new_request(
            self.engine,
            prompt_ids,
            params,
            eos_token_ids=self.target.eos_token_ids,
            tokenizer=self.tokenizer,
            device=self.target.transformer.device,
        )

    def _drafter_for(self, mode: str, num_denoise_steps: int) -> BlockDrafter | None:
        if mode not in MODES:
            raise InvalidRequest(f"mode: {mode!r} is not one of {', '.join(MODES)}")
        if mode == "plain":
            return None
        if self.drafter is None:
            raise InvalidRequest(f"mode: {mode} needs a drafter, and {self.target.source} was loaded without one; name one, or use plain")
        if num_denoise_steps < 1:
            raise InvalidRequest("denoise steps: at least 1")
        return BlockDrafter(self.drafter.model, self.drafter.target_vocab_size, num_denoise_steps)

    def _draft_length(self, drafter: BlockDrafter | None, wanted: int | None) -> int:
        if drafter is None:
            return 0
        if wanted is not None and not 1 <= wanted <= drafter.block_size:
            raise InvalidRequest(f"draft length: {wanted} is not within 1 and the drafter's block size, {drafter.block_size}")
        return min(wanted or DEFAULT_DRAFT_LENGTH, drafter.block_size)


def load(target: str, drafter: str | Path | None = None, *, device: str = "auto", dtype: str = "auto", plain: bool = False) -> Model:
    """Load a target and its drafter.

    target: preset, directory, GGUF file or hub id. drafter: directory or hub id; a preset brings its own. plain: load no drafter.
    device: auto, cpu, cuda or cuda:N. dtype: auto, float32 or bfloat16. Raises InvalidCheckpoint or InvalidRequest.
    """
    model = open_model(target, device=device, dtype=dtype)
    engine = NativeEngine(model.transformer)
    path = None
    if not plain and drafter is not None:
        path = resolve_drafter(str(drafter))
    elif not plain and target in PRESETS:
        path = PRESETS[target].drafter_directory()
    if path is None:
        return Model(model, engine, None)
    return Model(model, engine, BlockDrafter(load_drafter(path, model), engine.vocab_size))
