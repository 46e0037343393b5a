"""Prompt chunks over pages on a simulated Hopper: values, counts, cut keys, steps of all kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention.gluon_simulator import load
from attention.ragged import Ragged, make_ragged
from attention.test_hopper_decode import merged
from attention.test_hopper_forward import KINDS, SMALL
from stairs.attention import hopper_chunks, hopper_decode, triton_paged
from stairs.attention.attend import attend_paged, write_kv
from stairs.attention.hopper import ForwardTile, forward_tile
from stairs.attention.meta import AttnMeta
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.work import Cut, cut_rows, cut_step, upload

CHUNKS = [(128, 300), (0, 7), (1, 1), (30, 30), (128, 128), (3, 147), (100, 500)]


def listed(batch: Ragged, tile: ForwardTile, *, chosen: list[int] | None = None, target: int = 1,
           min_keys: int = 64, fixed_keys: int | None = None, num_sms: int = 3) -> Cut:  # fmt: skip
    """Of a step's sequences, or of those ``chosen``: all in tiles of queries, in about ``target``
    entries for each query head."""
    chosen = list(range(len(batch.keys))) if chosen is None else chosen
    num_q, num_kv = (
        x.numpy().astype(np.int64)[chosen] for x in (batch.meta.cu_q.diff(), batch.meta.kv_len)
    )
    cut = cut_rows(
        num_q, num_kv, group=1, tile=tile, target=target, min_keys=min_keys, fixed_keys=fixed_keys
    )
    return replace(cut, num_programs=num_sms)


def run(batch: Ragged, cut: Cut, *, seed: int = 0, counting: bool = True,
        chosen: list[int] | None = None) -> Tensor:  # fmt: skip
    """What ``cut`` lists, with K and V in the pages."""
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    (work,) = upload([cut], torch.device("cpu"))
    q, table = batch.q, batch.meta.block_table
    if chosen is not None:
        q, table = torch.cat([q[batch.rows(sequence)] for sequence in chosen]), table[chosen]
    meta = replace(batch.meta, block_table=table, counting=counting)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    parts = load("hopper_chunks", seed=seed).attend_tiles(
        q, batch.layer_kv, meta, work, scale=q.shape[2] ** -0.5, out=out
    )
    merged(work, parts, out)
    return out


def chunks(batch: Ragged, tile: ForwardTile, *, seed: int = 0, counting: bool = True,
           chosen: list[int] | None = None, **options: Any) -> Tensor:  # fmt: skip
    cut = listed(batch, tile, chosen=chosen, **options)
    return run(batch, cut, seed=seed, counting=counting, chosen=chosen)


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["wide"]], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 48, 64, 128, 256])
def test_pages(block_size: int, tile: ForwardTile) -> None:
    """K1, K2, K3, K15: stale pages hold NaN, stale entries of the table lie outside the pool."""
    batch = make_ragged(CHUNKS, block_size=block_size, dtype=torch.float16, tail=2**30)
    out = chunks(batch, tile, seed=block_size)
    assert (out.double() - batch.expected()).abs().max() <= 3e-3


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["hardware"]], ids=str)
def test_counts_of_pages_are_what_was_visited(tile: ForwardTile) -> None:
    batch = make_ragged(CHUNKS, num_heads=6, kv_heads=2, dtype=torch.float16)
    uncounted = chunks(batch, tile, counting=False)
    assert not batch.meta.counts[:, : AttnMeta.KV_BYTES_WRITTEN].any()
    batch.meta.counts.zero_()
    assert torch.equal(chunks(batch, tile), uncounted)
    counts = batch.meta.counts
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in CHUNKS]
    assert counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    row = 2 * 64 * 2 * 2
    read = [row * num_kv if num_q else 0 for num_q, num_kv in CHUNKS]
    assert counts[:, AttnMeta.KV_BYTES_READ].tolist() == read


@pytest.mark.parametrize("tile", [SMALL, KINDS["three"], KINDS["hardware"], KINDS["lazy"]], ids=str)
def test_chunks_whose_keys_are_cut(tile: ForwardTile) -> None:
    """Parts of which some rows see nothing, of one tile of keys, and whole ones beside them."""
    batch = make_ragged(CHUNKS, dtype=torch.float16, tail=2**30)
    pairs = [sum(range(num_kv - num_q + 1, num_kv + 1)) for num_q, num_kv in CHUNKS]
    read = [2 * 64 * 2 * 2 * num_kv if num_q else 0 for num_q, num_kv in CHUNKS]
    for options in ({"target": 6}, {"target": 99}, {"fixed_keys": 128}):
        cut = listed(batch, tile, **options)
        assert len(cut.merges) and (cut.entries[:, 6] < 0).any()
        batch.meta.counts.zero_()
        out = run(batch, cut, seed=len(cut.entries))
        assert (out.double() - batch.expected()).abs().max() <= 3e-3
        assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
        assert batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist() == read


def test_room_of_a_list_and_the_number_of_programs_change_nothing() -> None:
    """A captured graph replays with capacities; what lies past the numbers is never read."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    cut = listed(batch, SMALL, target=6)
    expected = run(batch, cut)
    junk = np.full((9, 8), 2**30, dtype=np.int32)
    roomy = replace(
        cut, entries=np.concatenate((cut.entries, junk)), num_partials=cut.num_partials + 3
    )
    for given in (roomy, replace(cut, num_programs=1), replace(roomy, num_programs=64)):
        assert torch.equal(run(batch, given, seed=given.num_programs), expected)
    nothing = make_ragged([(0, 9)], dtype=torch.float16)
    empty = listed(nothing, SMALL)
    assert run(nothing, empty).shape == run(nothing, replace(empty, entries=junk)).shape


def test_a_chunk_has_the_same_bits_alone_and_among_others() -> None:
    """K30: whole, and with fixed splits."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    for fixed_keys in (None, 128):
        together = chunks(batch, SMALL, num_sms=5, fixed_keys=fixed_keys)
        for sequence in (0, 4, 6):
            alone = chunks(batch, SMALL, chosen=[sequence], fixed_keys=fixed_keys)
            assert torch.equal(alone, together[batch.rows(sequence)])


def test_queries_of_a_fused_projection_over_pages() -> None:
    """K24; rows or heads that the copy engine cannot take are copied."""
    batch = make_ragged(CHUNKS, dtype=torch.float16)
    expected, plain = chunks(batch, SMALL), batch.q
    for width, start in ((640, 128), (384 + 4, 0), (384 + 4, 4)):
        fused = torch.full((len(plain), width), torch.nan, dtype=plain.dtype)
        batch.q = fused[:, start : start + 384].view(-1, 6, 64)
        batch.q.copy_(plain)
        assert torch.equal(chunks(batch, SMALL), expected), (width, start)


def test_a_step_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, a few queries and chunks in one step: each list by its kernel, each row once."""
    lengths = [(1, 90), (70, 200), (0, 9), (16, 77), (17, 33), (128, 300), (1, 1)]
    batch = make_ragged(lengths, num_heads=8, kv_heads=2, dtype=torch.float16)
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    num_q, num_kv = (np.array([pair[i] for pair in lengths]) for i in (0, 1))
    tiles = (HopperTile(16, 64, 2, per_sm=1), HopperTile(64, 32, 3, per_sm=1),
             TritonTile(128, 64, 8, 3), SMALL)  # fmt: skip
    work = upload(
        cut_step(num_q, num_kv, group=4, kv_heads=2, tiles=tiles, num_sms=16), torch.device("cpu")
    )
    assert [each.tile for each in work] == list(tiles)
    exact = batch.expected()
    plain = batch.rows(4)  # 68 rows of 17 queries: that kernel is tested in Triton's interpreter

    def merging(parts: Any) -> Any:
        def attend(q: Tensor, layer_kv: Any, meta: Any, work: Any, *, scale: float, out: Tensor,
                   ) -> None:  # fmt: skip
            merged(work, parts(q, layer_kv, meta, work, scale=scale, out=out), out)

        return attend

    def attend_cut(*args: Any, out: Tensor, **options: Any) -> None:
        assert args[3].entries[: int(args[3].numbers[0]), 7].unique().tolist() == [4]
        out[plain] = exact[plain].half()

    decode = load("hopper_decode").attend_entries
    of_chunks = load("hopper_chunks").attend_tiles
    monkeypatch.setattr(hopper_decode, "attend_short", merging(decode))
    monkeypatch.setattr(hopper_chunks, "attend_chunks", merging(of_chunks))
    monkeypatch.setattr(triton_paged, "attend_cut", attend_cut)
    out = torch.full_like(batch.q, torch.nan)
    attend_paged(batch.q, batch.layer_kv, replace(batch.meta, work=work), scale=0.125, out=out)
    assert (out.double() - exact).abs().max() <= 3e-3


def test_pages_of_wide_heads_and_ids_outside_the_pool() -> None:
    """K4: clamped, as the plain kernel does."""
    batch = make_ragged([(70, 200)], num_heads=4, kv_heads=1, head_dim=80, dtype=torch.float16)
    tile = forward_tile(80, causal=True, window=(-1, -1))
    assert (chunks(batch, tile).double() - batch.expected()).abs().max() <= 3e-3
    batch.layer_kv.k.nan_to_num_(), batch.layer_kv.v.nan_to_num_()
    num_blocks = len(batch.layer_kv.k)
    for outside, inside in ((num_blocks + 5, num_blocks - 1), (2**31 - 1, num_blocks - 1), (-9, 0)):
        slots = batch.meta.slots.clone()
        batch.meta.block_table[0, 1] = inside
        expected = chunks(batch, tile)
        batch.meta.block_table[0, 1] = outside
        assert torch.equal(chunks(batch, tile), expected) and torch.equal(batch.meta.slots, slots)
