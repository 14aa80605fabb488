"""`transformers.generate` on the target's own weights: plain, with prompt lookup, and with an
assistant model."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.fingerprint import first_difference
from d3d.hub.names import resolve_model
from d3d.hub.open_model import TargetModel, load_tokenizer
from d3d.hub.terminal import quiet_transformers
from d3d.lab.bench.answers import DeliveryTimer, Question, Setting, TimedAnswer
from d3d.text.answers import decode_answer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersPeer:
    """Runs the target's checkpoint directory in our engine's dtype and on its device."""

    def __init__(
        self,
        target: TargetModel,
        kind: str,
        assistant: str | None = None,
        *,
        ignore_eos: bool = False,
    ) -> None:
        """kind: plain, lookup or assistant. Raises InvalidRequest if the assistant is missing,
        InvalidCheckpoint if it has another tokenizer."""
        if kind == "assistant" and assistant is None:
            raise InvalidRequest(
                "method transformers_assistant: "
                "name the assistant with --assistant or --draft-model"
            )
        self._target = target
        self._kind = kind
        self._ignore_eos = ignore_eos
        self._model = self._load(str(target.path))
        self._assistant = None
        self._assistant_source = assistant
        if kind == "assistant" and assistant is not None:
            path = resolve_model(assistant)
            difference = first_difference(load_tokenizer(path), target.tokenizer)
            if difference is not None:
                raise InvalidCheckpoint(
                    f"{assistant} can't assist {target.source}: {difference}; "
                    "choose a model of the target's own family"
                )
            self._assistant = self._load(str(path))

    def _load(self, path: str) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM, GenerationConfig

        ends = sorted(self._target.eos_token_ids)
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=self._target.dtype, local_files_only=True
            )
        # the checkpoint's own config may sample or penalise; greedy decoding is compared
        model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=None if self._ignore_eos else ends or None,
            pad_token_id=min(ends, default=0),
        )
        moved: PreTrainedModel = model.to(self._target.device).eval()
        return moved

    @torch.inference_mode()
    def answer(self, question: Question, setting: Setting) -> TimedAnswer:
        ids = torch.tensor([question.token_ids], device=self._target.device)
        timer = DeliveryTimer()
        with quiet_transformers():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=setting.max_tokens,
                streamer=_Streamer(timer),
                **self._speculation(setting),
            )
        wall_s = timer.elapsed()
        answered = tuple(output[0, len(question.token_ids) :].tolist())
        has_end = bool(answered) and answered[-1] in self._target.eos_token_ids
        ended = has_end and not self._ignore_eos
        return TimedAnswer(
            text=decode_answer(self._target.tokenizer, answered),
            token_ids=answered,
            num_tokens=len(answered),
            finish_reason="stop" if ended else "length",
            deliveries=timer.deliveries,
            wall_s=wall_s,
        )

    def _speculation(self, setting: Setting) -> dict[str, Any]:
        if self._kind == "lookup":
            return {"prompt_lookup_num_tokens": setting.draft_length}
        if self._assistant is not None:
            self._assistant.generation_config.num_assistant_tokens = setting.draft_length
            return {"assistant_model": self._assistant}
        return {}

    def describe(self) -> dict[str, Any]:
        about = {
            "transformers": version("transformers"),
            "attention": self._model.config._attn_implementation,
        }
        return about | ({} if self._assistant is None else {"assistant": self._assistant_source})

    def close(self) -> None:
        del self._model
        self._assistant = None


class _Streamer:
    """Streamer for `generate`, which passes the prompt first."""

    def __init__(self, timer: DeliveryTimer) -> None:
        self._timer = timer
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self._timer.deliver(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is buffered."""
