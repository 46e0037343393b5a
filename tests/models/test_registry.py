"""What a step reads of a model's matrices, as they lie in memory."""

from __future__ import annotations

import gguf
import pytest
import torch

from checkpoints.model_files import CONFIG, as_llama_cpp, seeded_tensors, write_gguf
from harness import Tiny
from stairs.accounting import costs
from stairs.checkpoints.checkpoint import open_checkpoint
from stairs.models.packed import FEW_ROWS
from stairs.models.registry import build_model, matrix_bytes_read


def test_dense_matrices_are_read_once_a_step(tiny: Tiny):
    model = tiny.engine(dtype="float32").runner.model
    macs = sum(costs.linear_macs(tiny.config).values())
    head = costs.head_macs(tiny.config)
    for num_rows in (1, 512):
        read = matrix_bytes_read(model, num_rows=num_rows, logits_rows=1)
        assert read == {"weights": 4 * macs, "head": 4 * head}
    assert matrix_bytes_read(model, num_rows=128, logits_rows=0)["head"] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_packed_rows_are_read_as_they_lie(tmp_path, packed):
    tensors = as_llama_cpp(seeded_tensors(), CONFIG, gguf.MODEL_ARCH.LLAMA)
    types = {name: "Q4_1" for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(tmp_path / "tiny.gguf", tensors, types=types)
    checkpoint = open_checkpoint(str(path))
    model = build_model(
        checkpoint.config,
        checkpoint.tensors,
        dtype=torch.float32,
        device=torch.device("cpu"),
        packed=packed,
    )
    macs = sum(costs.linear_macs(CONFIG).values())
    for num_rows in (1, FEW_ROWS):
        read = matrix_bytes_read(model, num_rows=num_rows, logits_rows=1)
        assert read["weights"] == macs * 20 // 32  # Q4_1: 32 values in 20 bytes
    many = matrix_bytes_read(model, num_rows=512, logits_rows=1)["weights"]
    has_copy = any(layer.qkv.dense is not None for layer in model.layers)
    assert many == (4 * macs if has_copy else macs * 20 // 32)
    assert not (packed and has_copy)
