"""Llama and its family: RMSNorm, rotary positions, grouped K/V heads, a gated MLP.

The config says what each member adds: biases, norms of q and k, layers without rotation, scaled
frequencies. Axes as in layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stairs.attention.attend import attend
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.config import ModelConfig
from stairs.models.layers import ACTIVATIONS, Linear, RMSNorm, Rotary, apply_rotary
from stairs.models.weights import Weights

__all__ = ["Llama"]


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    qkv: Linear  # rows: H*D of q, G*D of k, G*D of v
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear  # rows: F of gate, F of up
    down: Linear
    rotates: bool


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights, *, attention_backend: str) -> None:
        self.config = config
        self.attention_backend = attention_backend
        c = config
        assert c.rope_theta is not None
        self.embedding = weights.embedding("model.embed_tokens")
        self.layers = [_layer(config, weights, i) for i in range(c.num_layers)]
        self.norm = RMSNorm(weights.tensor("model.norm.weight"), c.norm_eps)
        self.rotary = Rotary(
            c.head_dim,
            c.rope_theta,
            factors=c.rope_factors,
            attention_factor=c.rope_attention_factor,
            dtype=weights.dtype,
            device=weights.device,
        )
        self.head = weights.head(self.embedding, tied=c.tie_word_embeddings)

    def forward(
        self, ids: Tensor, positions: Tensor, kv: Sequence[LayerKV], meta: AttnMeta
    ) -> Tensor:
        """ids, positions (T,) -> hidden states (T, C) after the last norm; K/V are written."""
        x = self.embedding(ids)
        cos, sin = self.rotary(positions)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = x + self._attention(layer, layer.input_norm(x), cos, sin, layer_kv, meta)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(ACTIVATIONS[self.config.activation](gate) * up)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        return self.head(hidden)

    def _attention(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, layer_kv: LayerKV, meta: AttnMeta
    ) -> Tensor:
        c = self.config
        heads = layer.qkv(x).view(len(x), -1, c.head_dim)
        kv_start, v_start = c.num_heads, c.num_heads + c.num_kv_heads
        q, k, v = heads[:, :kv_start], heads[:, kv_start:v_start], heads[:, v_start:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if layer.rotates:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = attend(q, k, v, layer_kv, meta, backend=self.attention_backend)
        return layer.output(out.reshape(len(x), -1))


def _layer(c: ModelConfig, weights: Weights, index: int) -> Layer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.tensor(f"{prefix}.{name}.weight"), c.norm_eps)

    prefix = f"model.layers.{index}"
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=weights.linear(*(f"{attn}.{name}_proj" for name in "qkv"), bias=c.attention_bias),
        q_norm=norm("self_attn.q_norm") if c.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if c.qk_norm else None,
        output=weights.linear(f"{attn}.o_proj", bias=c.attention_output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=c.mlp_bias),
        down=weights.linear(f"{mlp}.down_proj", bias=c.mlp_bias),
        rotates=index not in c.no_rope_layers,
    )
