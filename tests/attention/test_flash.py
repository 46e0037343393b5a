"""The public op on a CPU: one law for every option, errors that name the argument, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stairs
from attention.dense import attention_float64
from stairs.attention.flash import flash_attention, flash_attention_varlen
from stairs.errors import ConfigError


def tensors(num_q: int = 9, num_kv: int = 9, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = {"batch": 2, "heads": 6, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    s = shape | options
    torch.manual_seed(num_q * 1009 + num_kv)
    return tuple(
        torch.randn(s["batch"], rows, heads, s["head_dim"], dtype=s["dtype"])  # type: ignore[call-overload]
        for rows, heads in ((num_q, s["heads"]), (num_kv, s["kv_heads"]), (num_kv, s["kv_heads"]))
    )  # type: ignore[return-value]


@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (300, -1), (7, 5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [(300, 560), (64, 64), (2, 5), (5, 2), (1, 7), (300, 40)], ids=str
)
def test_every_rule(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int], softcap: float
) -> None:
    q, k, v = tensors(*lengths)
    rules = {"causal": causal, "window": window, "softcap": softcap}
    out, lse = flash_attention(q, k, v, return_lse=True, **rules)
    exact, exact_lse = attention_float64(q, k, v, **rules)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=3e-6)
    torch.testing.assert_close(flash_attention(q, k, v, **rules), out, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("num_q", "num_kv", "batch"), [(0, 4, 2), (4, 0, 2), (0, 0, 1), (3, 3, 0)])
def test_empty(num_q: int, num_kv: int, batch: int) -> None:
    """K21"""
    out, lse = flash_attention(*tensors(num_q, num_kv, batch=batch), return_lse=True)
    assert out.shape == (batch, num_q, 6, 16) and lse.shape == (batch, 6, num_q)
    assert not out.any() and lse.isneginf().all() | (num_kv > 0)


def test_scores_far_beyond_the_cap() -> None:
    """K10"""
    q, k, v = tensors()
    assert flash_attention(q * 1e4, k, v, softcap=50.0).isfinite().all()


def test_ragged_sequences_are_dense_ones_end_to_end() -> None:
    """K19, K20: empty sequences anywhere; one with queries and no keys answers zero."""
    ends_q, ends_kv = [0, 0, 5, 9, 9, 10], [0, 3, 10, 10, 17, 18]
    q, k, v = (x[0] for x in tensors(10, 18, batch=1))
    cu_q, cu_kv = (torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_kv))
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_kv, max_q=5, causal=True, return_lse=True)
    for i in range(5):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_kv[i : i + 2])
        exact, exact_lse = attention_float64(
            q[None, rows], k[None, keys], v[None, keys], causal=True
        )
        torch.testing.assert_close(out[rows].double(), exact[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[:, rows].double(), exact_lse[0], rtol=0, atol=2e-6)
    assert not out[5:9].any()


def test_gradients_are_those_of_the_materialised_attention() -> None:
    q, k, v = (x.double().requires_grad_() for x in tensors(7, 12))
    out = flash_attention(q, k, v, causal=True, window=(5, -1))
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    exact, _ = attention_float64(q, k, v, causal=True, window=(5, -1))
    theirs = torch.autograd.grad((exact * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_explain_computes_nothing() -> None:
    q, k, v = (x.to("meta") for x in tensors())
    choice = flash_attention(q, k, v, explain=True)
    assert choice.reason and stairs.flash_attention is flash_attention
    ends = torch.tensor([0, 9], dtype=torch.int32, device="meta")
    assert flash_attention_varlen(q[0], k[0], v[0], ends, ends, max_q=9, explain=True) == choice


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"heads": 3}, {}, "q's 3 heads are not a multiple of k's 2"),
        ({}, {"window": (-2, 0)}, r"window must be \(left, right\)"),
        ({}, {"softcap": -1.0}, "softcap must be 0"),
        ({}, {"scale": 0.0}, "scale must be positive"),
        ({"dtype": torch.int64}, {}, "dtypes"),
    ],
)
def test_refusals(change: dict[str, object], options: dict[str, object], message: str) -> None:
    dtype = change.pop("dtype", torch.float32)
    q, k, v = (x.to(dtype) for x in tensors(**change))  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=message) as refused:
        flash_attention(q, k, v, **options)  # type: ignore[call-overload]
    assert refused.value.param


def test_shapes_that_do_not_fit() -> None:
    q, k, v = tensors()
    for args in ((q[0], k, v), (q, k, v[:, :3]), (q[:1], k, v), (q[..., :8], k, v)):
        with pytest.raises(ConfigError):
            flash_attention(*args)
    ends = torch.tensor([0, 9])
    with pytest.raises(ConfigError, match="cu_q must be int32"):
        flash_attention_varlen(q[0], k[0], v[0], ends, ends, max_q=9)
