"""What is the Numba kernel's own: threads, exact 16-bit reads, its exponential, its cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from attention.ragged import make_ragged
from stairs.attention import cpu, cpu_vectors, jit
from stairs.attention.attend import attend
from stairs.attention.choose import KEY_TILE
from stairs.attention.meta import AttnMeta


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_one_long_context_is_cut_for_all_threads(num_threads: int) -> None:
    batch = make_ragged([(1, 20 * KEY_TILE + 5)], num_heads=3, kv_heads=1, dtype=torch.float64)
    torch.set_num_threads(num_threads)
    out = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
    torch.testing.assert_close(out, batch.expected(), rtol=1e-12, atol=1e-12)
    assert torch.get_num_threads() == num_threads


@settings(deadline=None)
@given(
    lengths=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 18), st.integers(cpu.SHARED_ROWS, 3 * KEY_TILE)),
            st.integers(0, 200),
        ).map(lambda n: (n[0], n[0] + n[1])),
        max_size=6,
    ),
    num_threads=st.integers(1, 5),
    block_size=st.sampled_from([3, 16, 100]),
)
def test_every_key_is_visited_once_whatever_the_threads(
    lengths: list[tuple[int, int]], num_threads: int, block_size: int
) -> None:
    batch = make_ragged(lengths, head_dim=8, block_size=block_size, dtype=torch.float64)
    torch.set_num_threads(num_threads)
    out = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
    torch.testing.assert_close(out, batch.expected(), rtol=1e-12, atol=1e-12)
    for seat, (num_q, num_kv) in enumerate(lengths):
        pairs, read, written = batch.meta.counts[seat].tolist()
        assert pairs == 6 * sum(range(num_kv - num_q + 1, num_kv + 1))
        assert read == (num_kv * 2 * 2 * 8 * 8 if num_q else 0)
        assert written == num_q * 2 * 2 * 8 * 8


def test_threads_take_equal_shares_of_a_chunk() -> None:
    """Under the staircase the last tiles of keys have the fewest rows."""
    num_q, past, group = 512, 100, 3
    tiles = -(-(num_q + past) // KEY_TILE)
    seen = [sum(past + i >= t * KEY_TILE for i in range(num_q)) for t in range(tiles)]
    for tile in range(tiles + 1):
        assert cpu._cost(tile, num_q, past, group, KEY_TILE) == group * sum(seen[:tile])
    whole = cpu._cost(tiles, num_q, past, group, KEY_TILE)
    ends = [cpu._tile_at(whole * t // 4, tiles, num_q, past, group, KEY_TILE) for t in range(5)]
    assert ends[0] == 0 and ends[4] == tiles
    shares = [sum(seen[first:last]) for first, last in pairwise(ends)]
    assert max(shares) <= whole / group / 4 + max(seen)


def test_torch_keeps_its_threads() -> None:
    """Numba and torch share one OpenMP: a launch of one must not set the width of the other."""
    batch = make_ragged([(1, 30)])
    for num_threads in (1, 2, 1):
        torch.set_num_threads(num_threads)
        attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
        assert torch.get_num_threads() == num_threads


@njit
def widen_all(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.shape[0]):
        out[i] = cpu_vectors.widen(bits[i])


@pytest.mark.parametrize(
    ("dtype", "as_bits"),
    [(torch.bfloat16, np.uint16), (torch.float16, np.int16)],
    ids=["bfloat16", "float16"],
)
def test_every_16_bit_number_is_read_exactly(dtype: torch.dtype, as_bits: type[np.generic]) -> None:
    bits = np.arange(2**16, dtype=np.uint16).view(as_bits)
    out = np.empty(2**16, np.float32)
    widen_all(bits, out)
    expected = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(out, expected)
    assert np.array_equal(np.signbit(out), np.signbit(expected))


@njit
def exp_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = cpu._exp(x[i])


def test_the_exponential_is_within_a_rounding() -> None:
    x = -np.concatenate((np.linspace(0, 87, 200_001), np.geomspace(1e-30, 1, 2001)))
    x = np.concatenate((x, [0.0, -0.0])).astype(np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.spacing(exact.astype(np.float32))) <= 1
    assert out[-1] == out[-2] == 1


def test_the_exponential_of_what_is_not_a_number_or_far_away() -> None:
    x = np.array([-np.inf, -1e30, -87.5, np.nan], np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    assert out[:3].tolist() == [0, 0, 0]
    assert np.isnan(out[3])


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"STAIRS_CACHE": "/a"}, Path("/a/numba")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/stairs/numba")),
        ({"STAIRS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a/numba")),
        ({"HOME": "/c"}, Path("/c/.cache/stairs/numba")),
    ],
)
def test_compiled_kernels_lie_in_the_users_cache(
    environment: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAIRS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Path(jit._cache_folder()).parent == folder


def test_a_half_written_batch_is_refused_before_anything_is_written() -> None:
    batch = make_ragged([(1, 30), (2, 40)])
    before = batch.layer_kv.k.clone()
    batch.meta.block_table[1, 0] = -5
    with pytest.raises(IndexError, match="page id outside the K/V pool"):
        attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
    assert torch.equal(batch.layer_kv.k.nan_to_num(), before.nan_to_num())
    assert not batch.meta.counts[:, AttnMeta.PAIRS].any()
