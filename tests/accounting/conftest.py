"""Two models written out by hand: the one every seed number is about, and the usual GQA example."""

from __future__ import annotations

import pytest

from stairs.config import ModelConfig


@pytest.fixture(scope="session")
def gpt2() -> ModelConfig:
    return ModelConfig(
        model_type="gpt2",
        vocab_size=50257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=1024,
        norm_eps=1e-5,
        activation="gelu_new",
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def llama_8b() -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        activation="silu",
        rope_theta=500000.0,
        dtype="bfloat16",
    )
