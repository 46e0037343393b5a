"""The plan of how weights lie in memory is how an engine holds them, on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from checkpoints.model_files import (
    CONFIG,
    as_llama_cpp,
    metadata_of,
    seeded_tensors,
    write_folder,
    write_gguf,
)
from stairs.accounting import hardware
from stairs.accounting.weights import FEW_ROWS, stored_weight_bytes
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.checkpoints.residence import (
    KERNEL_TYPES,
    Residence,
    held_weights,
    is_small,
    packed_bytes,
    plain_types,
    source_types,
)
from stairs.checkpoints.tensors import PackedRows
from stairs.config import CacheConfig, EngineConfig, ModelConfig
from stairs.engine.build import build_engine
from stairs.errors import CheckpointError
from stairs.models.block_values import BLOCKS
from stairs.models.layers import Rotary
from stairs.models.quantised_cpu import supports
from stairs.models.registry import matrix_bytes_read
from stairs.planner.find import find_model
from stairs.planner.memory import plan_weights

GPT2 = ModelConfig(
    model_type="gpt2", vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=16, intermediate_size=256, max_position_embeddings=64, norm_eps=1e-5,
    activation="gelu_new", tie_word_embeddings=True, attention_bias=True,
    attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
CPU = hardware.DEVICES["cpu"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor a model holds; what rope derives from a config is no weight."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Rotary | ModelConfig):
        return
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif type(value).__module__.startswith("stairs.models"):
        for part in vars(value).values():
            yield from tensors_in(part)


def held_by(model: object) -> int:
    """Bytes of different memory: a tied head is the embedding."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(model)}.values())


def write(folder: Path, config: ModelConfig, kind: str, *, tied: bool = False) -> Path:
    arch = {"gpt2": gguf.MODEL_ARCH.GPT2}.get(config.model_type, gguf.MODEL_ARCH.LLAMA)
    tensors = as_llama_cpp(seeded_tensors(config), config, arch)
    if tied:
        tensors.pop("output.weight", None)
    types = {name: kind for name, array in tensors.items() if array.ndim == 2}
    return write_gguf(
        folder / f"{kind}.gguf", tensors, arch=config.model_type, metadata=metadata_of(config),
        types=types,
    )  # fmt: skip


@pytest.mark.parametrize("wide_vectors", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [0, 2**40])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_an_engine_holds_what_was_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: ModelConfig,
    kind: str,
    budget: int,
    dtype: str,
    wide_vectors: bool,
) -> None:
    for module in ("stairs.engine.build", "stairs.models.weights"):
        monkeypatch.setattr(f"{module}.has_wide_vectors", lambda: wide_vectors)
    checkpoint = open_checkpoint(str(write(tmp_path, config, kind)))
    engine = build_engine(
        checkpoint.config,
        checkpoint.tensors,
        EngineConfig(
            device="cpu",
            dtype=dtype,
            dense_weights_memory_bytes=budget,
            cache=CacheConfig(num_blocks=4),
        ),
    )
    residence = Residence(
        device="cpu",
        dtype=dtype,
        packed=budget == 0,
        batch_invariant=False,
        wide_vectors=wide_vectors,
    )
    found = find_model(str(checkpoint.path))
    assert found.types == source_types(checkpoint.tensors, checkpoint.config)
    planned = held_weights(found.config, found.types, residence)
    assert planned == engine.weights
    model = engine.runner.model
    assert planned.total == held_by(model)
    read = matrix_bytes_read(model, num_rows=1, logits_rows=1)
    assert read["head"] == planned.parts[
        "embedding" if config.tie_word_embeddings else "head"
    ].read(1)


def test_a_dense_copy_serves_steps_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the CPU lacks wide vectors; the values are the same, also of matrices that a GPT-2
    checkpoint has the other way round."""
    from harness import prompt_logits

    for config in (CONFIG, GPT2):
        checkpoint = open_checkpoint(str(write(tmp_path, config, "Q8_0")))
        logits = []
        for wide in (True, False):
            for module in ("stairs.engine.build", "stairs.models.weights"):
                monkeypatch.setattr(f"{module}.has_wide_vectors", lambda wide=wide: wide)
            engine = build_engine(
                checkpoint.config,
                checkpoint.tensors,
                EngineConfig(device="cpu", cache=CacheConfig(num_blocks=16)),
            )
            assert engine.weights.reads_packed(FEW_ROWS)
            assert engine.weights.reads_packed(FEW_ROWS + 1) == wide
            logits.append(prompt_logits(engine, list(range(40))))
        assert (logits[0] - logits[1]).abs().max() / logits[0].abs().max() < 1e-5


def test_a_folder_in_16_bit_is_planned_as_it_is_held(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in seeded_tensors().items()}
    folder = write_folder(tmp_path / "model", tensors)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"torch_dtype": "bfloat16", ', 1))
    checkpoint = open_checkpoint(str(folder))
    engine = build_engine(
        checkpoint.config, checkpoint.tensors, EngineConfig(cache=CacheConfig(num_blocks=4))
    )
    found = find_model(str(folder))
    assert plan_weights(found.config, found.types, device=CPU, dtype="float32") == engine.weights
    assert engine.weights.total == held_by(engine.runner.model)
    assert engine.weights.total < stored_weight_bytes(CONFIG, 4)


def test_a_folder_is_planned_by_its_files_not_by_what_its_config_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", seeded_tensors(), num_files=2)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"torch_dtype": "bfloat16", ', 1))
    found = find_model(str(folder))
    assert set((found.types or {}).values()) == {"F32"}
    held = plan_weights(found.config, found.types, device=CPU, dtype="float32")
    assert held.total == stored_weight_bytes(CONFIG, 4)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"]
)
def test_a_folder_with_a_broken_file_is_one_line_or_the_configs_word(
    tmp_path: Path, content: bytes
) -> None:
    folder = write_folder(tmp_path / "model", seeded_tensors())
    (folder / "model.safetensors").write_bytes(content)
    try:
        found = find_model(str(folder))
    except CheckpointError as error:
        assert "model.safetensors" in str(error) and "\n" not in str(error)
    else:
        assert found.types == plain_types(CONFIG)


def test_a_plan_says_how_matrices_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_model("smollm2")
    monkeypatch.setattr("stairs.planner.memory.has_wide_vectors", lambda: True)
    packed = plan_weights(found.config, found.types, device=CPU, dtype="float32")
    assert packed.form == "matrices as in the file (Q4_1, Q8_0)"
    monkeypatch.setattr("stairs.planner.memory.has_wide_vectors", lambda: False)
    both = plan_weights(found.config, found.types, device=CPU, dtype="float32")
    assert "a copy in float32" in both.form
    assert both.total > 5 * packed.total
    monkeypatch.setattr("stairs.planner.memory.available_memory", lambda: 10**8)
    small = plan_weights(found.config, found.types, device=CPU, dtype="float32")
    assert small.total == packed.total  # no room for a copy
    card = plan_weights(
        found.config, found.types, device=hardware.DEVICES["h200"], dtype="bfloat16"
    )
    assert card.total == stored_weight_bytes(found.config, 2)


def test_the_kernels_types_are_the_kernels() -> None:
    assert set(BLOCKS) == KERNEL_TYPES | {"F32"}  # which it reads for --batch-invariant
    residence = Residence(
        device="cpu", dtype="float32", packed=False, batch_invariant=False, wide_vectors=True
    )
    for kind in KERNEL_TYPES:
        block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        for shape in ((4, 256), (3, 256), (4, 256 + block), (8, 16)):
            if shape[1] % block:
                continue
            assert packed_bytes(kind, shape) == shape[0] * shape[1] // block * num_bytes
            rows = torch.zeros(shape[0], shape[1] // block * num_bytes, dtype=torch.uint8)
            assert residence.in_registers(kind, shape) == supports(PackedRows(rows, kind, shape))


def test_small_is_less_than_32_bits() -> None:
    small = {kind.name for kind in gguf.GGMLQuantizationType if is_small(kind.name)}
    assert {"F16", "BF16", "IQ2_XXS", "Q6_K"} <= small
    assert not {"F32", "F64", "I32", "I64"} & small


def test_a_config_alone_says_its_dtype() -> None:
    assert set(plain_types(CONFIG).values()) == {"F32"}
    assert set(plain_types(find_model("smollm2-135m-instruct").config).values()) == {"BF16"}
    turned = plain_types(GPT2)
    assert turned["h.0.attn.c_attn.weight"] == "F32"
