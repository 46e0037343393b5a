"""The Hopper forward on a Hopper: the first thing to run on one, before anything is timed."""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.dense import attention_float64
from attention.ragged import Ragged, make_ragged
from attention.test_on_gpu import (
    assert_right,
    composed,
    dense,
    expected,
    on_gpu,
    torch_own,
)
from stairs.attention.attend import attend, attend_paged, cut, write_kv
from stairs.attention.devices import cutter_for
from stairs.attention.flash import flash_attention, flash_attention_varlen
from stairs.attention.hopper import TILES, ForwardTile, forward_tile
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.work import cut_rows, upload

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA GPU of sm_90"),
]
GPU = torch.device("cuda")
LENGTHS = [(113, 203), (1, 300), (300, 1), (1023, 1024), (2048, 2048)]
ALL_TILES = [(key, tile) for key, tiles in TILES.items() for tile in tiles]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def a_hang_ends_the_process() -> Iterator[None]:
    """A kernel that waits for what never comes would hold the card until someone looks."""
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def poisoned(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernel's answer in memory that held NaN before."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    held = torch.full_like(q, torch.nan), torch.full(shape, torch.nan, device=GPU)
    del held
    return flash_attention(q, k, v, return_lse=True, backend="hopper", **options)


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **rules: Any) -> None:
    exact, exact_lse = attention_float64(q, k, v, **rules)
    assert_right(out, exact, composed(q, k, v, **rules))
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 80, 96])
def test_ugly_shapes(head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        q, k, v = dense(*lengths, dtype, head_dim=head_dim)
        check(q, k, v, *poisoned(q, k, v, causal=causal), causal=causal)


@pytest.mark.parametrize(("key", "tile"), ALL_TILES, ids=str)
def test_every_tile(key: tuple[int, bool], tile: ForwardTile) -> None:
    """In both orders of rows."""
    from stairs.attention.hopper_forward import hopper_forward

    head_dim, causal = key
    for lengths in ((700, 900), (2048, 2048)):
        q, k, v = dense(*lengths, torch.bfloat16, head_dim=head_dim, batch=3, heads=8, kv_heads=2)
        for in_rounds in (False, True):
            held = torch.full_like(q, torch.nan)
            del held
            out, lse = hopper_forward(
                q, k, v, cu_q=None, cu_kv=None, max_q=q.shape[1], scale=head_dim**-0.5,
                causal=causal, window=(-1, -1), softcap=0.0, return_lse=True, tile=tile,
                in_rounds=in_rounds,
            )  # fmt: skip
            check(q, k, v, out, lse, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (100, -1), (-1, 30), (300, 5)], ids=str)
def test_windows_and_caps(window: tuple[int, int], softcap: float, head_dim: int) -> None:
    """K10, K11, K14, K17"""
    rules = {"window": window, "softcap": softcap}
    for lengths in ((200, 333), (333, 200), (5, 2), (1000, 1500)):
        q, k, v = dense(*lengths, torch.bfloat16, head_dim=head_dim)
        check(q, k, v, *poisoned(q, k, v, **rules), **rules)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 1), (96, 8), (7, 7), (32, 8)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    """K25"""
    q, k, v = dense(300, 400, torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=128)
    check(q, k, v, *poisoned(q, k, v, causal=True), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_views_of_a_fused_projection(head_dim: int) -> None:
    """K24, K35: no copy, the same bits; a step that is not 16 bytes is refused."""
    fused = torch.randn(2, 130, 3, 4, head_dim, device=GPU, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    ours = flash_attention(q, k, v, causal=True, backend="hopper")
    copies = (x.contiguous() for x in (q, k, v))
    assert torch.equal(ours, flash_attention(*copies, causal=True, backend="hopper"))
    odd = torch.randn(2, 131, 4, head_dim + 1, device=GPU, dtype=torch.bfloat16)[..., 1:]
    reason = flash_attention(odd, odd, odd, explain=True).reason
    assert "not the Hopper kernel" in reason and "16" in reason


def test_scores_far_below_zero() -> None:
    """K8"""
    q, k, v = dense(64, 64, torch.bfloat16)
    q, k = -(2.0**6) * q.abs(), k.abs() * 8
    check(q, k, v, *poisoned(q, k, v, causal=True), causal=True)


# -- ragged ---------------------------------------------------------------------------------------

PAIRS = [(0, 3), (150, 297), (4, 0), (0, 7), (1, 1), (300, 392), (64, 64), (1, 500), (2000, 2100)]


Parts = list[tuple[Tensor, Tensor, Tensor]]


def parts_of(pairs: list[tuple[int, int]], *, head_dim: int = 128) -> Parts:
    """q, k and v of each sequence; those without queries hold NaN."""
    made = {"dtype": torch.bfloat16, "head_dim": head_dim}
    parts = [dense(*pair, batch=1, heads=8, kv_heads=2, **made) for pair in pairs]
    for q, k, v in parts:
        if not q.numel():
            k.fill_(torch.nan), v.fill_(torch.nan)
    return parts


def ragged(parts: Parts, **options: Any) -> list[tuple[Tensor, ...]]:
    """q, k, v, O and LSE of each sequence, from one call."""
    q, k, v = (torch.cat([part[i] for part in parts], 1)[0] for i in range(3))
    ends = [
        list(itertools.accumulate((part[i].shape[1] for part in parts), initial=0)) for i in (0, 1)
    ]
    cu_q, cu_kv = (torch.tensor(each, dtype=torch.int32, device=GPU) for each in ends)
    held = torch.full_like(q, torch.nan)
    del held
    out, lse = flash_attention_varlen(
        q, k, v, cu_q, cu_kv, max_q=max(part[0].shape[1] for part in parts), return_lse=True,
        backend="hopper", **options,
    )  # fmt: skip
    return [
        (*part, out[None, a:b], lse[None, :, a:b])
        for part, (a, b) in zip(parts, itertools.pairwise(ends[0]), strict=True)
    ]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    "rules", [{"causal": True}, {"causal": False}, {"window": (100, 3)}], ids=str
)
def test_ragged(rules: dict[str, Any], head_dim: int) -> None:
    """K2, K19, K20; a neighbour's NaN stays the neighbour's."""
    for q, k, v, out, lse in ragged(parts_of(PAIRS, head_dim=head_dim), **rules):
        if q.numel():
            check(q, k, v, out, lse, **rules)


def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    """K30"""
    others = parts_of([(37 * i % 1900 + 1, 37 * i % 1900 + 1 + 50 * i) for i in range(32)])
    for causal in (False, True):
        for own in parts_of([(1, 500), (300, 392), (2000, 2100)]):
            together = ragged([*others[:16], own, *others[16:]], causal=causal)
            ((*_, out, lse),) = ragged([own], causal=causal)
            assert torch.equal(out, together[16][3]) and torch.equal(lse, together[16][4])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_fifty_runs_give_the_same_bits(head_dim: int, causal: bool) -> None:
    q, k, v = dense(3000, 3000, torch.bfloat16, head_dim=head_dim, heads=8, kv_heads=8)
    first = poisoned(q, k, v, causal=causal)
    for _ in range(49):
        again = poisoned(q, k, v, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    parts = parts_of([(977, 977), (31, 400), (2500, 2500)], head_dim=head_dim)
    answers = ragged(parts, causal=causal)
    for _ in range(49):
        for one, other in zip(answers, ragged(parts, causal=causal), strict=True):
            assert torch.equal(one[3], other[3]) and torch.equal(one[4], other[4])


def test_offsets_past_two_to_the_31() -> None:
    """K5: a window of its own key alone returns V."""
    ends = torch.tensor([0, 70001, 140003], dtype=torch.int32, device=GPU)
    q, v = (torch.randn(140003, 64, 256, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    out = flash_attention_varlen(
        q, q, v, ends, ends, max_q=70002, window=(0, 0), backend="hopper"
    )  # fmt: skip
    assert out.numel() > 2**31 and torch.equal(out, v)


def test_a_captured_call_replays_with_other_ends() -> None:
    q, k, v = (x[0] for x in dense(900, 900, torch.bfloat16, batch=1, head_dim=128))
    ends = torch.tensor([0, 300, 900], dtype=torch.int32, device=GPU)

    def call() -> Tensor:
        return flash_attention_varlen(
            q, k, v, ends, ends, max_q=900, causal=True, backend="hopper"
        )  # fmt: skip

    call()  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for middle in (1, 300, 640, 900):
        ends.copy_(torch.tensor([0, middle, 900], dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, call())


# -- over pages -----------------------------------------------------------------------------------

CHUNKS = [(128, 300), (0, 7), (1, 1), (3, 147), (512, 512), (512, 4000), (100, 500)]
# With 4 heads a group: sequences of up to 16 rows, of up to 64, of few queries but more rows, and
# of many queries: all four kinds of list.
MIXED = [(1, 300), (512, 2000), (0, 9), (4, 40), (16, 700), (17, 33), (64, 64), (65, 65),
         (129, 5000), (1, 1)]  # fmt: skip


def chunks(
    batch: Ragged, tile: ForwardTile, chosen: list[int] | None = None, *, target: int = 1,
    min_keys: int = 512, fixed_keys: int | None = None,
) -> Tensor:  # fmt: skip
    """The sequences ``chosen``, all by default and all in ``tile``, in about ``target`` entries for
    each query head; K and V are in the pages."""
    chosen = list(range(len(batch.keys))) if chosen is None else chosen
    num_q, num_kv = (
        x.cpu().numpy().astype(np.int64)[chosen]
        for x in (batch.meta.cu_q.diff(), batch.meta.kv_len)
    )
    cut = cut_rows(
        num_q, num_kv, group=1, tile=tile, target=target, min_keys=min_keys, fixed_keys=fixed_keys
    )
    work = upload([replace(cut, num_programs=132)], GPU)
    q = torch.cat([batch.q[batch.rows(sequence)] for sequence in chosen])
    out = torch.full_like(q, torch.nan)
    meta = replace(
        batch.meta, block_table=batch.meta.block_table[chosen], work=work,
        batch_invariant=fixed_keys is not None,
    )  # fmt: skip
    attend_paged(q, batch.layer_kv, meta, scale=q.shape[2] ** -0.5, out=out)
    return out


@pytest.mark.parametrize("block_size", [8, 16, 48, 64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_chunks_over_pages(head_dim: int, block_size: int) -> None:
    """K1, K2, K3, K15: stale pages hold NaN, stale entries of the table lie outside the pool."""
    batch = on_gpu(make_ragged(CHUNKS, num_heads=8, kv_heads=2, head_dim=head_dim, tail=2**30,
                               block_size=block_size, dtype=torch.bfloat16))  # fmt: skip
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    out = chunks(batch, forward_tile(head_dim, causal=True, window=(-1, -1)))
    assert_right(out, expected(batch), torch_own(batch))


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_chunks_whose_keys_are_cut(head_dim: int, dtype: torch.dtype) -> None:
    """Parts of which some rows see nothing, of one tile of keys, and whole ones beside them."""
    batch = on_gpu(make_ragged(CHUNKS, num_heads=8, kv_heads=2, head_dim=head_dim, tail=2**30,
                               dtype=dtype))  # fmt: skip
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    exact, own = expected(batch), torch_own(batch)
    tile = forward_tile(head_dim, causal=True, window=(-1, -1))
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in CHUNKS]
    read = [2 * head_dim * 2 * 2 * num_kv if num_q else 0 for num_q, num_kv in CHUNKS]
    for options in ({"target": 16}, {"target": 500, "min_keys": 1}, {"fixed_keys": 256}):
        batch.meta.counts.zero_()
        first = chunks(batch, tile, **options)
        assert_right(first, exact, own)
        assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [8 * n for n in pairs]
        assert batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist() == read
        assert all(torch.equal(chunks(batch, tile, **options), first) for _ in range(10))


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(head_dim, tile) for (head_dim, causal), tile in ALL_TILES if causal],
    ids=str,
)  # fmt: skip
def test_every_tile_over_pages(head_dim: int, tile: ForwardTile) -> None:
    for block_size in (16, 64):
        batch = on_gpu(make_ragged(CHUNKS, num_heads=8, kv_heads=2, head_dim=head_dim, tail=-1,
                                   block_size=block_size, dtype=torch.bfloat16))  # fmt: skip
        write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
        first = chunks(batch, tile)
        assert_right(first, expected(batch), torch_own(batch))
        assert torch.equal(chunks(batch, tile), first)


@dtypes
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_a_step_of_all_kinds(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """As the engine calls it: decodes, a few queries and prompt chunks, one list of each kind."""
    batch = on_gpu(make_ragged(MIXED, num_heads=8, kv_heads=2, head_dim=head_dim, tail=2**30,
                               block_size=block_size, dtype=dtype))  # fmt: skip
    out = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="hopper")
    assert_right(out, expected(batch), torch_own(batch))
    kinds = [type(work.tile) for work in cut(
        batch.q, batch.layer_kv, batch.meta, implementation="hopper"
    ).work]  # fmt: skip
    assert kinds == [HopperTile, HopperTile, TritonTile, ForwardTile]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_counts_of_a_step_of_all_kinds(head_dim: int) -> None:
    batch = on_gpu(make_ragged(MIXED, num_heads=8, kv_heads=2, head_dim=head_dim,
                               dtype=torch.bfloat16))  # fmt: skip
    counted = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="hopper")
    counts, row = batch.meta.counts.cpu(), 2 * head_dim * 2 * 2
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in MIXED]
    read = [row * num_kv if num_q else 0 for num_q, num_kv in MIXED]
    assert counts[:, AttnMeta.PAIRS].tolist() == [8 * n for n in pairs]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == read
    batch.meta = replace(batch.meta, counting=False)
    again = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="hopper")
    assert torch.equal(again, counted) and torch.equal(batch.meta.counts.cpu(), counts)


def test_a_chunk_has_the_same_bits_alone_and_among_others() -> None:
    """K30; and every time."""
    lengths = [(128, 128 + 37 * i) for i in range(32)] + [(512, 4000), (65, 900), (300, 300)]
    for head_dim in (64, 128, 256):
        batch = on_gpu(make_ragged(lengths, num_heads=8, kv_heads=2, head_dim=head_dim,
                                   dtype=torch.bfloat16))  # fmt: skip
        write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
        tile = forward_tile(head_dim, causal=True, window=(-1, -1))
        for fixed_keys in (None, 1024):
            together = chunks(batch, tile, fixed_keys=fixed_keys)
            for _ in range(50):
                assert torch.equal(chunks(batch, tile, fixed_keys=fixed_keys), together)
            for sequence in (0, 31, 32, 33, 34):
                alone = chunks(batch, tile, [sequence], fixed_keys=fixed_keys)
                assert torch.equal(alone, together[batch.rows(sequence)])


def test_queries_of_a_fused_projection_over_pages() -> None:
    """K24: no copy where the copy engine takes them, one where it does not; the same bits."""
    batch = on_gpu(make_ragged(MIXED, num_heads=8, kv_heads=2, head_dim=128,
                               dtype=torch.bfloat16))  # fmt: skip
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    meta = cut(batch.q, batch.layer_kv, batch.meta, implementation="hopper")
    outs = []
    for width, start in ((1024, 0), (1536, 256), (1028, 4)):
        fused = torch.full((len(batch.q), width), torch.nan, device=GPU, dtype=torch.bfloat16)
        q = fused[:, start : start + 1024].view(-1, 8, 128)
        q.copy_(batch.q)
        outs.append(torch.full_like(batch.q, torch.nan))
        attend_paged(q, batch.layer_kv, meta, scale=128**-0.5, out=outs[-1])
    assert_right(outs[0], expected(batch), torch_own(batch))
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def test_a_captured_step_of_chunks_replays_with_other_lengths() -> None:
    """The lists' room is the host's, their numbers the device's."""
    batch = on_gpu(make_ragged([(512, 3000), (128, 2000)], num_heads=8, kv_heads=2, head_dim=128,
                               dtype=torch.bfloat16))  # fmt: skip
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    cutter = cutter_for(8, 2, 128, dtype=torch.bfloat16, device=GPU, implementation="hopper")
    (work,) = cutter(np.array([512, 128]), np.array([3000, 2000]))
    # Else the merge's order follows how many parts there are.
    meta = replace(batch.meta, work=(work,), counting=False, batch_invariant=True)
    out = torch.empty_like(batch.q)
    attend_paged(batch.q, batch.layer_kv, meta, scale=0.1, out=out)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_paged(batch.q, batch.layer_kv, meta, scale=0.1, out=out)
    assert len(work.merges)
    for num_q, num_kv in (
        ([70, 100], [300, 1111]),
        ([512, 0], [512, 9]),
        ([512, 128], [3000, 2000]),
    ):
        (less,) = cutter(np.array(num_q), np.array(num_kv))
        assert len(less.entries) <= len(work.entries) and len(less.merges) <= len(work.merges)
        work.entries[: len(less.entries)] = less.entries
        work.merges[: len(less.merges)] = less.merges
        work.numbers.copy_(less.numbers)
        out.fill_(torch.nan)
        graph.replay()
        again = torch.full_like(batch.q, torch.nan)
        attend_paged(batch.q, batch.layer_kv, replace(meta, work=(less,)), scale=0.1, out=again)
        assert torch.equal(out[: sum(num_q)], again[: sum(num_q)])
        assert out[: sum(num_q)].isfinite().all() and out[sum(num_q) :].isnan().all()


def test_chunks_at_the_end_of_a_pool_past_two_to_the_31() -> None:
    """K5: elements, not rows."""
    block, head_dim = 256, 256
    num_blocks = 2**31 // (block * head_dim) + 2
    batch = on_gpu(make_ragged([(130, 200)], num_heads=2, kv_heads=1, head_dim=head_dim,
                               block_size=block, dtype=torch.bfloat16))  # fmt: skip
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    page = int(batch.meta.block_table[0, 0])
    torch.use_deterministic_algorithms(False)
    far = LayerKV(
        *(torch.empty((num_blocks, 1, block, head_dim), dtype=torch.bfloat16, device=GPU)
          for _ in range(2))
    )  # fmt: skip
    far.k[-1], far.v[-1] = batch.layer_kv.k[page], batch.layer_kv.v[page]
    batch.meta.block_table[0, 0] = num_blocks - 1
    batch.layer_kv = far
    out = chunks(batch, forward_tile(head_dim, causal=True, window=(-1, -1)))
    assert_right(out, expected(batch), torch_own(batch))


def test_the_self_test_passes() -> None:
    from stairs.attention.hopper_check import what_is_wrong
    from stairs.attention.hopper_forward import hopper_forward

    assert what_is_wrong(hopper_forward, GPU) is None
