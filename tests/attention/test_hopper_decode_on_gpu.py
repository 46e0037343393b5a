"""The Hopper decode kernel on a Hopper: the numerics rule on hostile inputs, replays, bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.ragged import Ragged, make_ragged
from attention.test_on_gpu import GPU, assert_right, expected, on_gpu, torch_own
from stairs.attention.attend import attend, attend_paged, cut
from stairs.attention.devices import cutter_for
from stairs.attention.hopper_decode_check import decode_self_test
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.attention.tiles import HopperTile, hopper_tiles
from stairs.attention.triton_paged import write_pages
from stairs.attention.work import Tiles, cut_step, upload
from stairs.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
# Tiles of 16 and of 64 rows beside tall ones, which plain Triton runs in the same step.
STEP = [(1, 300), (113, 203), (0, 7), (1, 1), (3, 3), (5, 64), (15, 700), (16, 33), (1, 5000),
        (1, 64), (128, 2000)]  # fmt: skip
DECODE = [(1, 300), (1, 1), (1, 64), (1, 5000), (2, 700), (1, 1025), (1, 33)]
TYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)
HEADS = [(32, 8, 128), (32, 32, 128), (64, 8, 128), (9, 3, 64), (12, 12, 64), (32, 1, 128),
         (8, 2, 256), (6, 2, 80), (6, 2, 96), (4, 2, 192), (64, 1, 64)]  # fmt: skip


def run(batch: Ragged) -> Tensor:
    return attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="hopper")


def check(batch: Ragged) -> None:
    assert_right(run(batch), expected(batch), torch_own(batch))


def run_with(
    batch: Ragged,
    tiles: Tiles,
    *,
    fixed_keys: int | None = None,
    chosen: list[int] | None = None,
    num_sms: int = 132,
) -> Tensor:
    """The sequences ``chosen``, all by default, whose K and V are in the pages."""
    chosen = list(range(len(batch.keys))) if chosen is None else chosen
    kv_heads = batch.layer_kv.k.shape[1]
    q = torch.cat([batch.q[batch.rows(sequence)] for sequence in chosen])
    cuts = cut_step(
        batch.meta.cu_q.diff().cpu().numpy().astype(np.int64)[chosen],
        batch.meta.kv_len.cpu().numpy().astype(np.int64)[chosen],
        group=q.shape[1] // kv_heads,
        kv_heads=kv_heads,
        tiles=tiles,
        num_sms=num_sms,
        fixed_keys=fixed_keys,
    )
    meta = dataclasses.replace(
        batch.meta, block_table=batch.meta.block_table[chosen], work=upload(cuts, GPU),
        batch_invariant=fixed_keys is not None,
    )  # fmt: skip
    out = torch.empty_like(q)
    attend_paged(q, batch.layer_kv, meta, scale=q.shape[2] ** -0.5, out=out)
    return out


@TYPES
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), HEADS)
def test_a_mixed_step(dtype: torch.dtype, num_heads: int, kv_heads: int, head_dim: int) -> None:
    check(on_gpu(make_ragged(STEP, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim,
                             dtype=dtype)))  # fmt: skip


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_page_sizes(block_size: int) -> None:
    check(on_gpu(make_ragged(STEP, block_size=block_size, dtype=torch.bfloat16)))


def test_the_self_test() -> None:
    assert decode_self_test(GPU) is None


@pytest.mark.parametrize("num_sms", [1, 3, 20])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4), (128, 32), (256, 2)])
def test_programs_of_many_entries(head_dim: int, group: int, num_sms: int) -> None:
    """The ring and the loops go on from one entry to the next, which begins at another key."""
    batch = on_gpu(make_ragged(DECODE, num_heads=2 * group, kv_heads=2, head_dim=head_dim,
                               dtype=torch.bfloat16))  # fmt: skip
    write_pages(batch.k, batch.v, batch.layer_kv, batch.meta)
    exact, own = expected(batch), torch_own(batch)
    for tile in hopper_tiles(head_dim, group):
        ours = [
            run_with(batch, (dataclasses.replace(tile, is_chained=chained),
                             HopperTile(64, 64, 2, 1)), num_sms=num_sms)
            for chained in (False, True, True)
        ]  # fmt: skip
        assert_right(ours[0], exact, own)
        assert all(torch.equal(ours[0], other) for other in ours[1:]), tile


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("tail", [-1, 2**30])
@pytest.mark.parametrize("heads", [6, 64], ids=["narrow", "wide"])
def test_unowned_bytes_never_reach_an_output(poison: float, tail: int, heads: int) -> None:
    """K1, K2, K3"""
    check(on_gpu(make_ragged([(1, 13), (1, 1), (3, 30), (1, 333), (2, 64)], num_heads=heads,
                             block_size=8, poison=poison, tail=tail,
                             dtype=torch.bfloat16)))  # fmt: skip


def test_ids_outside_the_pool_stay_inside_it() -> None:
    """K4"""
    batch = on_gpu(make_ragged([(1, 40), (2, 90)], dtype=torch.bfloat16))
    for part in (batch.layer_kv.k, batch.layer_kv.v):
        part.nan_to_num_()
    before = run(batch)
    num_blocks = batch.layer_kv.k.shape[0]
    for outside, inside in ((num_blocks + 5, num_blocks - 1), (2**31 - 1, num_blocks - 1), (-9, 0)):
        batch.meta.block_table[0, 1] = inside
        with_inside = run(batch)
        batch.meta.block_table[0, 1] = outside
        assert torch.equal(run(batch), with_inside)
        assert torch.equal(with_inside[1:], before[1:])


def test_offsets_past_two_to_the_31() -> None:
    """K5: elements, not rows; a page at the end of a pool of 8 GiB."""
    block, head_dim = 256, 256
    num_blocks = 2**31 // (block * head_dim) + 2
    batch = on_gpu(make_ragged([(1, 200)], num_heads=1, kv_heads=1, head_dim=head_dim,
                               block_size=block, dtype=torch.bfloat16))  # fmt: skip
    page = int(batch.meta.block_table[0, 0])
    torch.use_deterministic_algorithms(False)
    far = LayerKV(
        *(torch.empty((num_blocks, 1, block, head_dim), dtype=torch.bfloat16, device=GPU)
          for _ in range(2))
    )  # fmt: skip
    far.k[-1], far.v[-1] = batch.layer_kv.k[page], batch.layer_kv.v[page]
    batch.meta.block_table[0, 0] = num_blocks - 1
    batch.meta.slots[0] += (num_blocks - 1 - page) * block
    batch.layer_kv = far
    check(batch)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 48}, {"block_size": 192}, {"block_size": 4}, {"head_dim": 100},
     {"dtype": torch.float32},
     {"kv_dtype": torch.float16}, {"num_heads": 65, "kv_heads": 1}],
    ids=str,
)  # fmt: skip
def test_what_it_lacks_is_refused(options: dict[str, object]) -> None:
    batch = on_gpu(make_ragged([(1, 40)], **({"dtype": torch.bfloat16} | options)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hopper cannot run this"):
        run(batch)


def test_counts_are_what_was_visited() -> None:
    batch = on_gpu(make_ragged([(1, 300), (4, 10), (0, 9), (16, 500)], num_heads=8, kv_heads=2,
                               dtype=torch.bfloat16))  # fmt: skip
    run(batch)
    row = 2 * 64 * 2 * 2
    pairs = [300, 7 + 8 + 9 + 10, 0, sum(range(485, 501))]
    counts = batch.meta.counts.cpu()
    assert counts[:, AttnMeta.PAIRS].tolist() == [8 * n for n in pairs]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == [row * n for n in (300, 10, 0, 500)]


def test_nothing_to_do() -> None:
    """K19, K20, K21"""
    for lengths in ([], [(0, 5)], [(0, 0), (1, 1), (0, 0)]):
        batch = on_gpu(make_ragged(lengths, dtype=torch.bfloat16))
        assert run(batch).shape == batch.q.shape


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(32, 8), (32, 1)])
def test_the_same_bits_every_time(num_heads: int, kv_heads: int) -> None:
    batch = on_gpu(make_ragged(STEP, num_heads=num_heads, kv_heads=kv_heads, head_dim=128,
                               dtype=torch.bfloat16))  # fmt: skip
    first = run(batch)
    assert all(torch.equal(run(batch), first) for _ in range(50))


def test_alone_and_among_others_with_fixed_splits() -> None:
    """K30; among so many that one program merges all columns of a row."""
    lengths = [(1, 5000), (1, 77), (1, 1500), (4, 90), (1, 20000)]
    batch = on_gpu(make_ragged([*lengths, *[(1, 1100)] * 40], num_heads=32, kv_heads=8,
                               head_dim=128, dtype=torch.bfloat16))  # fmt: skip
    write_pages(batch.k, batch.v, batch.layer_kv, batch.meta)
    tiles = hopper_tiles(128, 4)
    together = run_with(batch, tiles, fixed_keys=1024)
    assert_right(together, expected(batch), torch_own(batch))
    for sequence in range(len(lengths)):
        alone = run_with(batch, tiles, fixed_keys=1024, chosen=[sequence])
        assert torch.equal(alone, together[batch.rows(sequence)])


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_captured_step_replays_with_other_lengths(is_chained: bool) -> None:
    """Capacities are the host's, numbers are the device's; replayed on another stream."""
    long = on_gpu(make_ragged([(1, 3000), (1, 2000)], dtype=torch.bfloat16))
    cutter = cutter_for(6, 2, 64, dtype=torch.bfloat16, device=GPU, implementation="hopper")
    first, *rest = cutter.tiles
    assert isinstance(first, HopperTile)
    tiles = (dataclasses.replace(first, is_chained=is_chained), *rest)
    cutter = dataclasses.replace(cutter, tiles=tiles)
    one_each = np.ones(2, dtype=np.int64)
    (work,) = cutter(one_each, np.array([3000, 2000]))
    write_pages(long.k, long.v, long.layer_kv, long.meta)
    meta = dataclasses.replace(long.meta, work=(work,), counting=False)
    out = torch.empty_like(long.q)
    attend_paged(long.q, long.layer_kv, meta, scale=0.125, out=out)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_paged(long.q, long.layer_kv, meta, scale=0.125, out=out)
    for lengths in ([700, 90], [5, 1], [3000, 2000]):
        (less,) = cutter(one_each, np.array(lengths))
        assert less.starts.shape == work.starts.shape
        assert len(less.entries) <= len(work.entries) and len(less.merges) <= len(work.merges)
        work.entries[: len(less.entries)] = less.entries
        work.starts.copy_(less.starts)
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
            long.q, long.layer_kv, dataclasses.replace(meta, work=(less,)), scale=0.125, out=again
        )
        assert torch.equal(out, again), lengths


def test_a_step_whose_work_was_cut_for_it() -> None:
    """As the engine calls it, against the plain kernel on the same pages."""
    batch = on_gpu(make_ragged(STEP, num_heads=32, kv_heads=8, head_dim=128,
                               dtype=torch.bfloat16))  # fmt: skip
    ours = run(batch)
    meta = cut(batch.q, batch.layer_kv, batch.meta)
    plain = torch.empty_like(batch.q)
    attend_paged(batch.q, batch.layer_kv, meta, scale=128**-0.5, out=plain)
    torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)
