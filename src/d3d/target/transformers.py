"""Any causal language model of the `transformers` library behind the TargetEngine protocol: slower
than our own decoder, broader.

The model runs as the library has it, with the library's cache. What can't be rewound exactly is
refused when it is opened. Every sequence has a cache of its own, and sequences run one after the
other: a batch costs what its answers would cost alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from d3d.errors import InvalidCheckpoint
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.names import resolve_model
from d3d.hub.open_model import (
    eos_token_ids,
    load_config,
    load_tokenizer,
    pick_device,
    pick_dtype,
    read_tensors,
)
from d3d.hub.terminal import first_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PREFILL_ROWS = 1024
"""Rows of a pass that a long prompt is cut into."""
NO_LIMIT = 1 << 17
"""Longest sequence of a model whose config names no limit, such as one with ALiBi."""
PROBE = 8
"""Tokens of the text by which a model shows that it can be rewound."""
PROBE_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of the probe's logits, relative to the largest of them: rounding stays far
below, another context far above."""


@dataclass(frozen=True)
class TransformersTarget:
    """A causal language model that `transformers` runs; see `d3d.hub.open_model.TargetModel`."""

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
) -> TransformersTarget:
    """Load a model by preset name, directory, GGUF file or hub id. Raises InvalidCheckpoint, for
    one that can't be rewound too, and InvalidRequest."""
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    path = resolve_model(source)
    config = load_config(path)
    refuse_what_cannot_be_rewound(config)
    model = _load(path, kind).to(where).eval()
    tokenizer = load_tokenizer(path)
    target = TransformersTarget(
        source, path, model, tokenizer, frozenset(), weights_fingerprint(read_tensors(path))
    )
    _probe(TransformersEngine(target))
    ends = frozenset(
        token_id
        for token_id in eos_token_ids(path, config, tokenizer)
        if 0 <= token_id < target.vocab_size
    )
    return TransformersTarget(source, path, model, tokenizer, ends, target.fingerprint)


def refuse_what_cannot_be_rewound(config: PretrainedConfig) -> None:
    """Raises InvalidCheckpoint that names the model type and the reason."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidCheckpoint(
            f"model type {kind!r} is an encoder with a decoder, not a causal language model; take a decoder-only model"
        )
    try:
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            layers = DynamicCache(config=config).layers
    except (ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        raise InvalidCheckpoint(
            f"model type {kind!r} is no causal language model that transformers can build: {first_line(error)}"
        ) from error
    if getattr(model, "_is_stateful", False):
        raise InvalidCheckpoint(
            f"model type {kind!r} keeps a running state (state-space or recurrent layers), which can't be rewound"
        )
    causal = [
        module.is_causal
        for module in model.modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    ]
    if causal and not any(causal):
        raise InvalidCheckpoint(
            f"model type {kind!r} is an encoder, whose tokens see those behind them; take a causal language model"
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
            f"model type {kind!r} keeps no cache of keys and values, so every token would cost a whole pass"
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
            f"{path} lacks {len(missing)} tensors of its model, for example {missing[0]}; fetch the model again"
        )
    loaded: PreTrainedModel = model
    return loaded


def _cache_argument(model: PreTrainedModel) -> str | None:
    """What its `forward` calls the cache: newer versions of the library have another name for
    it."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


class TransformersEngine:
    """Runs a `TransformersTarget`."""

    def __init__(self, target: TransformersTarget) -> None:
        self.target = target

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_length(self) -> int:
        return self.target.max_length

    @cached_property
    def arguments(self) -> tuple[str, bool]:
        """The name of the cache in the model's `forward`, and whether it can be asked for some rows
        of logits only."""
        model = self.target.model
        return _cache_argument(model) or "past_key_values", "logits_to_keep" in inspect.signature(
            model.forward
        ).parameters

    def open(self, num_sequences: int, capacity: int) -> TransformersSession:  # noqa: ARG002 - the cache grows as it needs to
        return TransformersSession(self, num_sequences)


class TransformersSession:
    """One cache a sequence; see `TargetSession`."""

    def __init__(self, engine: TransformersEngine, num_sequences: int) -> None:
        self._engine = engine
        self._caches: list[DynamicCache] = []
        self.join(num_sequences)

    @property
    def lengths(self) -> list[int]:
        return [int(cache.get_seq_length()) for cache in self._caches]

    @torch.inference_mode()
    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        return [
            self._run(ids, cache, last_only)
            for ids, cache in zip(token_ids, self._caches, strict=True)
        ]

    def _run(self, ids: list[int], cache: DynamicCache, last_only: bool) -> Tensor:
        parts = [torch.empty((0, self._engine.vocab_size), device=self._engine.target.device)]
        for start in range(0, len(ids), PREFILL_ROWS):
            chunk = ids[start : start + PREFILL_ROWS]
            logits = self._pass(chunk, cache, last_only)
            if not last_only or start + len(chunk) == len(ids):
                parts.append(logits)
        return parts[1] if len(parts) == 2 else torch.cat(parts)

    def _pass(self, ids: list[int], cache: DynamicCache, last_only: bool) -> Tensor:
        target = self._engine.target
        name, chooses_rows = self._engine.arguments
        options: dict[str, Any] = {name: cache, "use_cache": True}
        if last_only and chooses_rows:
            options["logits_to_keep"] = 1
        logits = target.model(
            input_ids=torch.tensor([ids], device=target.device), **options
        ).logits[0, :, : target.vocab_size]
        rows: Tensor = logits[-1:] if last_only else logits
        return rows.float()

    def crop(self, lengths: list[int]) -> None:
        for cache, length, wanted in zip(self._caches, self.lengths, lengths, strict=True):
            if length > wanted:
                cache.crop(wanted - length)

    def keep(self, rows: list[int]) -> None:
        if any(not place <= row < len(self._caches) for place, row in enumerate(rows)):
            raise ValueError(f"rows can only move to the front: {rows}")
        self._caches = [self._caches[row] for row in rows]

    def join(self, count: int) -> None:
        self._caches += [
            DynamicCache(config=self._engine.target.model.config) for _ in range(count)
        ]


def _probe(engine: TransformersEngine) -> None:
    """A pass after a rewind must give the logits of one without, and a row must not see what
    follows it: some models' caches only look as if they could. Raises InvalidCheckpoint."""
    target = engine.target
    ids = [(17 * place + 3) % target.vocab_size for place in range(PROBE)]
    (whole,) = engine.open(1, PROBE).forward([ids])
    session = engine.open(1, PROBE)
    (first,) = session.forward([ids[:5]])
    session.forward([[ids[0], ids[0]]])
    session.crop([3])
    (second,) = session.forward([ids[3:]])
    again = (
        torch.cat([first[:3], second])
        if session.lengths == [PROBE]
        else torch.full_like(whole, torch.inf)
    )
    difference = float((again - whole).abs().max() / whole.abs().max().clamp_min(1e-6))
    if not difference <= PROBE_TOLERANCES[target.dtype]:
        raise InvalidCheckpoint(
            f"{target.source} (model type {target.model.config.model_type!r}) can't be rewound: after its cache was cut back it gives "
            f"other logits than before (relative difference {difference:.1e})"
        )
