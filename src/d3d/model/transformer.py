"""A lean decoder for the Llama, Qwen2 and Qwen3 families.

It takes token ids, positions, a mask and a key-value store, and returns hidden states or logits.
Requests, blocks and drafters are handled elsewhere; low-rank deltas act on the last `delta_rows`
rows of a pass only."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d3d.errors import InvalidCheckpoint
from d3d.model.attention import are_few, grouped_bias
from d3d.model.config import DecoderConfig
from d3d.model.kv_cache import KeyValueStore, KVCache
from d3d.model.linear import Linear


class Norm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):
    """One decoder layer; query, key and value share a matrix, and so do gate and up."""

    q_norm: Norm | None
    k_norm: Norm | None

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.config = config
        hidden, queries, keys = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        self.attention_norm = Norm(tensors.take("input_layernorm.weight", hidden), config.norm_eps)
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        self.qkv = tensors.linear(hidden, qkv, bias=config.qkv_bias)
        self.q_norm = self.k_norm = None
        if config.family == "qwen3":
            self.q_norm = Norm(
                tensors.take("self_attn.q_norm.weight", config.head_dim), config.norm_eps
            )
            self.k_norm = Norm(
                tensors.take("self_attn.k_norm.weight", config.head_dim), config.norm_eps
            )
        self.out = tensors.linear(queries, {"self_attn.o_proj": hidden}, bias=config.out_bias)
        self.mlp_norm = Norm(
            tensors.take("post_attention_layernorm.weight", hidden), config.norm_eps
        )
        wide = config.intermediate_size
        self.gate_up = tensors.linear(
            hidden, {"mlp.gate_proj": wide, "mlp.up_proj": wide}, bias=config.mlp_bias
        )
        self.down = tensors.linear(wide, {"mlp.down_proj": hidden}, bias=config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        mask: Tensor | None,
        store: KeyValueStore,
        index: int,
        delta_rows: int,
    ) -> Tensor:
        c = self.config
        batch, rows, _ = x.shape
        # inner modules without hooks: their __call__ would be a noticeable part of a one-row pass
        normed = self.attention_norm.forward(x)
        heads = (
            self.qkv.forward(normed, delta_rows)
            .view(batch, rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            .transpose(1, 2)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            query, key = rotary.turn(self.q_norm(query)), rotary.turn(self.k_norm(key))
        else:
            query_key, value = heads.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
            query, key = rotary.turn(query_key).split((c.num_heads, c.num_kv_heads), dim=1)
        x = x + self.out.forward(store.attend(index, query, key, value, mask), delta_rows)
        gate, up = self.gate_up.forward(self.mlp_norm.forward(x), delta_rows).chunk(2, dim=-1)
        return x + self.down.forward(F.silu(gate) * up, delta_rows)


class Rotary:
    """Rotary position embedding (arXiv 2104.09864) of one pass's positions."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [batch, rows, head_dim]; the sine's first half is negated already."""
        self._cos, self._sin = cos[:, None], sin[:, None]

    def turn(self, x: Tensor) -> Tensor:
        """x [batch, heads, rows, head_dim], rotated."""
        half = x.shape[-1] // 2
        return x * self._cos + torch.cat((x[..., half:], x[..., :half]), dim=-1) * self._sin


class LayerTensors:
    """Tensors under a prefix of their Hugging Face names. Taking a tensor removes it, so leftovers
    show. All methods raise InvalidCheckpoint."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        prefix: str,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        """device, dtype: targets of conversion; None keeps a tensor's own."""
        self._tensors, self._prefix, self._device, self._dtype = tensors, prefix, device, dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """A float tensor of this shape."""
        full = self._prefix + name
        if full not in self._tensors:
            raise InvalidCheckpoint(
                f"tensor {full} is missing from the checkpoint; fetch the model again"
            )
        tensor = self._tensors.pop(full)
        if not tensor.is_floating_point():
            raise InvalidCheckpoint(
                f"tensor {full} holds {tensor.dtype}, not floats; use the model's bfloat16 release "
                "or a GGUF file"
            )
        if tensor.shape != shape:
            raise InvalidCheckpoint(
                f"tensor {full} has shape {tuple(tensor.shape)}, the config says {shape}"
            )
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, in_features: int, out_features: dict[str, int], *, bias: bool) -> Linear:
        """One layer from the stacked weights (and biases) of all names. out_features: name to
        rows."""
        weights = [
            self.take(f"{name}.weight", rows, in_features) for name, rows in out_features.items()
        ]
        biases = [self.take(f"{name}.bias", rows) for name, rows in out_features.items() if bias]
        if len(weights) == 1:
            return Linear(weights[0], biases[0] if biases else None)
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)


class Transformer(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, Tensor],
        *,
        layers: tuple[int, ...] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """tensors: Hugging Face names to float tensors. layers: layers of the checkpoint to take,
        in order (default: all). device, dtype: tensors are moved and converted one by one as they
        are taken, so no second copy of the model ever exists; if None, all tensors must be alike.
        Raises InvalidCheckpoint if a tensor is missing, left over or of the wrong shape."""
        super().__init__()
        kept = tuple(range(config.num_layers)) if layers is None else layers
        self.config = config
        rest = dict(tensors)
        top = LayerTensors(rest, "", device, dtype)
        embedding = top.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(
            Layer(config, LayerTensors(rest, f"model.layers.{i}.", device, dtype)) for i in kept
        )
        self.norm = Norm(top.take("model.norm.weight", config.hidden_size), config.norm_eps)
        if "lm_head.weight" in rest or not config.tied:
            head = top.take("lm_head.weight", config.vocab_size, config.hidden_size)
            if config.tied and not torch.equal(head, embedding):
                raise InvalidCheckpoint(
                    "lm_head.weight differs from the embedding that the config ties it to; set "
                    "tie_word_embeddings to false"
                )
            self.head = Linear(head)
        if config.tied:
            self.head = Linear(embedding)
            self.head.weight = self.embedding
        _refuse_left_over(config, rest, kept)
        self._inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=embedding.device)
        self.checkpointing = False
        """True if backward recomputes each layer instead of storing activations."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self) -> KVCache:
        """An empty cache for sequences of this model."""
        c = self.config
        return KVCache(len(self.layers), c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [batch, rows] -> [batch, rows, hidden_size]."""
        return F.embedding(token_ids, self.embedding)

    def hidden(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        store: KeyValueStore,
        delta_rows: int = 0,
        skipped: frozenset[int] = frozenset(),
    ) -> Tensor:
        """Run all layers.

        x: embeddings [batch, rows, hidden_size]; positions: int64 [batch or 1, rows]; mask: bool
        [batch or 1, rows, keys] over the store's keys, this pass's rows last, or None if every row
        sees every key; delta_rows: number of last rows that are slots, on which deltas act;
        skipped: indices of layers that slots skip. Returns the final norm's output [batch, rows,
        hidden_size]."""
        first = x.shape[1] - delta_rows
        whole = self._inputs(x, positions, mask, delta_rows)
        clean = whole
        if skipped and first:
            clean = self._inputs(
                x[:, :first],
                positions[:, :first],
                None if mask is None else _without_last(mask, delta_rows),
                0,
            )
        for passed_by, run in groupby(range(len(self.layers)), key=skipped.__contains__):
            if passed_by and not first:
                continue
            x, slots = (x[:, :first], x[:, first:]) if passed_by else (x, None)
            for index in run:
                x = self._through(
                    self.layers[index], x, clean if passed_by else whole, store, index
                )
            if slots is not None:
                x = torch.cat((x, slots), dim=1)
        out: Tensor = self.norm(x)
        return out

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """positions: int64 [batch or 1, rows].

        Computed anew for each pass: a table of all positions that a config declares can be larger
        than the model."""
        angles, scale = positions[..., None] * self._inv_freq, self.config.rope_scale
        cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        return Rotary(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

    def _inputs(self, x: Tensor, positions: Tensor, mask: Tensor | None, delta_rows: int) -> _Pass:
        """Per-pass inputs of all layers, for the rows of x."""
        rotary = self.rotary(positions, x.dtype)
        if (
            mask is not None
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()
            and are_few(x.shape[0], x.shape[1])
        ):
            mask = grouped_bias(mask, self.config.num_heads // self.config.num_kv_heads, x.dtype)
        return _Pass(rotary, mask, delta_rows)

    def _through(
        self, layer: nn.Module, x: Tensor, inputs: _Pass, store: KeyValueStore, index: int
    ) -> Tensor:
        arguments = (x, inputs.rotary, inputs.mask, store, index, inputs.delta_rows)
        if self.checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(layer, *arguments, use_reentrant=False)
        else:
            out = layer(*arguments)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> [..., vocab_size], in the model's dtype."""
        return self.head.forward(hidden)


class _Pass(NamedTuple):
    """Per-pass inputs shared by all layers."""

    rotary: Rotary
    mask: Tensor | None
    delta_rows: int


def _without_last(mask: Tensor, rows: int) -> Tensor:
    """A pass's mask, bool [batch or 1, rows, keys], without its last rows, as queries and as
    keys."""
    return mask[:, : mask.shape[1] - rows, : mask.shape[2] - rows]


def _refuse_left_over(
    config: DecoderConfig, rest: dict[str, Tensor], kept: tuple[int, ...]
) -> None:
    """Refuse unused tensors: the model would compute something else. Raises InvalidCheckpoint."""
    dropped = tuple(f"model.layers.{i}." for i in range(config.num_layers) if i not in kept)
    left = [
        name
        for name in rest
        if not name.startswith(dropped) and not name.endswith("rotary_emb.inv_freq")
    ]
    if left:
        raise InvalidCheckpoint(
            f"{len(left)} tensors of the checkpoint have no place in a {config.family} decoder of "
            f"this config, for example {left[0]}"
        )
