"""Tiny model files for tests: GGUFs written by the gguf package, headers written byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from stairs.checkpoints.layout import tensor_specs
from stairs.config import ModelConfig

NUM_TOKENS = 96
METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
CONFIG = ModelConfig(
    model_type="llama", vocab_size=NUM_TOKENS, hidden_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=128,
    norm_eps=float(np.float32(1e-6)), activation="silu", rope_theta=10000.0, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip


def seeded_tensors(config: ModelConfig = CONFIG, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator) * 0.1
        for name, spec in tensor_specs(config).items()
    }


def as_llama_cpp(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, arch: gguf.MODEL_ARCH
) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of them, by the gguf package's own table of names."""
    table = gguf.get_tensor_name_map(arch, config.num_layers)
    rotated = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    found = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        array, last = tensor.numpy(), stem.rpartition(".")[2]
        if last in rotated and arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3):
            halves = array.reshape(rotated[last], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if last in ("c_attn", "c_proj", "c_fc") and part == "weight":
            array = array.T.copy()
        gguf_name = table.get_name(stem) or table.get_name("transformer." + stem)
        found[f"{gguf_name}.{part}"] = array
    return found


def metadata_of(config: ModelConfig) -> dict[str, object]:
    """What llama.cpp's converter writes."""
    arch, gpt2 = config.model_type, config.model_type == "gpt2"
    keys: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
    }
    if gpt2:
        keys["attention.layer_norm_epsilon"] = 1e-5
    else:
        keys |= {
            "attention.head_count_kv": config.num_kv_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, Any] | None = None,
    arch: str = "llama",
    types: Mapping[str, str] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in (METADATA if metadata is None else metadata).items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_gguf(path: Path, **options: Any) -> Path:
    """The model of ``CONFIG`` with seeded weights."""
    return write_gguf(
        path, as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA), **options
    )


CONFIG_JSON: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 128, "rms_norm_eps": CONFIG.norm_eps, "hidden_act": "silu",
    "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], *, num_files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = list(tensors), {}
    for part in range(num_files):
        file = f"model-{part + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[part::num_files]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key_value(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor_row(
    name: str, shape: tuple[int, ...], kind: int, offset: int, *, num_dims: int | None = None
) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    count = struct.pack("<I", len(shape) if num_dims is None else num_dims)
    return string(name) + count + dims + struct.pack("<IQ", kind, offset)


def header(
    *parts: bytes, num_tensors: int = 0, num_keys: int = 0, version: int = 3, data: int = 0
) -> bytes:
    """A whole file: the counts as claimed, the parts, then aligned zeros as tensor data."""
    body = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(parts)
    return body + bytes(-len(body) % 32 + data)
