"""Plain Triton's kernels on a GPU: the numerics rule on hostile inputs, replays, repeated bits."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.dense import attention_float64
from attention.ragged import Ragged, fresh, make_ragged
from stairs.attention import flash
from stairs.attention.attend import attend, attend_paged, cut
from stairs.attention.devices import card_of, cutter_for
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.triton_paged import write_pages
from stairs.attention.work import cut_step, upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = torch.device("cuda")
flash_attention = functools.partial(flash.flash_attention, backend="triton")
flash_attention_varlen = functools.partial(flash.flash_attention_varlen, backend="triton")
STEP = [(1, 300), (113, 203), (0, 7), (1, 1), (3, 3), (5, 64), (15, 700), (16, 33), (130, 130),
        (1, 5000), (128, 2000)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def on_gpu(batch: Ragged) -> Ragged:
    def move(value: object) -> dict[str, Tensor]:
        return {
            f.name: getattr(value, f.name).to(GPU)
            for f in dataclasses.fields(value)  # type: ignore[arg-type]
            if isinstance(getattr(value, f.name), Tensor)
        }

    return dataclasses.replace(
        batch,
        **move(batch),
        layer_kv=LayerKV(**move(batch.layer_kv)),
        meta=dataclasses.replace(batch.meta, **move(batch.meta)),
        keys=[keys.to(GPU) for keys in batch.keys],
        values=[values.to(GPU) for values in batch.values],
    )


def run(batch: Ragged) -> Tensor:
    return attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="triton")


def torch_own(batch: Ragged) -> Tensor:
    """PyTorch's own products around a softmax, in the queries' dtype on the GPU."""
    out = torch.zeros_like(batch.q)
    for sequence, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.rows(sequence)
        q = batch.q[rows].transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        k, v = (x.to(q.dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        num_q, num_kv = q.shape[1], k.shape[1]
        if num_q:
            seen = torch.ones(num_q, num_kv, dtype=torch.bool, device=GPU).tril(num_kv - num_q)
            scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
            out[rows] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def expected(batch: Ragged) -> Tensor:
    out = torch.zeros(batch.q.shape, dtype=torch.float64, device=GPU)
    for sequence, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.rows(sequence)
        if batch.q[rows].shape[0]:
            out[rows] = attention_float64(
                batch.q[None, rows], keys[None], values[None], causal=True
            )[0][0]
    return out


def assert_right(out: Tensor, exact: Tensor, *own: Tensor) -> None:
    """Error at most twice PyTorch's own in that dtype, and one rounding of the largest value."""
    slack = torch.finfo(out.dtype).eps * exact.abs().max()
    error = (out.double() - exact).abs().max()
    other = max((each.double() - exact).abs().max() for each in own)
    assert error <= 2 * other + slack, (error, other)


def check(batch: Ragged) -> None:
    assert_right(run(batch), expected(batch), torch_own(batch))


@dtypes
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    [(6, 2, 64), (9, 3, 64), (12, 12, 64), (32, 8, 128), (32, 1, 128), (64, 8, 128), (8, 2, 256),
     (96, 8, 64), (6, 2, 80), (6, 2, 96), (4, 4, 100), (4, 2, 40), (2, 1, 16), (64, 1, 64)],
)  # fmt: skip
def test_a_mixed_step(dtype: torch.dtype, num_heads: int, kv_heads: int, head_dim: int) -> None:
    check(on_gpu(make_ragged(STEP, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim,
                             dtype=dtype)))  # fmt: skip


@pytest.mark.parametrize("block_size", [8, 16, 32, 48, 64, 128, 192, 256, 3, 100])
def test_page_sizes(block_size: int) -> None:
    check(on_gpu(make_ragged(STEP, block_size=block_size, dtype=torch.bfloat16)))


def test_a_pool_of_another_dtype() -> None:
    check(on_gpu(make_ragged(STEP, dtype=torch.float32, kv_dtype=torch.bfloat16)))


@pytest.mark.parametrize("tail", [-1, 2**30])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("part", ["k", "v", "both"])
def test_unowned_bytes_never_reach_an_output(part: str, poison: float, tail: int) -> None:
    """K1, K2, K3"""
    batch = make_ragged([(1, 13), (1, 1), (3, 30), (200, 333)], block_size=4, poison=poison,
                        tail=tail, dtype=torch.bfloat16)  # fmt: skip
    if part != "both":
        other = batch.layer_kv.v if part == "k" else batch.layer_kv.k
        other.masked_fill_(~other.isfinite(), 0)
    check(on_gpu(batch))


def test_ids_outside_the_pool_stay_inside_it() -> None:
    """K4: where the CPU raises, the kernel clamps ids, drops slots and touches nothing else."""
    batch = on_gpu(make_ragged([(1, 40), (20, 90)], dtype=torch.bfloat16))
    batch.meta.block_table[0, 1] = batch.layer_kv.k.shape[0] + 5
    batch.meta.slots[0] = 2**40
    batch.meta.slots[1] = -1
    before = batch.layer_kv.k.clone()
    run(batch)
    torch.cuda.synchronize()
    written = batch.meta.slots[2:]
    size = batch.layer_kv.block_size
    before[written // size, :, written % size] = batch.k[2:]
    assert torch.equal(batch.layer_kv.k.nan_to_num(), before.nan_to_num())


def test_offsets_past_two_to_the_31() -> None:
    """K5"""
    block, kv_heads, head_dim = 256, 1, 256
    num_blocks = 2**31 // (block * head_dim * kv_heads) + 2
    batch = on_gpu(make_ragged([(1, 200)], num_heads=1, kv_heads=1, head_dim=head_dim,
                               block_size=block, dtype=torch.bfloat16))  # fmt: skip
    page = int(batch.meta.block_table[0, 0])
    shape = (num_blocks, kv_heads, block, head_dim)
    torch.use_deterministic_algorithms(False)
    far = LayerKV(*(torch.empty(shape, dtype=torch.bfloat16, device=GPU) for _ in range(2)))
    far.k[-1], far.v[-1] = batch.layer_kv.k[page], batch.layer_kv.v[page]
    batch.meta.block_table[0, 0] = num_blocks - 1
    batch.meta.slots[0] += (num_blocks - 1 - page) * block
    batch.layer_kv = far
    check(batch)


def test_counts_are_what_was_visited() -> None:
    batch = on_gpu(make_ragged([(1, 300), (4, 10), (0, 9), (200, 500), (33, 33)]))
    run(batch)
    row = 2 * 64 * 4 * 2
    pairs = [300, 7 + 8 + 9 + 10, 0, sum(range(301, 501)), sum(range(1, 34))]
    counts = batch.meta.counts.cpu()
    assert counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == [row * n for n in (300, 10, 0, 500, 33)]
    assert counts[:, AttnMeta.KV_BYTES_WRITTEN].tolist() == [row * n for n in (1, 4, 0, 200, 33)]


def test_nothing_to_do() -> None:
    """K19, K20, K21"""
    for lengths in ([], [(0, 5)], [(0, 0), (1, 1), (0, 0)]):
        batch = on_gpu(make_ragged(lengths, dtype=torch.bfloat16))
        assert run(batch).shape == batch.q.shape


def test_the_same_bits_every_time() -> None:
    batch = on_gpu(make_ragged(STEP, num_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16))
    first = run(batch)
    assert all(torch.equal(run(batch), first) for _ in range(50))


def test_alone_and_among_others_with_fixed_splits() -> None:
    """K30"""
    lengths = [(1, 5000), (1, 77), (1, 1500), (40, 90)]
    batch = on_gpu(make_ragged(lengths, num_heads=32, kv_heads=8, head_dim=128,
                               dtype=torch.bfloat16))  # fmt: skip
    cutter = cutter_for(32, 8, 128, dtype=torch.bfloat16, device=GPU)

    def fixed(chosen: list[int], out: Tensor, q: Tensor) -> Tensor:
        num_q, num_kv = (np.array([lengths[i][j] for i in chosen]) for j in range(2))
        cuts = cut_step(num_q, num_kv, group=4, kv_heads=8, tiles=cutter.tiles,
                        num_sms=cutter.num_sms, fixed_keys=1024)  # fmt: skip
        meta = dataclasses.replace(
            batch.meta, block_table=batch.meta.block_table[chosen], work=upload(cuts, GPU),
            batch_invariant=True,
        )  # fmt: skip
        attend_paged(q, batch.layer_kv, meta, scale=0.1, out=out)
        return out

    write_pages(batch.k, batch.v, batch.layer_kv, batch.meta)
    together = fixed([0, 1, 2, 3], torch.empty_like(batch.q), batch.q)
    for i in range(4):
        rows = batch.rows(i)
        alone = fixed([i], torch.empty_like(batch.q[rows]), batch.q[rows])
        assert torch.equal(alone, together[rows])


def test_a_captured_step_replays_with_other_lengths() -> None:
    """Capacities are the host's, numbers are the device's; replayed on another stream."""
    long = on_gpu(make_ragged([(1, 3000), (1, 2000)], dtype=torch.bfloat16))
    meta = cut(long.q, long.layer_kv, long.meta)
    (work,) = meta.work
    out = torch.empty_like(long.q)
    attend_paged(long.q, long.layer_kv, meta, scale=0.125, out=out)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_paged(long.q, long.layer_kv, meta, scale=0.125, out=out)
    shorter = dataclasses.replace(
        long.meta, kv_len=torch.tensor([700, 90], dtype=torch.int32, device=GPU)
    )
    (less,) = cut(long.q, long.layer_kv, shorter).work
    assert len(less.entries) < len(work.entries)
    work.entries[: len(less.entries)] = less.entries
    work.merges[: len(less.merges)] = less.merges
    work.numbers.copy_(less.numbers)
    out.fill_(torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    again = torch.empty_like(long.q)
    attend_paged(
        long.q, long.layer_kv, dataclasses.replace(shorter, work=(less,)), scale=0.125, out=again
    )
    assert torch.equal(out, again)


# -- the public op --------------------------------------------------------------------------------


def dense(num_q: int, num_kv: int, dtype: torch.dtype, *, heads: int = 6, kv_heads: int = 2,
          head_dim: int = 64, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = fresh()
    return tuple(
        torch.randn(batch, rows, n, head_dim, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(GPU)
        for rows, n in ((num_q, heads), (num_kv, kv_heads), (num_kv, kv_heads))
    )  # type: ignore[return-value]


def composed(q: Tensor, k: Tensor, v: Tensor, **rules: object) -> Tensor:
    """PyTorch's products around a softmax in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    softcap = float(rules.get("softcap", 0.0))  # type: ignore[arg-type]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[1], device=GPU)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=GPU)
    left, right = rules.get("window", (-1, -1))  # type: ignore[misc]
    right = 0 if rules.get("causal") else right
    seen = (key <= place + (right if right >= 0 else 2**30)) & (
        key >= place - (left if left >= 0 else 2**30)
    )
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2)


def fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's SDPA."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=GPU)
    seen = seen.tril(k.shape[1] - q.shape[1]) if causal else seen
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    return out.transpose(1, 2)


@dtypes
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(113, 203), (1, 300), (1023, 1024)], ids=str)
def test_ugly_shapes(
    lengths: tuple[int, int], causal: bool, head_dim: int, dtype: torch.dtype
) -> None:
    q, k, v = dense(*lengths, dtype, head_dim=head_dim, batch=1 if lengths[0] > 1 else 20)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    exact, exact_lse = attention_float64(q, k, v, causal=causal)
    assert_right(out, exact, composed(q, k, v, causal=causal), fused(q, k, v, causal=causal))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@dtypes
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (100, -1), (-1, 30), (70, 5)], ids=str)
@pytest.mark.parametrize("lengths", [(200, 333), (333, 200), (5, 2)], ids=str)
def test_windows_and_caps(
    lengths: tuple[int, int], window: tuple[int, int], softcap: float, dtype: torch.dtype
) -> None:
    """K11, K14, K17"""
    q, k, v = dense(*lengths, dtype)
    rules = {"window": window, "softcap": softcap}
    out, lse = flash_attention(q, k, v, return_lse=True, **rules)  # type: ignore[call-overload]
    exact, exact_lse = attention_float64(q, k, v, **rules)  # type: ignore[arg-type]
    assert_right(out, exact, composed(q, k, v, **rules))
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())


def test_scores_far_from_zero() -> None:
    """K8, K10"""
    q, k, v = dense(64, 64, torch.float32)
    k = k.abs()
    out = flash_attention(-(2.0**12) * q.abs(), k * 2, v, causal=True)
    assert out.isfinite().all() and out.abs().sum() > 0
    assert flash_attention(q * 1e4, k, v, softcap=50.0).isfinite().all()


@dtypes
def test_ragged(dtype: torch.dtype) -> None:
    """K19, K20; a neighbour's NaN stays the neighbour's."""
    ends_q, ends_kv = [0, 0, 150, 154, 154, 155, 455], [0, 3, 300, 300, 307, 308, 700]
    q, k, v = (x[0] for x in dense(455, 700, dtype, batch=1))
    v[300:307] = torch.nan  # of a sequence without queries
    cu_q, cu_kv = (torch.tensor(ends, dtype=torch.int32, device=GPU) for ends in (ends_q, ends_kv))
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_kv, max_q=300, causal=True, return_lse=True)
    for i in range(6):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_kv[i : i + 2])
        if rows.start < rows.stop:
            args = q[None, rows], k[None, keys], v[None, keys]
            exact, exact_lse = attention_float64(*args, causal=True)
            assert_right(out[None, rows], exact, composed(*args, causal=True))
            torch.testing.assert_close(lse[None, :, rows].double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_views_of_a_fused_projection(head_dim: int) -> None:
    """K24, K35"""
    fused = torch.randn(2, 130, 3, 4, head_dim, device=GPU, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    assert torch.equal(
        flash_attention(q, k, v, causal=True),
        flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True),
    )
    odd = torch.randn(2, 131, 4, head_dim + 1, device=GPU, dtype=torch.bfloat16)[:, 1:, :, 1:]
    assert torch.equal(
        flash_attention(odd, odd, odd), flash_attention(*(odd.contiguous() for _ in range(3)))
    )


def test_more_heads_than_a_grid_axis_holds() -> None:
    """K37"""
    q, k, v = (torch.randn(70000, 1, 1, 16, device=GPU, dtype=torch.bfloat16) for _ in range(3))
    assert torch.equal(flash_attention(q, k, v), v)


@pytest.mark.parametrize(("num_q", "num_kv", "batch"), [(0, 4, 2), (4, 0, 2), (3, 3, 0)])
def test_empty(num_q: int, num_kv: int, batch: int) -> None:
    q, k, v = dense(num_q, num_kv, torch.bfloat16, batch=batch)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (batch, 6, num_q) and (num_kv or lse.isneginf().all())


def test_gradients_still_come() -> None:
    q, k, v = (x.requires_grad_() for x in dense(40, 60, torch.float32))
    out = flash.flash_attention(q, k, v, causal=True)
    ours = torch.autograd.grad(out.sum(), (q, k, v))
    theirs = torch.autograd.grad(attention_float64(q, k, v, causal=True)[0].sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-4)
    assert flash.flash_attention(q, k, v, explain=True).implementation == "online"
    with torch.no_grad():
        assert flash.flash_attention(q, k, v, explain=True).implementation == "triton"


def test_the_card_is_known() -> None:
    card = card_of(GPU)
    properties = torch.cuda.get_device_properties(GPU)
    assert card.num_sms == properties.multi_processor_count
    assert card.shared >= 99 * 1024
