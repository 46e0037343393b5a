"""The kernel over packed rows: the dequantised matrix's product, the same bits in any company."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stairs.checkpoints.dequantize import dequantize
from stairs.checkpoints.tensors import PackedRows
from stairs.models.block_values import BLOCKS
from stairs.models.quantised_cpu import packed_matrices, supports

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's float16 numbers lie


def packed(kind: str, shape: tuple[int, int], *, heads: int = 0) -> PackedRows:
    rng = np.random.default_rng(shape[0])
    quant = gguf.GGMLQuantizationType[kind]
    if kind in SCALES:  # the gguf package reads these and does not write them
        block, num_bytes = gguf.GGML_QUANT_SIZES[quant]
        rows = rng.integers(0, 256, (shape[0], shape[1] // block * num_bytes), dtype=np.uint8)
        blocks = rows.reshape(-1, num_bytes)
        for place in SCALES[kind]:
            numbers = rng.uniform(1e-3, 1e-2, len(blocks)).astype(np.float16)
            blocks[:, place : place + 2] = numbers[:, None].view(np.uint8)
    else:
        rows = gguf.quantize(rng.standard_normal(shape, dtype=np.float32), quant)
        rows = np.ascontiguousarray(rows).view(np.uint8).reshape(shape[0], -1)
    return PackedRows(torch.from_numpy(rows), kind, shape, heads)


def expected(x: torch.Tensor, part: PackedRows) -> torch.Tensor:
    out = x.double() @ dequantize(part.rows, part.type).double().t()
    if not part.rotated_heads:
        return out
    return out.view(len(x), part.rotated_heads, -1, 2).transpose(-1, -2).reshape(len(x), -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_the_dequantised_matrix_and_depends_on_no_other_row(kind: str) -> None:
    parts = (packed(kind, (96, 256), heads=3), packed(kind, (37, 256)), packed(kind, (4, 256)))
    matrices = packed_matrices(parts)
    torch.manual_seed(2)
    x = torch.randn(29, 256)
    alone = torch.cat([matrices.product(row[None]) for row in x])
    for num_rows in (1, 2, 3, 5, 7, 8, 13, 29):
        found = matrices.product(x[:num_rows])
        wanted = torch.cat([expected(x[:num_rows], part) for part in parts], dim=1)
        assert (found - wanted).abs().max() / wanted.abs().max() < 1e-6
        assert torch.equal(found, alone[:num_rows])


def test_threads_and_neighbouring_types_change_no_bit() -> None:
    parts = (packed("Q4_K", (300, 256)), packed("Q6_K", (65, 256)), packed("Q8_0", (512, 256)))
    x = torch.randn(3, 256)
    one_by_one = torch.cat([packed_matrices((part,)).product(x) for part in parts], dim=1)
    num_threads = torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            assert torch.equal(packed_matrices(parts).product(x), one_by_one)
            assert torch.get_num_threads() == num  # Numba's own start would have changed it
    finally:
        torch.set_num_threads(num_threads)


def test_rows_of_any_layout() -> None:
    part = packed("Q8_0", (64, 96))
    x = torch.randn(96, 5).t()
    assert torch.equal(packed_matrices((part,)).product(x), packed_matrices((part,)).product(x * 1))


@pytest.mark.parametrize(("kind", "shape"), [("IQ4_NL", (64, 256)), ("Q8_0", (3, 256))])
def test_what_it_leaves_to_others(kind: str, shape: tuple[int, int]) -> None:
    assert not supports(PackedRows(torch.empty((shape[0], 1), dtype=torch.uint8), kind, shape))
