"""The Triton kernels in Triton's interpreter, on a CPU: `make test-kernels` sets TRITON_INTERPRET.

float32 and float16 only: the interpreter is silently wrong in bfloat16.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, with TRITON_INTERPRET=1", allow_module_level=True)

from attention.dense import attention_float64
from attention.gluon_simulator import load
from attention.ragged import Ragged, make_ragged
from stairs.attention import triton_paged
from stairs.attention.attend import attend_paged
from stairs.attention.hopper import ForwardTile
from stairs.attention.meta import AttnMeta
from stairs.attention.tiles import HopperTile, TritonTile
from stairs.attention.triton_flash import flash_forward
from stairs.attention.triton_paged import write_pages
from stairs.attention.work import cut_rows, cut_step, upload

# Triton 3.6's interpreter on numpy 2.3.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SHORT, TALL = TritonTile(16, 16, 4, 1, per_sm=2), TritonTile(64, 16, 4, 1)
STEP = [(1, 300), (33, 53), (0, 7), (1, 1), (3, 3), (5, 64), (16, 33), (20, 150)]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3}


def run(batch: Ragged, *, fixed_keys: int | None = None, num_sms: int = 4) -> Tensor:
    heads, kv_heads = batch.q.shape[1], batch.layer_kv.k.shape[1]
    cuts = cut_step(
        batch.meta.cu_q.diff().numpy().astype(np.int64),
        batch.meta.kv_len.numpy().astype(np.int64),
        group=heads // kv_heads,
        kv_heads=kv_heads,
        tiles=(SHORT, TALL),
        num_sms=num_sms,
        fixed_keys=fixed_keys,
    )
    meta = dataclasses.replace(batch.meta, work=upload(cuts, batch.q.device))
    out = torch.empty_like(batch.q)  # NaN: see conftest
    write_pages(batch.k, batch.v, batch.layer_kv, meta)
    attend_paged(batch.q, batch.layer_kv, meta, scale=batch.q.shape[2] ** -0.5, out=out)
    return out


def assert_right(out: Tensor, batch: Ragged) -> None:
    assert (out.double() - batch.expected()).abs().max() <= ROUNDING[batch.q.dtype]


@pytest.mark.parametrize("fixed_keys", [None, 64])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dtype": torch.float16},
        {"num_heads": 4, "kv_heads": 4, "head_dim": 40, "block_size": 8},
        {"num_heads": 12, "kv_heads": 1, "head_dim": 100, "block_size": 48},
        {"num_heads": 5, "kv_heads": 1, "head_dim": 80, "block_size": 256},
    ],
    ids=str,
)
def test_a_mixed_step(shape: dict[str, object], fixed_keys: int | None) -> None:
    batch = make_ragged(STEP, **shape)  # type: ignore[arg-type]
    assert_right(run(batch, fixed_keys=fixed_keys), batch)


@pytest.mark.parametrize("tail", [-1, 2**30])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_unowned_bytes_and_stale_table_entries(poison: float, tail: int) -> None:
    batch = make_ragged([(1, 13), (20, 33), (3, 30)], block_size=4, poison=poison, tail=tail)
    assert_right(run(batch), batch)


def test_counts_are_what_the_loops_visited() -> None:
    batch = make_ragged([(1, 300), (4, 10), (0, 9), (20, 50)])
    run(batch)
    pairs = [300, 7 + 8 + 9 + 10, 0, sum(range(31, 51))]
    assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    row = 2 * 64 * 4 * 2
    written = batch.meta.counts[:, AttnMeta.KV_BYTES_WRITTEN].tolist()
    assert written == [row * n for n in (1, 4, 0, 20)]
    read = batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist()
    assert read == [row * n for n in (300, 10, 0, 50)]


def test_alone_and_among_others_bit_for_bit() -> None:
    """With fixed splits a row's sums depend on its own sequence alone."""
    batch = make_ragged([(1, 300), (1, 77), (1, 150), (40, 90)])
    together = run(batch, fixed_keys=64)
    rows = batch.rows(1)
    meta = dataclasses.replace(
        batch.meta,
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
        kv_len=batch.meta.kv_len[1:2],
        block_table=batch.meta.block_table[1:2],
        slots=batch.meta.slots[rows],
        counts=torch.zeros((1, 3), dtype=torch.int64),
    )
    alone = dataclasses.replace(batch, q=batch.q[rows], k=batch.k[rows], v=batch.v[rows], meta=meta)
    assert torch.equal(run(alone, fixed_keys=64, num_sms=100), together[rows])


@pytest.mark.parametrize("num_parts", [3, 9, 20])
def test_few_and_many_rows_to_merge(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By part of the columns or all of them, and a few parts at a time; where bits must not depend
    on the batch they do not depend on how many rows it merges."""
    batch = make_ragged([(1, 16 * num_parts), (2, 16 * num_parts - 3)], head_dim=100)
    invariant = dataclasses.replace(
        batch, meta=dataclasses.replace(batch.meta, batch_invariant=True)
    )
    few, same = run(batch, fixed_keys=16), run(invariant, fixed_keys=16)
    monkeypatch.setattr(triton_paged, "MANY_ROWS", 1)
    assert_right(few, batch)
    assert_right(run(batch, fixed_keys=16), batch)
    assert torch.equal(run(invariant, fixed_keys=16), same)


def test_the_merge_of_hopper_s_partial_results() -> None:
    """The Gluon kernel in its simulator, the merge in Triton's interpreter."""
    batch = make_ragged([(1, 300), (3, 200), (1, 5)], num_heads=8, dtype=torch.float16)
    write_pages(batch.k, batch.v, batch.layer_kv, batch.meta)
    num_q, num_kv = np.array([1, 3, 1]), np.array([300, 200, 5])
    tiles = (
        HopperTile(16, 64, 2, per_sm=1, is_chained=False),  # the interpreter cannot wait early
        HopperTile(64, 64, 2, per_sm=1, is_chained=False),
    )
    cuts = cut_step(num_q, num_kv, group=4, kv_heads=2, tiles=tiles, num_sms=16)
    (work,) = upload(cuts, batch.q.device)
    out = torch.empty_like(batch.q)
    load("hopper_decode").attend_short(batch.q, batch.layer_kv, batch.meta, work, scale=0.125,
                                       out=out)  # fmt: skip
    assert len(work.merges)
    assert_right(out, batch)


def test_the_merge_of_parts_of_chunks() -> None:
    """As above: whose query heads are each a kv head to the merge."""
    batch = make_ragged([(130, 300), (1, 9), (70, 290)], num_heads=4, dtype=torch.float16)
    write_pages(batch.k, batch.v, batch.layer_kv, batch.meta)
    cut = cut_rows(
        np.array([130, 1, 70]), np.array([300, 9, 290]), group=1, min_keys=64, target=9,
        tile=ForwardTile(64, 2, 2, 240),
    )  # fmt: skip
    assert len(cut.merges) and (cut.entries[:, 6] < 0).any()
    (work,) = upload([dataclasses.replace(cut, num_programs=5)], batch.q.device)
    out = torch.empty_like(batch.q)
    attend_chunks = load("hopper_chunks").attend_chunks
    attend_chunks(batch.q, batch.layer_kv, batch.meta, work, scale=0.125, out=out)
    assert_right(out, batch)


def test_padding_of_a_work_list_does_nothing() -> None:
    """A captured graph replays with capacities: what lies past the numbers is never run."""
    batch = make_ragged([(1, 300), (20, 60)])
    expected = run(batch)
    cuts = cut_step(
        np.array([1, 20]), np.array([300, 60]), group=3, kv_heads=2, tiles=(SHORT, TALL), num_sms=4
    )
    junk = np.full((3, 8), 2**30, dtype=np.int32)
    padded = [
        dataclasses.replace(
            cut,
            entries=np.concatenate((cut.entries, junk)),
            merges=np.concatenate((cut.merges, junk)),
            num_partials=cut.num_partials + 5,
        )
        for cut in cuts
    ]
    out = torch.empty_like(batch.q)
    meta = dataclasses.replace(batch.meta, work=upload(padded, batch.q.device))
    attend_paged(batch.q, batch.layer_kv, meta, scale=0.125, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (20, -1), (7, 5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(113, 203), (5, 2), (2, 5), (100, 30)], ids=str)
def test_contiguous(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int], softcap: float
) -> None:
    num_q, num_kv = lengths
    q, k, v = (
        torch.randn(2, num_q, 4, 24),
        torch.randn(2, num_kv, 2, 24),
        torch.randn(2, num_kv, 2, 24),
    )
    rules = {"causal": causal, "window": window, "softcap": softcap, "scale": 0.2}
    out, lse = flash_forward(
        q, k, v, cu_q=None, cu_kv=None, max_q=num_q, return_lse=True, tile=TALL, **rules
    )  # fmt: skip
    exact, exact_lse = attention_float64(q, k, v, **rules)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-6)
