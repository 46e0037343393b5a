"""Each family as transformers itself saves it: config understood, every tensor found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.errors import ConfigError

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2_SHAPE = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2, multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama 3, multi-query, tied": (
        "Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 64, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {}),
    "gpt2": ("GPT2", {}),
}  # fmt: skip


def build(family: str, changes: dict[str, Any]) -> torch.nn.Module:
    shape = GPT2_SHAPE if family == "GPT2" else SHAPE
    config = getattr(transformers, f"{family}Config")(**shape | changes)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(3)
    return getattr(transformers, family + head)(config)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", ["one file", "many"])
def test_opens_with_every_tensor(tmp_path: Path, name: str, shards: str):
    model = build(*MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size="60KB" if shards == "many" else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > (shards == "many")
    checkpoint = open_checkpoint(str(tmp_path))
    state = {
        name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()
    }
    if checkpoint.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert checkpoint.tensors.names() == state.keys()
    for tensor_name, tensor in state.items():
        assert torch.equal(checkpoint.tensors.load(tensor_name, torch.float32), tensor)
    assert checkpoint.config.eos_token_ids == (2,)


def test_the_window_bounds_the_context(tmp_path: Path):
    build("Mistral", {"sliding_window": 64}).save_pretrained(tmp_path)
    config = open_checkpoint(str(tmp_path)).config
    assert (config.max_position_embeddings, config.context_length) == (128, 64)


def test_a_family_that_transformers_has_and_we_do_not(tmp_path: Path):
    transformers.GemmaConfig(**SHAPE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type 'gemma' does not run here; one of llama"):
        open_checkpoint(str(tmp_path), load_format="dummy")
