"""The specification itself: against the definition written out, and the picture's claims."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.ragged import fresh
from stairs.attention.choose import choose, score_bytes_held
from stairs.attention.reference import reference_attention, visible_keys


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=fresh(), dtype=torch.float64).to(dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, i: int, h: int) -> tuple[list[float], float]:
    """Row i of head h by the definition, in Python floats: O and LSE."""
    num_q, num_heads, head_dim = q.shape
    num_kv, kv_heads, _ = k.shape
    g = h // (num_heads // kv_heads)
    seen = [j for j in range(num_kv) if j <= i + num_kv - num_q]
    weights = [math.exp(sum((q[i, h] * k[j, g]).tolist()) / math.sqrt(head_dim)) for j in seen]
    if not seen:
        return [0.0] * head_dim, -math.inf
    out = [
        sum(w * float(v[j, g, e]) for w, j in zip(weights, seen, strict=True)) / sum(weights)
        for e in range(head_dim)
    ]
    return out, math.log(sum(weights))


@pytest.mark.parametrize(("num_q", "num_kv"), [(2, 5), (5, 2), (1, 7), (3, 8), (4, 4), (4, 0)])
def test_it_is_the_definition(num_q: int, num_kv: int) -> None:
    """K11, K14, K15: bottom-right, in both directions, and natural logarithms."""
    q, k, v = random(num_q, 4, 6), random(num_kv, 2, 6), random(num_kv, 2, 6) + 1
    out, lse = reference_attention(q, k, v)
    for i in range(num_q):
        for h in range(4):
            expected, expected_lse = by_hand(q, k, v, i, h)
            torch.testing.assert_close(out[i, h], torch.tensor(expected, dtype=torch.float64))
            assert float(lse[i, h]) == pytest.approx(expected_lse, abs=1e-12)


def test_without_the_mask_every_key_is_seen() -> None:
    q, k, v = random(3, 2, 4), random(5, 2, 4), random(5, 2, 4)
    out, _ = reference_attention(q, k, v, causal=False)
    torch.testing.assert_close(out[2], reference_attention(q, k, v)[0][2])
    one, _ = reference_attention(q[:1], k, v)
    torch.testing.assert_close(out[0], one[0])


def test_leading_axes_are_a_batch() -> None:
    q, k, v = random(2, 3, 5, 4, 8), random(2, 3, 7, 2, 8), random(2, 3, 7, 2, 8)
    out, lse = reference_attention(q, k, v)
    one, one_lse = reference_attention(q[1, 2], k[1, 2], v[1, 2])
    assert out.shape == q.shape and lse.shape == (2, 3, 5, 4)
    torch.testing.assert_close(out[1, 2], one)
    torch.testing.assert_close(lse[1, 2], one_lse)


def test_visible_keys_is_a_staircase() -> None:
    assert visible_keys(range(2), range(5), past=3).int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert visible_keys(range(1, 3), range(2, 4), past=1).int().tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 12, 33])
def test_appending_a_token_changes_no_earlier_row(length: int, dtype: torch.dtype) -> None:
    """Keys and values of earlier tokens do not depend on later ones, nor do their rows: to the
    bit. Without the mask every row changes."""
    weights = [random(16, 4 * 8, dtype=dtype) / 4 for _ in range(3)]
    tokens = random(length + 1, 16, dtype=dtype)

    def project(fed: Tensor, weight: Tensor) -> Tensor:
        # One product a token: BLAS may round a row differently beside others.
        return torch.stack([token @ weight for token in fed]).view(-1, 4, 8)

    before = [project(tokens[:length], weight) for weight in weights]
    after = [project(tokens, weight) for weight in weights]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new[:length])
    old_rows, new_rows = (reference_attention(*qkv)[0] for qkv in (before, after))
    assert torch.equal(old_rows, new_rows[:length])
    old_rows, new_rows = (reference_attention(*qkv, causal=False)[0] for qkv in (before, after))
    assert not (old_rows == new_rows[:length]).all(dim=(1, 2)).any()


@pytest.mark.parametrize("cuts", [(1,), (16,), (16, 32), (5, 19, 20), tuple(range(1, 40))], ids=str)
def test_rows_do_not_depend_on_how_they_are_fed(cuts: tuple[int, ...]) -> None:
    """Token by token, in chunks, or the whole prompt: the same bits."""
    q, k, v = (random(40, n, 24, dtype=torch.float32) for n in (6, 2, 2))
    whole, _ = reference_attention(q, k, v)
    edges = [0, *cuts, 40]
    chunks = [
        reference_attention(q[start:stop], k[:stop], v[:stop])[0]
        for start, stop in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def test_scores_of_ten_thousand_do_not_overflow() -> None:
    q = torch.full((1, 1, 1), 100.0)
    k = torch.tensor([100.0, 99.99, -100.0]).view(3, 1, 1)
    v = torch.tensor([1.0, 2.0, 1e6]).view(3, 1, 1)
    out, lse = reference_attention(q, k, v, scale=1.0)
    ratio = math.exp(float(q * k[1] - q * k[0]))
    assert float(out) == pytest.approx((1 + 2 * ratio) / (1 + ratio), rel=1e-5)
    assert float(lse) == pytest.approx(10000 + math.log1p(ratio), rel=1e-6)


def test_a_shift_of_all_scores_changes_nothing_and_the_scale_does() -> None:
    """Subtracting a row's maximum cancels; 1/sqrt(d) does not: it is part of the definition."""
    q, k, v = random(4, 1, 8), random(4, 1, 8), random(4, 1, 8)
    scores = (q[:, 0] @ k[:, 0].T) / math.sqrt(8)
    for shift in (0.0, float(scores.max()), -3.0):
        weights = torch.exp(scores - shift)
        shifted = weights @ v[:, 0] / weights.sum(1, keepdim=True)
        torch.testing.assert_close(shifted, reference_attention(q, k, v, causal=False)[0][:, 0])
    unscaled, _ = reference_attention(q, k, v, causal=False, scale=1.0)
    assert (unscaled - reference_attention(q, k, v, causal=False)[0]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (random(n, 2, 16, dtype=dtype) for n in (5, 9, 9))
    out, lse = reference_attention(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32
    wide, _ = reference_attention(q.float(), k.float(), v.float())
    assert torch.equal(out, wide.to(dtype))


class _LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor of floats that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_the_scores_held_are_the_scores_predicted() -> None:
    q, k, v = random(200, 6, 4), random(210, 2, 4), random(210, 2, 4)
    with _LargestTensor() as largest:
        reference_attention(q, k, v)
    predicted = score_bytes_held(
        choose(backend="reference"), rows=200, keys=210, heads=6, itemsize=8
    )
    assert largest.nbytes == predicted == 200 * 210 * 6 * 8
