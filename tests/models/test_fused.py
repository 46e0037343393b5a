"""The glue between products: the kernels against float64, beside their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta, LayerKV
from stairs.models.fused import add_norm, add_norm_torch, gated, gated_torch, rotate_torch
from stairs.models.layers import LayerNorm, RMSNorm, Rotary

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
on_gpu = pytest.param("cuda", marks=gpu)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_right(ours: Tensor, twin: Tensor, exact: Tensor) -> None:
    slack = torch.finfo(ours.dtype).eps * exact.abs().max()
    error, other = (ours.double() - exact).abs().max(), (twin.double() - exact).abs().max()
    assert error <= 2 * other + slack, (error, other)


@dtypes
@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 768), (70, 4096), (5, 100), (0, 64)])
def test_add_norm(tokens: int, width: int, kind: str, device: str, dtype: torch.dtype) -> None:
    x, branch = (random(tokens + i, width, dtype=dtype, device=device)[i:] for i in range(2))
    weight = 1 + 0.1 * random(width, dtype=dtype, device=device)
    bias = random(width + 1, dtype=dtype, device=device)[1:]
    norm = RMSNorm(weight, 1e-5) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    wide = (
        RMSNorm(weight.double(), 1e-5)
        if kind == "rms"
        else LayerNorm(weight.double(), bias.double(), 1e-5)
    )
    normed, total = add_norm(x, branch, norm)
    assert torch.equal(total, x + branch)
    if tokens:
        assert_right(normed, add_norm_torch(x, branch, norm)[0], wide(total.double()))


@dtypes
@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (7, 3072), (3, 100), (300, 14336)])
def test_gated(tokens: int, width: int, device: str, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype, device=device)
    exact = gated_torch(gate_up.double(), "silu")
    assert_right(gated(gate_up, "silu"), gated_torch(gate_up, "silu"), exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@dtypes
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128), (6, 2, 80), (4, 4, 100)]
)
def test_rotate_and_write(
    heads: int, kv_heads: int, head_dim: int, rotated: bool, normed: bool, dtype: torch.dtype
) -> None:
    from stairs.models.triton_glue import rotate_and_write_triton

    tokens, block = 37, 16
    projected = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device="cuda")
    rotary = Rotary(head_dim, 1e4, dtype=dtype, device=torch.device("cuda"))
    rotation = rotary(torch.arange(1000, 1000 + tokens, device="cuda")) if rotated else None
    weights = [1 + 0.1 * random(head_dim + i, dtype=dtype, device="cuda")[i:] for i in range(2)]
    norms = (RMSNorm(weights[0], 1e-6), RMSNorm(weights[1], 1e-6)) if normed else None
    wide = (RMSNorm(weights[0].double(), 1e-6), RMSNorm(weights[1].double(), 1e-6))
    pools = [torch.full((5, kv_heads, block, head_dim), torch.nan, dtype=dtype, device="cuda")
             for _ in range(2)]  # fmt: skip
    slots = torch.randperm(5 * block)[:tokens].cuda()
    slots[3], slots[4] = -1, 2**40  # dropped
    meta = AttnMeta(
        cu_q=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        kv_len=torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        block_table=torch.zeros((1, 5), dtype=torch.int32, device="cuda"),
        slots=slots,
        counts=torch.zeros((1, 3), dtype=torch.int64, device="cuda"),
    )
    q = rotate_and_write_triton(projected, rotation, norms, LayerKV(*pools), meta, num_heads=heads)
    twins = rotate_torch(projected, rotation, norms, num_heads=heads)
    wide_rotation = tuple(x.double() for x in rotation) if rotation is not None else None
    exact = rotate_torch(
        projected.double(),
        wide_rotation,  # type: ignore[arg-type]
        wide if normed else None,
        num_heads=heads,
    )
    assert_right(q, twins[0], exact[0])
    kept = [t for t in range(tokens) if t not in (3, 4)]
    for pool, twin, want in zip(pools, twins[1:], exact[1:], strict=True):
        written = pool[slots[kept] // block, :, slots[kept] % block]
        assert_right(written, twin[kept], want[kept])
        assert pool.isfinite().sum() == len(kept) * kv_heads * head_dim
    row_bytes = 2 * kv_heads * head_dim * dtype.itemsize
    assert meta.counts[0, AttnMeta.KV_BYTES_WRITTEN] == tokens * row_bytes
