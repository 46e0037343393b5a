"""GPT-2: LayerNorm, learned positions, one fused qkv product, as many K/V heads as query heads.

Its products are stored as (in, out); they are turned once, at load. Axes as in layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stairs.attention.attend import attend
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.config import ModelConfig
from stairs.models.fused import activated, add_norm
from stairs.models.layers import LayerNorm, Linear
from stairs.models.weights import Weights

__all__ = ["GPT2"]


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


class GPT2:
    def __init__(self, config: ModelConfig, weights: Weights, *, attention_backend: str) -> None:
        self.config = config
        self.attention_backend = attention_backend
        c = config
        self.embedding = weights.embedding("wte")
        self.positions = weights.embedding("wpe")
        self.layers = [_layer(config, weights, f"h.{i}") for i in range(c.num_layers)]
        self.norm = _norm(config, weights, "ln_f")
        self.head = weights.head(self.embedding, tied=c.tie_word_embeddings)

    def forward(
        self, ids: Tensor, positions: Tensor, kv: Sequence[LayerKV], meta: AttnMeta
    ) -> Tensor:
        """ids, positions (T,) -> hidden states (T, C) after the last norm; K/V are written."""
        c = self.config
        x = self.embedding(ids) + self.positions(positions)
        normed = self.layers[0].attention_norm(x)
        norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for layer, layer_kv, next_norm in zip(self.layers, kv, norms, strict=True):
            heads = layer.qkv(normed).view(len(x), 3, c.num_heads, c.head_dim)
            q, k, v = heads.unbind(dim=1)
            out = attend(q, k, v, layer_kv, meta, backend=self.attention_backend)
            normed, x = add_norm(x, layer.output(out.reshape(len(x), -1)), layer.mlp_norm)
            branch = layer.down(activated(layer.up(normed), c.activation))
            normed, x = add_norm(x, branch, next_norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        return self.head(hidden)


def _norm(config: ModelConfig, weights: Weights, name: str) -> LayerNorm:
    weight, bias = weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias")
    return LayerNorm(weight, bias, config.norm_eps)


def _linear(weights: Weights, name: str) -> Linear:
    return weights.linear(name, bias=True, transposed=True)


def _layer(c: ModelConfig, weights: Weights, prefix: str) -> Layer:
    return Layer(
        attention_norm=_norm(c, weights, f"{prefix}.ln_1"),
        qkv=_linear(weights, f"{prefix}.attn.c_attn"),
        output=_linear(weights, f"{prefix}.attn.c_proj"),
        mlp_norm=_norm(c, weights, f"{prefix}.ln_2"),
        up=_linear(weights, f"{prefix}.mlp.c_fc"),
        down=_linear(weights, f"{prefix}.mlp.c_proj"),
    )
