"""The CPU kernels between products: torch's values, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from stairs.models.fused import add_norm_torch, gated_torch, rotate_torch
from stairs.models.glue_cpu import add_rms_norm, rotate, rotation, silu_mul
from stairs.models.layers import RMSNorm, Rotary

ROWS = [1, 3, 16, 17, 70]  # both sides of where threads begin


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within float32's rounding of a float64 reference."""
    return bool(((found - wanted).abs() <= 4e-7 * wanted.abs().max()).all())


@pytest.mark.parametrize("rows", ROWS)
def test_add_norm(rows: int) -> None:
    x, branch, weight = torch.randn(70, 113), torch.randn(70, 113), torch.randn(113)
    alone = torch.cat(
        [add_rms_norm(a[None], b[None], weight, 1e-5)[0] for a, b in zip(x, branch, strict=True)]
    )
    normed, total = add_rms_norm(x[:rows], branch[:rows], weight, 1e-5)
    norm = RMSNorm(weight.double(), 1e-5)
    wanted = add_norm_torch(x[:rows].double(), branch[:rows].double(), norm)
    assert close(normed, wanted[0]) and close(total, wanted[1])
    assert torch.equal(normed, alone[:rows])


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(rows: int) -> None:
    gate_up = torch.randn(70, 2 * 37) * 10
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 88.0, -88.0])
    alone = torch.cat([silu_mul(row[None]) for row in gate_up])
    found = silu_mul(gate_up[:rows])
    assert close(found, gated_torch(gate_up[:rows].double(), "silu"))
    assert torch.equal(found, alone[:rows])


def test_silu_mul_keeps_what_is_not_a_number() -> None:
    found = silu_mul(torch.tensor([[torch.nan, torch.inf, -1.0, 1.0, 1.0, torch.nan]]))
    assert found[0, 0].isnan() and found[0, 1] == torch.inf and found[0, 2].isnan()


@pytest.mark.parametrize("rows", ROWS)
def test_rotation(rows: int) -> None:
    options = {"theta": 10000.0, "attention_factor": 1.2, "device": torch.device("cpu")}
    angles = Rotary(24, dtype=torch.float64, **options)
    positions = torch.randint(0, 8192, (70,))
    cos, sin = rotation(positions[:rows], angles.inv_freq, 1.2)
    assert close(cos, angles(positions[:rows])[0]) and close(sin, angles(positions[:rows])[1])
    heads = torch.randn(70, 5, 24)
    wanted = rotate_torch(heads[:rows], (cos, sin), None, num_heads=3)
    found = heads[:rows].clone()
    rotate(found, cos, sin, 4)
    q, k, v = found.split((3, 1, 1), dim=1)
    assert close(q, wanted[0]) and close(k, wanted[1]) and torch.equal(v, wanted[2])
