"""Targets that the `transformers` library runs: any causal language model, slower than in d3d's own
decoder.

The model runs unmodified, with the library's cache. A model that can't be rewound exactly is
refused when opened. Every sequence has its own cache, and sequences run one after the other, so
batching saves no time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from d3d.engine.drafter import Draft, Target
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.errors import InvalidCheckpoint, NotFinite
from d3d.forks import prepare_for_forks
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.names import resolve_model
from d3d.hub.open_model import (
    eos_token_ids,
    load_config,
    load_tokenizer,
    num_tokens,
    pick_device,
    pick_dtype,
    read_tensors,
)
from d3d.hub.terminal import first_line, quiet_transformers
from d3d.model.finite import cause_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

NO_LIMIT = 1 << 17
"""Maximum sequence length if the model's config names none, as with ALiBi."""
PROBE = 8
"""Length in tokens of the text that probes whether a model can be rewound."""
PROBE_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference allowed in the probe's logits, relative to the largest of them: rounding stays
far below, a wrong context far above."""


@dataclass(frozen=True)
class TransformersModel:
    """Causal language model run by `transformers`; see `d3d.hub.open_model.TargetModel`."""

    source: str
    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @cached_property
    def num_tokens(self) -> int:
        """Ids from here on have no token, and are never chosen."""
        return min(self.vocab_size, num_tokens(self.tokenizer))

    @property
    def max_length(self) -> int:
        return int(
            getattr(
                self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
            )
            or NO_LIMIT
        )


def open_transformers(
    source: str, *, device: str = "auto", dtype: str = "auto"
) -> TransformersModel:
    """Load a model by preset name, directory, GGUF file or hub id. Raises InvalidRequest, and
    InvalidCheckpoint, also for a model that can't be rewound."""
    prepare_for_forks()
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    path = resolve_model(source)
    config = load_config(path)
    refuse_what_cannot_be_rewound(config)
    model = _load(path, kind).to(where).eval()
    tokenizer = load_tokenizer(path)
    target = TransformersModel(
        source, path, model, tokenizer, frozenset(), weights_fingerprint(read_tensors(path))
    )
    _probe(TransformersTarget(target))
    ends = frozenset(
        token_id
        for token_id in eos_token_ids(path, config, tokenizer)
        if 0 <= token_id < target.num_tokens
    )
    return TransformersModel(source, path, model, tokenizer, ends, target.fingerprint)


def refuse_what_cannot_be_rewound(config: PretrainedConfig) -> None:
    """Raise InvalidCheckpoint for a model that can't be rewound, naming its type and the reason."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidCheckpoint(
            f"model type {kind!r} is an encoder with a decoder, not a causal language model; take "
            "a decoder-only model"
        )
    try:
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            layers = DynamicCache(config=config).layers
    except (ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        raise InvalidCheckpoint(
            f"model type {kind!r} is no causal language model that transformers can build: "
            f"{first_line(error)}"
        ) from error
    if getattr(model, "_is_stateful", False):
        raise InvalidCheckpoint(
            f"model type {kind!r} keeps a running state (state-space or recurrent layers), which "
            "can't be rewound"
        )
    causal = [
        module.is_causal
        for module in model.modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    ]
    if causal and not any(causal):
        raise InvalidCheckpoint(
            f"model type {kind!r} is an encoder, whose tokens see those behind them; take a causal "
            "language model"
        )
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd:
        why = (
            "sliding-window or chunked attention forgets"
            if "Sliding" in odd[0]
            else "its layers keep more than keys and values"
        )
        raise InvalidCheckpoint(
            f"model type {kind!r} can't be rewound: {why} (cache of kind {', '.join(odd)})"
        )
    if _cache_argument(model) is None:
        raise InvalidCheckpoint(
            f"model type {kind!r} keeps no cache of keys and values, so every token would cost a "
            "whole pass"
        )


def _load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with quiet_transformers():
            model, about = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise InvalidCheckpoint(
            f"{path} can't be loaded by transformers: {first_line(error)}"
        ) from error
    missing = sorted(about["missing_keys"])
    if missing:
        raise InvalidCheckpoint(
            f"{path} lacks {len(missing)} tensors of its model, for example {missing[0]}; fetch "
            "the model again"
        )
    loaded: PreTrainedModel = model
    return loaded


def _cache_argument(model: PreTrainedModel) -> str | None:
    """Name of `forward`'s cache argument, which newer versions of the library have renamed."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


class TransformersTarget(Target):
    """Runs a `TransformersModel`, each request with a cache of its own."""

    def __init__(self, loaded: TransformersModel) -> None:
        self.loaded = loaded
        self._caches: dict[int, DynamicCache] = {}

    @property
    def vocab_size(self) -> int:
        return self.loaded.num_tokens

    @property
    def max_length(self) -> int:
        return self.loaded.max_length

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def num_held(self) -> int:
        return len(self._caches)

    @cached_property
    def arguments(self) -> tuple[str, bool]:
        """Name of `forward`'s cache argument, and whether `forward` can limit the rows of
        logits."""
        model = self.loaded.model
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        return _cache_argument(model) or "past_key_values", keeps

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        results: list[LogitRows | None] = []
        for request in requests:
            rows = None
            if num_rows > 0:
                start = self.length(request.id)
                chunk = request.token_ids[start : start + num_rows]
                num_rows -= len(chunk)
                logits = self.forward(request.id, chunk, last_only=True)
                rows = LogitRows(logits) if start + len(chunk) == len(request) else None
            results.append(rows)
        return results

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        return [
            LogitRows(self.forward(request.id, [request.anchor, *draft.token_ids]))
            for request, draft in zip(requests, drafts, strict=True)
        ]

    def length(self, request_id: int) -> int:
        """Cached tokens."""
        cache = self._caches.get(request_id)
        return 0 if cache is None else int(cache.get_seq_length())

    @torch.inference_mode()
    def forward(self, request_id: int, ids: list[int], *, last_only: bool = False) -> Tensor:
        """Append tokens; returns float32 logits [rows, vocab_size] of all of them, or of the
        last."""
        if request_id not in self._caches:
            self._caches[request_id] = DynamicCache(config=self.loaded.model.config)
        name, chooses_rows = self.arguments
        options: dict[str, Any] = {name: self._caches[request_id], "use_cache": True}
        if last_only and chooses_rows:
            options["logits_to_keep"] = 1
        inputs = torch.tensor([ids], device=self.device)
        logits = self.loaded.model(input_ids=inputs, **options).logits[0, :, : self.vocab_size]
        rows: Tensor = logits[-1:] if last_only else logits
        return rows.float()

    def crop(self, request_id: int, length: int) -> None:
        """Forget every cached token from `length` on."""
        surplus = self.length(request_id) - length
        if surplus > 0:
            self._caches[request_id].crop(-surplus)

    def diagnose(self, request: Request) -> str:
        inputs = torch.tensor([request.token_ids], device=self.device)
        with torch.inference_mode():
            return cause_of(self.loaded.model, lambda: self.loaded.model(input_ids=inputs))

    def rewind(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.crop(request.id, len(request) - 1)

    def end(self, request: Request) -> None:
        self._caches.pop(request.id, None)


def _probe(target: TransformersTarget) -> None:
    """Check that a rewound pass gives the same logits, and that a row does not see later ones: some
    models' caches only appear to allow it. Raises InvalidCheckpoint, and NotFinite."""
    loaded = target.loaded
    ids = [(17 * place + 3) % target.vocab_size for place in range(PROBE)]
    whole = target.forward(0, ids)
    if not bool(whole.amax(-1).isfinite().all()):
        raise NotFinite(
            "the target's logits are",
            "a trial pass",
            cause=cause_of(loaded.model, lambda: target.forward(0, ids)),
        )
    first = target.forward(1, ids[:5])
    target.forward(1, [ids[0], ids[0]])
    target.crop(1, 3)
    second = target.forward(1, ids[3:])
    is_whole = target.length(1) == PROBE
    again = torch.cat([first[:3], second]) if is_whole else torch.full_like(whole, torch.inf)
    difference = float((again - whole).abs().max() / whole.abs().max().clamp_min(1e-6))
    if not difference <= PROBE_TOLERANCES[loaded.dtype]:
        raise InvalidCheckpoint(
            f"{loaded.source} (model type {loaded.model.config.model_type!r}) can't be rewound: "
            "after its cache was cut back it gives other logits than before "
            f"(relative difference {difference:.1e})"
        )
