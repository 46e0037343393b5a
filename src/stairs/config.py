"""What a model is, how an engine runs it, how a request samples: frozen values, checked when built.

Standard library only: the planner and the CLI read these without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stairs.errors import ConfigError, InvalidRequestError

__all__ = [
    "DTYPE_BYTES",
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "CacheConfig",
    "DeviceName",
    "EngineConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "SamplingParams",
]

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

MAX_CHOICES = 128
MAX_LOGPROBS = 20

AttentionBackend = Literal["auto", "reference", "online", "cpu", "triton", "hopper"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Layers whose MLP is ``experts_per_token`` of ``num_experts`` small ones, and a shared one."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # intermediate size of one expert
    shared_size: int = 0  # of the expert every token passes through; 0: none
    num_dense_layers: int = 0  # the first layers keep a plain MLP of intermediate_size
    expert_bias: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token {self.experts_per_token} must lie in 1 to num_experts "
                f"{self.num_experts}",
                param="experts_per_token",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Latent attention: one latent of ``kv_lora_rank`` and one rope key are stored for all heads.

    A head's q and k are ``nope_head_dim + rope_head_dim`` wide (ModelConfig.head_dim), its v is
    ``v_head_dim``.
    """

    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: q is projected directly


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder, in the words its config.json uses where those are shared by all families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # "silu" (gated MLP) or "gelu_new" (plain MLP)
    rope_theta: float | None = None  # None: learned positions
    rope_factors: tuple[float, ...] = ()  # frequency i is divided by factor i; empty: unscaled
    rope_attention_factor: float = 1.0  # multiplies cos and sin (YaRN)
    no_rope_layers: tuple[int, ...] = ()  # layers without position encoding (SmolLM3)
    qk_norm: bool = False  # RMSNorm over head_dim of each q and k head, before rope (Qwen3)
    sliding_window: int | None = None  # keys a row may see, itself included; None: all
    full_attention_layers: int = 0  # of num_layers, those the window does not bind
    norms_per_layer: int = 2
    attention_sinks: bool = False  # one learned score a query head (gpt-oss)
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    weight_format: str | None = None  # how the checkpoint packs its matrices: "fp8", "mxfp4"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the q, k and v projections
    attention_output_bias: bool = False  # of the o projection
    mlp_bias: bool = False
    dtype: str = "float32"  # the dtype the checkpoint was saved in
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "intermediate_size", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}", param=name)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
                param="num_kv_heads",
            )
        if not 0 <= self.full_attention_layers <= self.num_layers:
            raise ConfigError(
                f"full_attention_layers {self.full_attention_layers} exceeds num_layers "
                f"{self.num_layers}",
                param="full_attention_layers",
            )
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise ConfigError(
                f"rope_factors must hold head_dim / 2 = {self.head_dim // 2} values, "
                f"got {len(self.rope_factors)}",
                param="rope_factors",
            )

    @property
    def context_length(self) -> int:
        """Positions computed exactly: the trained ones, or the window if that is less."""
        trained = self.max_position_embeddings
        return min(trained, self.sliding_window or trained)

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head: 1 is MHA, num_heads is MQA, between is GQA."""
        return self.num_heads // self.num_kv_heads

    @property
    def gated_mlp(self) -> bool:
        """Three matrices (gate, up, down) rather than two; GPT-2's MLP is the plain one."""
        return self.activation != "gelu_new"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The K/V pool. ``num_blocks`` wins over ``memory_bytes``; both None: the engine's default."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    dtype: str = "auto"
    enable_prefix_caching: bool = True
    pin_memory_fraction: float = 0.25  # pinned prefixes may hold at most this share of the pool

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(
                f"block_size must be at least 1, got {self.block_size}", param="block_size"
            )
        if self.dtype != "auto" and self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"kv_cache_dtype {self.dtype!r} is unknown; one of auto, {', '.join(DTYPE_BYTES)}",
                param="kv_cache_dtype",
            )
        for name in ("num_blocks", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, got {value}", param=name)
        if not 0 <= self.pin_memory_fraction <= 1:
            raise ConfigError("pin_memory_fraction must lie in [0, 1]", param="pin_memory_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs. A step is one token for every decoding sequence plus at most
    ``chunks_per_step`` chunks of ``prefill_chunk_size`` prompt tokens (4 x 128 = 512)."""

    max_model_len: int | None = None  # None: the model's own context
    max_num_seqs: int = 64
    prefill_chunk_size: int = 128
    max_num_batched_tokens: int = 512  # prompt tokens a step: chunks_per_step x prefill_chunk_size
    dtype: str = "auto"
    # Bytes that a dense copy of the weights may take; beyond, they stay packed as in the file.
    dense_weights_memory_bytes: int | None = None
    attention_backend: AttentionBackend = "auto"
    # A row's logits are the same bits in any batch, however its prompt is cut; float32 on a CPU.
    batch_invariant: bool = False
    device: DeviceName = "auto"  # a supported GPU if there is one
    gpu_memory_utilization: float = 0.9  # share of a card's memory that everything may take
    seed: int | None = None  # of requests without their own; None: another at every start
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        for name in (
            "max_model_len", "max_num_seqs", "prefill_chunk_size", "max_num_batched_tokens"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
        if self.prefill_chunk_size % self.cache.block_size:
            raise ConfigError(
                f"prefill_chunk_size {self.prefill_chunk_size} is not a multiple of "
                f"block_size {self.cache.block_size}",
                param="prefill_chunk_size",
            )
        if self.max_num_batched_tokens % self.prefill_chunk_size:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is not a multiple of "
                f"prefill_chunk_size {self.prefill_chunk_size}",
                param="max_num_batched_tokens",
            )
        if self.dtype != "auto" and self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"dtype {self.dtype!r} is unknown; one of auto, {', '.join(DTYPE_BYTES)}",
                param="dtype",
            )
        if self.device not in get_args(DeviceName):
            raise ConfigError(
                f"device {self.device!r} is unknown; one of {', '.join(get_args(DeviceName))}",
                param="device",
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization {self.gpu_memory_utilization} must lie in (0, 1]",
                param="gpu_memory_utilization",
            )

    @property
    def chunks_per_step(self) -> int:
        return self.max_num_batched_tokens // self.prefill_chunk_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request picks tokens; vLLM's names and meanings. ``temperature=0`` is greedy.

    ``max_tokens=None`` means what is left of the context and of the pool.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1  # answers to one prompt; the i-th draws with seed + i
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # of the chosen token and this many of the likeliest
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require(0 <= self.temperature < math.inf, "temperature", "must be 0 or positive")
        self._require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]")
        self._require(0 <= self.min_p <= 1, "min_p", "must lie in [0, 1]")
        rule = "must lie in [0.01, 100]"
        self._require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", rule)
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(-2 <= getattr(self, name) <= 2, name, "must lie in [-2, 2]")
        for bias in self.logit_bias.values():
            self._require(-100 <= bias <= 100, "logit_bias", "must hold values in [-100, 100]")
        self._require(1 <= self.n <= MAX_CHOICES, "n", f"must lie in [1, {MAX_CHOICES}]")
        for name in ("logprobs", "prompt_logprobs"):
            num = getattr(self, name)
            rule = f"must lie in [0, {MAX_LOGPROBS}]"
            self._require(num is None or 0 <= num <= MAX_LOGPROBS, name, rule)
        self._require(self.top_k >= -1, "top_k", "must be -1, 0 (both: all tokens) or positive")
        if self.max_tokens is not None:
            self._require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
            self._require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"must be at most max_tokens {self.max_tokens}",
            )
        self._require(self.min_tokens >= 0, "min_tokens", "must be at least 0")
        self._require(all(self.stop), "stop", "must not hold an empty string")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        value: Any = getattr(self, name)
        if not holds:
            raise InvalidRequestError(f"{name} {rule}, got {value!r}", param=name)
