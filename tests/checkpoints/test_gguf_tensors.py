"""A GGUF's tensors come out as transformers names, orders and values them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from checkpoints.model_files import (
    CONFIG,
    METADATA,
    as_llama_cpp,
    metadata_of,
    seeded_tensors,
    write_gguf,
    write_tiny_gguf,
)
from stairs.accounting.weights import parameter_count
from stairs.checkpoints.dequantize import QUANTISED, dequantize
from stairs.checkpoints.gguf import open_gguf
from stairs.checkpoints.gguf_config import read_gguf_config
from stairs.checkpoints.gguf_tensors import GGUFTensors
from stairs.config import ModelConfig
from stairs.errors import CheckpointError


def source_of(path: Path) -> GGUFTensors:
    file = open_gguf(path)
    return GGUFTensors(file, read_gguf_config(file))


def test_dense_tensors_survive_the_round_trip(tmp_path: Path):
    source, written = source_of(write_tiny_gguf(tmp_path / "tiny.gguf")), seeded_tensors()
    assert source.names() == written.keys()
    for name, tensor in written.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.load(name, torch.float32), tensor)
        assert source.packed(name) is None


GPT2 = ModelConfig(
    model_type="gpt2", vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=16, intermediate_size=256, max_position_embeddings=128, norm_eps=1e-5,
    activation="gelu_new", attention_bias=True, attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
QWEN3 = dataclasses.replace(CONFIG, model_type="qwen3", qk_norm=True, head_dim=32)
QWEN2 = dataclasses.replace(CONFIG, model_type="qwen2", attention_bias=True)
BIASED = dataclasses.replace(
    CONFIG, attention_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True
)
SMOLLM3 = dataclasses.replace(CONFIG, model_type="smollm3", num_layers=5, no_rope_layers=(3,))


@pytest.mark.parametrize(
    ("config", "arch"),
    [
        (GPT2, gguf.MODEL_ARCH.GPT2),
        (QWEN2, gguf.MODEL_ARCH.QWEN2),
        (QWEN3, gguf.MODEL_ARCH.QWEN3),
        (SMOLLM3, gguf.MODEL_ARCH.SMOLLM3),
        (BIASED, gguf.MODEL_ARCH.LLAMA),
    ],
    ids=["gpt2", "qwen2", "qwen3", "smollm3", "llama with biases"],
)
def test_each_family_is_read_back_as_it_was(tmp_path: Path, config: ModelConfig, arch: object):
    written = seeded_tensors(config)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        as_llama_cpp(written, config, arch),
        metadata=metadata_of(config),
        arch=config.model_type,
    )
    file = open_gguf(path)
    read = read_gguf_config(file)
    eps = read.norm_eps
    assert eps == pytest.approx(config.norm_eps)
    assert read == dataclasses.replace(config, norm_eps=eps, bos_token_id=None, eos_token_ids=())
    source = GGUFTensors(file, read)
    assert source.names() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(source.load(name, torch.float32), tensor), name
    assert sum(tensor.numel() for tensor in written.values()) == parameter_count(config)


def test_loads_in_the_dtype_asked_for_and_owns_the_result(tmp_path: Path):
    source = source_of(write_tiny_gguf(tmp_path / "tiny.gguf"))
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            first = source.load(name, dtype)
            assert first.dtype == dtype and first.is_contiguous()
            assert torch.equal(first, seeded_tensors()[name].to(dtype))
            first.fill_(0)
        assert torch.equal(source.load(name, torch.float32), seeded_tensors()[name])


@pytest.mark.parametrize("kind", sorted(QUANTISED))
def test_every_quantised_type_equals_the_gguf_package(kind: str):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(7)
    num_rows = 2**21 // (8 * block) + 5  # more than one thread's worth, and a rest
    rows = rng.integers(0, 256, (num_rows, 8 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales overflow, equally in both
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    found = dequantize(torch.from_numpy(rows), kind)
    assert found.shape == (num_rows, 8 * block) and found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)


def test_quantised_types_are_all_that_the_package_reads():
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "MXFP4"} <= QUANTISED
    assert not QUANTISED & {"F32", "F16", "BF16", "I32"}


WIDE = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=256, head_dim=64)


@pytest.mark.parametrize("kind", ["F16", "BF16", *sorted(QUANTISED)])
def test_a_file_of_each_type_gives_the_packages_values(tmp_path: Path, kind: str):
    """Dense rows of q and k are put back in order, packed ones lie as in the file."""
    quant = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(5)
    packed, dense = {}, {}
    for name, tensor in seeded_tensors(WIDE).items():
        if tensor.ndim == 1:
            dense[name] = tensor
        else:
            shape = (tensor.shape[0], tensor.shape[1] // block * size)
            packed[name] = torch.from_numpy(rng.integers(0, 128, shape, dtype=np.uint8))
    written = as_llama_cpp(packed | dense, WIDE, gguf.MODEL_ARCH.LLAMA)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in (METADATA | metadata_of(WIDE) | {"llama.rope.dimension_count": 64}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, array in written.items():
        writer.add_tensor(name, array, raw_dtype=quant if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = source_of(tmp_path / "m.gguf")
    for name, rows in packed.items():
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(rows.numpy(), quant)
        loaded, found = source.load(name, torch.float32), source.packed(name)
        np.testing.assert_array_equal(loaded.numpy(), expected)
        assert found.type == kind and found.shape == source.shape(name)
        if found.rotated_heads:  # as in the file: row 2i + j is row i + j * (half a head)
            rows = rows.view(found.rotated_heads, 2, -1, rows.shape[1]).transpose(1, 2)
        assert torch.equal(found.rows, rows.reshape(found.rows.shape))


def test_packed_rows_are_out_by_in_where_the_dense_weight_is_not(tmp_path: Path):
    written = seeded_tensors(GPT2)
    path = write_gguf(
        tmp_path / "g.gguf", as_llama_cpp(written, GPT2, gguf.MODEL_ARCH.GPT2), arch="gpt2",
        metadata=metadata_of(GPT2), types={"blk.0.attn_qkv.weight": "Q8_0"},
    )  # fmt: skip
    source, name = source_of(path), "h.0.attn.c_attn.weight"
    packed = source.packed(name)
    assert source.shape(name) == (64, 192) and packed.shape == (192, 64)
    assert torch.equal(dequantize(packed.rows, packed.type).T, source.load(name, torch.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_packages_quantiser_wrote(tmp_path: Path, kind: str):
    linear = [n for n, t in as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA).items()
              if t.ndim == 2]  # fmt: skip
    source = source_of(write_tiny_gguf(tmp_path / "q.gguf", types=dict.fromkeys(linear, kind)))
    quant = gguf.GGMLQuantizationType[kind]
    for name, tensor in seeded_tensors().items():
        if tensor.ndim == 2:
            expected = gguf.dequantize(gguf.quantize(tensor.numpy(), quant), quant)
            np.testing.assert_array_equal(source.load(name, torch.float32).numpy(), expected)
            assert np.abs(expected - tensor.numpy()).max() < 0.1


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path):
    arrays = as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA)
    for damage, message in (
        ("missing", "lacks tensor 'blk.1.ffn_up.weight'"),
        ("unknown", "has the unknown tensor 'blk.1.ffn_gate_inp.weight'"),
        ("misshapen", r"'blk.1.ffn_up.weight' is \(95, 64\), the config says \(96, 64\)"),
    ):
        changed = dict(arrays)
        if damage == "missing":
            del changed["blk.1.ffn_up.weight"]
        elif damage == "unknown":
            changed["blk.1.ffn_gate_inp.weight"] = np.zeros((4, 64), np.float32)
        else:
            changed["blk.1.ffn_up.weight"] = changed["blk.1.ffn_up.weight"][:-1]
        with pytest.raises(CheckpointError, match=message):
            source_of(write_gguf(tmp_path / "bad.gguf", changed))


def test_a_type_that_holds_no_weights_is_refused(tmp_path: Path):
    arrays = as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA)
    writer = gguf.GGUFWriter(tmp_path / "int.gguf", "llama")
    for key, value in METADATA.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array.astype(np.int32) if name == "output_norm.weight" else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' has type I32"):
        source_of(tmp_path / "int.gguf")
