"""What is measured of a block's life, by a clock that the test turns."""

from __future__ import annotations

from stairs.cache.blocks import BlockPool
from stairs.cache.prefix import PrefixCache
from stairs.cache.residency import Residency, Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(num_blocks: int) -> tuple[BlockPool, Residency, Clock]:
    clock = Clock()
    pool = BlockPool(num_blocks)
    pool.residency = Residency(num_blocks, clock=clock)
    return pool, pool.residency, clock


def test_a_block_that_is_hit_again_and_evicted_at_last() -> None:
    pool, residency, clock = watched(1)
    cache = PrefixCache(pool, 4)
    (block,) = pool.allocate(1) or ()
    clock.now = 101
    cache.publish([1, 2, 3, 4], 0, block, parent=None, salt=None)
    pool.release([block])
    assert residency.take() is None
    clock.now = 103
    assert len(cache.match([1, 2, 3, 4, 5])) == 1
    assert residency.take() == Spans(reuse_gaps=[2])
    clock.now = 104
    pool.release([block])
    clock.now = 110
    assert pool.allocate(1) == [block]
    assert residency.take() == Spans(lifetimes=[10], idle_before_evict=[6])


def test_a_block_shared_while_it_is_held_has_no_gap() -> None:
    pool, residency, clock = watched(2)
    (block,) = pool.allocate(1) or ()
    pool.mark_hittable(block)
    clock.now = 105
    pool.acquire(block)
    assert residency.take() is None


def test_a_block_that_nobody_could_hit_is_not_evicted() -> None:
    pool, residency, clock = watched(1)
    for clock.now in (101, 102, 103):
        (block,) = pool.allocate(1) or ()
        pool.release([block])
    assert residency.take() is None


def test_what_lived_before_has_no_birth() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or ()
    pool.mark_hittable(block)
    clock = Clock()
    pool.residency = Residency(1, clock=clock)
    pool.release([block])
    clock.now = 104
    pool.allocate(1)
    assert pool.residency.take() is None
