"""The simulator finds what it is there for: each kind of mistake, in a kernel that makes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.gluon_simulator import stand_in
from attention.gluon_values import Fault

api = stand_in()
gl, mbarrier = api.gl, api.mbarrier
ROWS, COLUMNS, TILES = 64, 16, 5
BYTES = ROWS * COLUMNS * 2


@api.gluon.jit
def produce(source, tiles, full, empty, MISTAKE: gl.constexpr):
    for j in range(TILES):
        stage = j % 2
        if MISTAKE != "overwrites":
            mbarrier.wait(empty.index(stage), (j // 2 & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES // 2 if MISTAKE == "bytes" else BYTES)
        api.load_box(source, [j * ROWS, 0], full.index(stage), tiles.index(stage))


@api.gluon.jit
def consume(sums, q, tiles, full, empty, MISTAKE: gl.constexpr):
    total = gl.zeros([ROWS, ROWS], gl.float32)
    for j in range(TILES):
        stage = j % 2
        if MISTAKE != "reads early":
            mbarrier.wait(full.index(stage), j // 2 & 1)
        turned = tiles.index(stage).permute([1, 0])
        product = api.warpgroup_mma(q, turned, total, is_async=True)
        if MISTAKE == "uses early":
            total = total + product
        if MISTAKE == "releases early":
            mbarrier.arrive(empty.index(stage))
        total = api.warpgroup_mma_wait(0, deps=[product])
        if MISTAKE not in ("releases early", "never releases"):
            mbarrier.arrive(empty.index(stage))
    rows = gl.arange(0, ROWS)
    at = rows[:, None] * ROWS + rows[None, :]
    gl.store(sums + (at + 1 if MISTAKE == "outside" else at), total)


@api.gluon.jit
def kernel(queries, source, copied, sums, MISTAKE: gl.constexpr):
    """sums = queries times the sum of source's tiles; copied = queries."""
    tiles = gl.allocate_shared_memory(gl.float16, [2, ROWS, COLUMNS], None)
    q = gl.allocate_shared_memory(gl.float16, [ROWS, COLUMNS], None)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], None)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], None)
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    at = gl.arange(0, ROWS)[:, None] * COLUMNS + gl.arange(0, COLUMNS)[None, :]
    q.store(gl.load(queries + at))
    if MISTAKE != "no fence":
        api.fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (sums, q, tiles, full, empty, MISTAKE)),
            (produce, (source, tiles, full, empty, MISTAKE)),
        ],
        [1],
        [24],
    )
    api.store_box(copied, [0, 0], q)
    if MISTAKE == "stores under a copy":
        q.store(gl.zeros([ROWS, COLUMNS], gl.float16))
    if MISTAKE != "leaves":
        api.store_wait(0)


def run(mistake: str | None, *, times: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries = torch.randn(ROWS, COLUMNS, dtype=torch.float16)
    source = torch.randn(ROWS * TILES, COLUMNS, dtype=torch.float16)
    copied, sums = torch.full_like(queries, torch.nan), torch.full((ROWS, ROWS), torch.nan)

    def box(x: Tensor) -> Any:
        return api.TensorDescriptor.from_tensor(x, [ROWS, COLUMNS], None)

    for _ in range(times):
        kernel[(1,)](queries, box(source), box(copied), sums, mistake)
    return queries, source, copied, sums


def test_a_right_kernel_is_right_in_every_order() -> None:
    for _ in range(20):
        queries, source, copied, sums = run(None)
        expected = queries.float() @ source.float().view(TILES, ROWS, COLUMNS).sum(0).T
        torch.testing.assert_close(sums, expected)
        assert torch.equal(copied, queries)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("overwrites", "copy to it is under way|may still read it|arrivals"),
        ("bytes", "deadlock"),
        ("reads early", "copy to it is under way|may still read it|deadlock"),
        ("uses early", "before warpgroup_mma_wait"),
        ("releases early", "may still read it"),
        ("never releases", "deadlock"),
        ("outside", "outside the tensor's storage"),
        ("no fence", "no fence_async_shared"),
        ("stores under a copy", "may still read it"),
        ("leaves", "before its copies had landed"),
    ],
)
def test_a_mistake_is_found(mistake: str, message: str) -> None:
    """In some order of some runs: a race need not show in each."""
    with pytest.raises(Fault, match=message):
        run(mistake, times=40)


@api.gluon.jit
def turns(log, ME: gl.constexpr, OTHER: gl.constexpr):
    for j in range(3):
        api.named_sync(ME, "256")
        place = gl.atomic_add(log, 1)
        gl.store(log + 1 + place, int(ME) * 10 + j)
        api.named_arrive(OTHER, "256")


@api.gluon.jit
def first(log, ME: gl.constexpr, OTHER: gl.constexpr):
    api.named_arrive(OTHER, "256")
    turns(log, ME, OTHER)


@api.gluon.jit
def ping_pong(log):
    gl.warp_specialize([(turns, (log, "8", "9")), (first, (log, "9", "8"))], [4], [24])


def test_named_barriers_take_turns() -> None:
    for _ in range(10):
        log = torch.zeros(7, dtype=torch.int32)
        ping_pong[(1,)](log)
        assert log.tolist() == [6, 80, 90, 81, 91, 82, 92]


def test_boxes_end_with_the_tensor() -> None:
    """What lies outside is zero on the way in and dropped on the way out."""

    @api.gluon.jit
    def shift(source, target):
        tile = gl.allocate_shared_memory(gl.float32, [4, 8], None)
        full = gl.allocate_shared_memory(gl.int64, [1], None)
        mbarrier.init(full, count=1)
        mbarrier.expect(full, 4 * 8 * 4)
        api.load_box(source, [-2, 0], full, tile)
        mbarrier.wait(full, 0)
        api.store_box(target, [1, 0], tile)
        api.store_wait(0)

    source, target = torch.arange(24.0).view(3, 8), torch.full((4, 8), -1.0)
    boxes = (api.TensorDescriptor.from_tensor(x, [4, 8], None) for x in (source, target))
    shift[(1,)](*boxes)
    assert target.tolist() == [[-1.0] * 8, [0.0] * 8, [0.0] * 8, source[0].tolist()]
