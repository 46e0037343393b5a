"""Tiny seeded models, and the few ways in which tests drive an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stairs.checkpoints.configs import read_config
from stairs.config import CacheConfig, EngineConfig, ModelConfig, SamplingParams
from stairs.engine.build import build_engine
from stairs.engine.core import Engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class DictSource:
    """A TensorSource over a state dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].to(dtype).contiguous()

    def packed(self, name: str) -> None:
        return None

    def sample(self, name: str) -> bytes:
        return self.tensors[name].contiguous().flatten()[:64].numpy().tobytes()


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A seeded model: transformers' own, and the same weights for us."""

    reference: torch.nn.Module
    config: ModelConfig
    source: DictSource

    def engine(self, *, num_blocks: int = 512, dtype: str = "float64", **options) -> Engine:
        cache = {
            name: options.pop(name)
            for name in ("block_size", "enable_prefix_caching", "pin_memory_fraction")
            if name in options
        }
        if "prefill_chunk_size" in options:
            options.setdefault("max_num_batched_tokens", 4 * options["prefill_chunk_size"])
        return build_engine(
            self.config,
            self.source,
            EngineConfig(dtype=dtype, cache=CacheConfig(num_blocks=num_blocks, **cache), **options),
        )


# The families beside GPT-2: transformers' classes, and what sets each apart.
LLAMA_LIKE = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        },
    }),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 6}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
}  # fmt: skip
FAMILIES = ("gpt2", *LLAMA_LIKE)


def make_tiny(kind: str) -> Tiny:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    shared = {
        "vocab_size": 211, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
    }  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=1024, **shared)
        model = transformers.GPT2LMHeadModel(config)
    else:
        name, own = LLAMA_LIKE[kind]
        options = {
            "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "tie_word_embeddings": False, **shared, **own,
        }  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    tensors = dict(model.eval().state_dict())
    if kind == "gpt2" or config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_(std=0.1)  # fresh models have zeros there
    return Tiny(model, read_config(config.to_dict()), DictSource(tensors))


def run_all(engine: Engine, *, before_step: Callable[[int], None] | None = None) -> dict:
    """Step until idle; the tokens of every request that ended."""
    answers: dict[int, list[int]] = {}
    steps = 0
    while engine.has_work:
        if before_step is not None:
            before_step(steps)
        for event in engine.step():
            if event.token is not None:
                answers.setdefault(event.request, []).append(event.token)
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    return answers


def generate(engine: Engine, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    request = engine.add(prompt, sampling)
    return run_all(engine)[request]


def capture_logits(engine: Engine) -> dict[tuple[int, int], Tensor]:
    """Logits of every sampled row, by (request, position of the token they predict)."""
    seen: dict[tuple[int, int], Tensor] = {}
    build, logits_of = engine._batch.build, engine.runner.logits
    batches = []

    def build_and_keep(plan):
        batches.append(build(plan))
        return batches[-1]

    def logits_and_keep(hidden):
        logits = logits_of(hidden)
        for row, sequence in zip(logits, batches[-1].sampled, strict=True):
            seen[sequence.request, len(sequence.tokens)] = row.clone()
        return logits

    engine._batch.build = build_and_keep
    engine.runner.logits = logits_and_keep
    return seen


def prompt_logits(engine: Engine, prompt: list[int]) -> Tensor:
    """(T, V): logits of every position of ``prompt``, fed in the engine's own steps."""
    forward, parts = engine.runner.forward, []

    def forward_and_keep(batch):
        hidden = forward(batch)
        parts.append(engine.runner.logits(hidden))
        return hidden

    engine.runner.forward = forward_and_keep
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    run_all(engine)
    engine.runner.forward = forward
    return torch.cat(parts)
