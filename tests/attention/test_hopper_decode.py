"""The Hopper decode kernel in the simulator: values, and the protocol between its partitions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.gluon_simulator import load
from attention.ragged import Ragged, make_ragged
from attention.test_attend import assert_as_exact_as_torch
from stairs.attention.attend import write_kv
from stairs.attention.meta import AttnMeta, WorkList
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.work import Tiles, cut_step, upload

NARROW, WIDE = HopperTile(16, 64, 2, per_sm=1), HopperTile(64, 32, 3, per_sm=1)
TALL = TritonTile(128, 64, 8, 3)
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
CPU = torch.device("cpu")


def merged(work: WorkList, parts: tuple[Tensor, Tensor], out: Tensor) -> None:
    """What the merge kernel does, after the law in ``online``: see test_interpreted."""
    partial_out, partial_lse = parts
    kv_heads = partial_out.shape[1]
    group = out.shape[1] // kv_heads
    for token, num_q, row, first, count, *_ in work.merges.tolist():
        for place in range(min(num_q * group - row, work.tile.rows)):
            query, head = divmod(row + place, group)
            lse = partial_lse[first : first + count, :, place].double()  # (parts, G), log2
            weight = torch.exp2(lse - lse.amax(0))
            values = partial_out[first : first + count, :, place].double()
            whole = (values * weight[..., None]).sum(0) / weight.sum(0)[:, None]
            out.view(-1, kv_heads, group, out.shape[2])[token + query, :, head] = whole.to(
                out.dtype
            )


def simulate(
    batch: Ragged, *, seed: int = 0, tiles: Tiles = (NARROW, WIDE, TALL), num_sms: int = 3,
    fixed_keys: int | None = None, chosen: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """The batch, or the sequences ``chosen`` of it, attended over by as many programs a head as
    ``num_sms`` over the heads."""
    decode = load("hopper_decode", seed=seed)
    chosen = list(range(len(batch.keys))) if chosen is None else chosen
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    cuts = cut_step(
        batch.meta.cu_q.diff().numpy().astype(np.int64)[chosen],
        batch.meta.kv_len.numpy().astype(np.int64)[chosen],
        group=batch.q.shape[1] // batch.layer_kv.k.shape[1],
        kv_heads=batch.layer_kv.k.shape[1],
        tiles=tiles,
        num_sms=num_sms,
        fixed_keys=fixed_keys,
    )
    q = torch.cat([batch.q[batch.rows(sequence)] for sequence in chosen])
    meta = dataclasses.replace(batch.meta, block_table=batch.meta.block_table[chosen])
    out = torch.empty_like(q)
    for work in upload(cuts, CPU):
        parts = decode.attend_entries(
            q, batch.layer_kv, meta, work, scale=q.shape[2] ** -0.5, out=out
        )
        merged(work, parts, out)
    return out


def assert_right(out: Tensor, batch: Ragged) -> None:
    assert (out.double() - batch.expected()).abs().max() <= ROUNDING[batch.q.dtype]


STEP = [(1, 300), (0, 7), (1, 1), (3, 30), (1, 64), (1, 129)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 128), (17, 1, 80), (4, 1, 256)]
)
def test_numerics(num_heads: int, kv_heads: int, head_dim: int, seed: int) -> None:
    """One program a head runs all entries; a few some of them; many one part of one each."""
    batch = make_ragged(STEP, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim,
                        dtype=torch.bfloat16 if seed % 2 else torch.float16)  # fmt: skip
    out = simulate(batch, seed=seed, num_sms=(1, 3, 8)[seed] * kv_heads)
    assert_as_exact_as_torch(out, batch)


@pytest.mark.parametrize("num_q", [2, 5, 16])
def test_a_few_new_tokens(num_q: int) -> None:
    lengths = [(num_q, num_q), (num_q, 100), (1, 40), (num_q, 321), (2, 65)]
    batch = make_ragged(lengths, num_heads=8, kv_heads=2, dtype=torch.bfloat16)
    assert_right(simulate(batch, seed=num_q, num_sms=6), batch)


@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 192, 256])
def test_page_sizes(block_size: int, tile: HopperTile) -> None:
    batch = make_ragged([(1, 333), (1, 70), (1, 8)], block_size=block_size, dtype=torch.bfloat16)
    assert_right(simulate(batch, tiles=(tile, TALL), num_sms=6), batch)


@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("tail", [-1, 2**30])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_unowned_bytes_never_reach_an_output(poison: float, tail: int, tile: HopperTile) -> None:
    """K1, K2, K3"""
    batch = make_ragged([(1, 13), (1, 1), (3, 30), (1, 147), (2, 64)], block_size=16,
                        poison=poison, tail=tail, dtype=torch.bfloat16)  # fmt: skip
    assert_right(simulate(batch, tiles=(tile, TALL), num_sms=4), batch)


def test_the_table_may_end_with_the_last_page() -> None:
    batch = make_ragged([(1, 20), (1, 66)], block_size=8, dtype=torch.bfloat16)
    batch.meta = dataclasses.replace(
        batch.meta, block_table=batch.meta.block_table[:, :9].contiguous()
    )
    assert_right(simulate(batch), batch)


def test_ids_outside_the_pool_stay_inside_it() -> None:
    """K4: the id is clamped, and what another sequence reads does not change."""
    batch = make_ragged([(1, 40), (2, 90)], dtype=torch.bfloat16)
    num_blocks = batch.layer_kv.k.shape[0]
    batch.layer_kv.k.nan_to_num_()
    batch.layer_kv.v.nan_to_num_()
    before = simulate(batch)
    for outside, inside in ((num_blocks + 5, num_blocks - 1), (2**31 - 1, num_blocks - 1), (-9, 0)):
        table = batch.meta.block_table
        table[0, 1] = inside
        expected = simulate(batch)
        table[0, 1] = outside
        assert torch.equal(simulate(batch), expected)
    assert torch.equal(expected[1:], before[1:])


def test_all_scores_far_below_zero() -> None:
    """K8: no finite stand-in for -inf."""
    batch = make_ragged([(1, 100)], num_heads=2, kv_heads=2, dtype=torch.bfloat16)
    batch.q.fill_(1.0)
    batch.k.fill_(-150.0)
    batch.layer_kv.k.masked_fill_(batch.layer_kv.k.isfinite(), -150.0)
    batch.keys[0].fill_(-150.0)
    assert_right(simulate(batch, num_sms=4), batch)


@pytest.mark.parametrize("seed", range(4))
def test_alone_and_among_others_with_fixed_splits(seed: int) -> None:
    """K30: the same bits, in whatever order partitions and programs run."""
    generator = torch.Generator().manual_seed(1)
    batch = make_ragged([(1, 300), (1, 77), (1, 129), (3, 290)], num_heads=8, kv_heads=2,
                        dtype=torch.bfloat16, generator=generator)  # fmt: skip
    together = simulate(batch, seed=seed, num_sms=10, fixed_keys=128)
    for sequence in range(4):
        alone = simulate(batch, seed=seed + 9, num_sms=4, fixed_keys=128, chosen=[sequence])
        assert torch.equal(alone, together[batch.rows(sequence)])


def test_counts_are_what_was_visited() -> None:
    batch = make_ragged([(1, 300), (4, 10), (0, 9), (16, 40)], num_heads=8, kv_heads=2,
                        dtype=torch.bfloat16)  # fmt: skip
    simulate(batch, num_sms=6)
    row = 2 * 64 * 2 * 2
    pairs = [300, 7 + 8 + 9 + 10, 0, sum(range(25, 41))]
    counts = batch.meta.counts
    assert counts[:, AttnMeta.PAIRS].tolist() == [8 * n for n in pairs]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == [row * n for n in (300, 10, 0, 40)]


def test_boxes_are_made_once() -> None:
    batch = make_ragged([(1, 30)], dtype=torch.bfloat16)
    simulate(batch)
    (made,) = batch.layer_kv.boxes.values()
    simulate(batch)
    assert list(batch.layer_kv.boxes.values()) == [made]
    assert not dataclasses.replace(batch.layer_kv, k=batch.layer_kv.k.clone()).boxes
