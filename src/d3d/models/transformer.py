"""A lean decoder for the Llama, Qwen2 and Qwen3 families.

It knows tensors only: token ids, positions, a mask and a key-value store go in, hidden states or logits come out. It does not
know what a request, a block or a drafter is; the last `delta_rows` rows of a pass use the low-rank deltas, the others do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3d.core.errors import InvalidCheckpoint
from d3d.models.config import DecoderConfig
from d3d.models.kv_cache import KeyValueStore, KVCache
from d3d.models.linear import Linear


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
        self.attention_norm = Norm(tensors.take("input_layernorm.weight"), config.norm_eps)
        self.qkv = tensors.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.q_norm = self.k_norm = None
        if config.family == "qwen3":
            self.q_norm = Norm(tensors.take("self_attn.q_norm.weight"), config.norm_eps)
            self.k_norm = Norm(tensors.take("self_attn.k_norm.weight"), config.norm_eps)
        self.out = tensors.linear("self_attn.o_proj")
        self.mlp_norm = Norm(tensors.take("post_attention_layernorm.weight"), config.norm_eps)
        self.gate_up = tensors.linear("mlp.gate_proj", "mlp.up_proj")
        self.down = tensors.linear("mlp.down_proj")

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None, store: KeyValueStore, index: int, delta_rows: int) -> Tensor:
        c = self.config
        batch, rows, _ = x.shape
        heads = self.qkv(self.attention_norm(x), delta_rows).view(batch, rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            query, key = rotary.turn(self.q_norm(query)), rotary.turn(self.k_norm(key))
        else:
            query_key, value = heads.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
            query, key = rotary.turn(query_key).split((c.num_heads, c.num_kv_heads), dim=1)
        x = x + self.out(store.attend(index, query, key, value, mask), delta_rows)
        gate, up = self.gate_up(self.mlp_norm(x), delta_rows).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up, delta_rows)


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
    """One layer's tensors under their Hugging Face names; what is taken is gone, so leftovers show."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def take(self, name: str) -> Tensor:
        full = self._prefix + name
        if full not in self._tensors:
            raise InvalidCheckpoint(f"tensor {full} is missing from the checkpoint")
        return self._tensors.pop(full)

    def linear(self, *names: str) -> Linear:
        weights = [self.take(f"{name}.weight") for name in names]
        biases = [self.take(f"{name}.bias") for name in names if f"{self._prefix}{name}.bias" in self._tensors]
        if biases and len(biases) != len(names):
            raise InvalidCheckpoint(f"some of {', '.join(names)} under {self._prefix} have a bias and some have none")
        if len(names) == 1:
            return Linear(weights[0], biases[0] if biases else None)
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)


class Transformer(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], *, layers: tuple[int, ...] | None = None) -> None:
        """`tensors`: Hugging Face names to float tensors, all of one dtype and device. `layers`: which of the checkpoint's layers
        to take, in order (default: all). Raises InvalidCheckpoint when a tensor is missing, left over or of the wrong shape."""
        super().__init__()
        kept = tuple(range(config.num_layers)) if layers is None else layers
        self.config = config
        rest = dict(tensors)
        top = LayerTensors(rest, "")
        embedding = top.take("model.embed_tokens.weight")
        if embedding.shape != (config.vocab_size, config.hidden_size):
            raise InvalidCheckpoint(f"model.embed_tokens.weight has shape {tuple(embedding.shape)}, the config says {(config.vocab_size, config.hidden_size)}")
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(Layer(config, LayerTensors(rest, f"model.layers.{i}.")) for i in kept)
        self.norm = Norm(top.take("model.norm.weight"), config.norm_eps)
        if config.tied:
            rest.pop("lm_head.weight", None)
            self.head = Linear(embedding)
            self.head.weight = self.embedding
        else:
            self.head = Linear(top.take("lm_head.weight"))
        left = [name for name in rest if not _belongs_to_dropped_layer(name, kept) and not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise InvalidCheckpoint(f"{len(left)} tensors of the checkpoint are not part of a {config.family} decoder, for example {left[0]}")
        self._cos, self._sin = _rotary_table(config, embedding)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(len(self.layers), batch, c.num_kv_heads, capacity, c.head_dim, self.dtype, self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [batch, rows] -> [batch, rows, hidden_size]."""
        return F.embedding(token_ids, self.embedding)

    def hidden(self, x: Tensor, positions: Tensor, mask: Tensor | None, store: KeyValueStore, delta_rows: int = 0) -> Tensor:
        """Run all layers.

        x: embeddings [batch, rows, hidden_size]; positions: int64 [batch or 1, rows]; mask: bool [batch or 1, rows, keys] over the
        store's keys, this pass's rows last, or None where every row sees every key; delta_rows: how many of the last rows are slots,
        where the deltas act. Returns the final norm's output [batch, rows, hidden_size].
        """
        rotary = Rotary(self._cos[positions], self._sin[positions])
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, mask, store, index, delta_rows)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> [..., vocab_size], in the model's dtype."""
        return self.head.forward(hidden if hidden.dim() > 1 else hidden[None])


def _belongs_to_dropped_layer(name: str, kept: tuple[int, ...]) -> bool:
    parts = name.split(".")
    return name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) not in kept


def _rotary_table(config: DecoderConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, [max_length, head_dim], in the model's dtype."""
    inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=like.device)
    angles = torch.outer(torch.arange(config.max_length, dtype=torch.float32, device=like.device), inv_freq)
    cos, sin = angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
    return torch.cat((cos, cos), -1).to(like.dtype), torch.cat((-sin, sin), -1).to(like.dtype)
