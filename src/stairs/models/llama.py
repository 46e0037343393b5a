"""Llama and its family: RMSNorm, rotary positions, grouped K/V heads, a gated MLP.

The config says what each member adds: biases, norms of q and k, layers without rotation, scaled
frequencies. Axes as in layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.config import ModelConfig
from stairs.models.between import Between
from stairs.models.fused import attend_rotated
from stairs.models.layers import Linear, RMSNorm, Rotary
from stairs.models.weights import Weights

__all__ = ["Llama"]


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    qkv: Linear  # rows: H*D of q, G*D of k, G*D of v
    qk_norms: tuple[RMSNorm, RMSNorm] | None
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
        following = [
            *((layer.input_norm, layer.qkv) for layer in self.layers[1:]),
            (self.norm, None),
        ]
        self.between = [
            Between(layer.output, layer.mlp_norm, layer.gate_up, layer.down, c.activation, *after)
            for layer, after in zip(self.layers, following, strict=True)
        ]

    def forward(
        self, ids: Tensor, positions: Tensor, kv: Sequence[LayerKV], meta: AttnMeta
    ) -> Tensor:
        """ids, positions (T,) -> hidden states (T, C) after the last norm; K/V are written."""
        x = self.embedding(ids)
        rotation = self.rotary(positions)
        fed = self.layers[0].qkv(self.layers[0].input_norm(x))
        for layer, layer_kv, between in zip(self.layers, kv, self.between, strict=True):
            attended = self._attention(layer, fed, rotation, layer_kv, meta)
            fed, x = between(attended, x)
        return fed

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) -> (R, V)."""
        return self.head(hidden)

    def _attention(
        self,
        layer: Layer,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_kv: LayerKV,
        meta: AttnMeta,
    ) -> Tensor:
        """qkv (T, H*D + 2 G*D) -> (T, H*D)."""
        c = self.config
        out = attend_rotated(
            qkv.view(len(qkv), -1, c.head_dim),
            rotation if layer.rotates else None,
            layer.qk_norms,
            layer_kv,
            meta,
            num_heads=c.num_heads,
            backend=self.attention_backend,
        )
        return out.reshape(len(qkv), -1)


def _layer(c: ModelConfig, weights: Weights, index: int) -> Layer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.tensor(f"{prefix}.{name}.weight"), c.norm_eps)

    prefix = f"model.layers.{index}"
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=weights.linear(*(f"{attn}.{name}_proj" for name in "qkv"), bias=c.attention_bias),
        qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if c.qk_norm else None,
        output=weights.linear(f"{attn}.o_proj", bias=c.attention_output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=c.mlp_bias),
        down=weights.linear(f"{mlp}.down_proj", bias=c.mlp_bias),
        rotates=index not in c.no_rope_layers,
    )
