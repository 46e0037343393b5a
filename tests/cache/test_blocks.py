from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stairs.cache.blocks import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls keeps free + cached + owned = total, and never hands out a held block."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(7, on_evict=self.evicted.append)
        self.holds: list[int] = []
        self.hittable: set[int] = set()

    @rule(num=st.integers(0, 9))
    def allocate(self, num: int) -> None:
        available = self.pool.num_available
        before = len(self.evicted)
        blocks = self.pool.allocate(num)
        assert (blocks is None) == (num > available)
        for block in blocks or ():
            assert block not in self.holds
            if block in self.hittable:
                assert block in self.evicted[before:], "reused without telling the index"
                self.hittable.discard(block)
            self.holds.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.holds.remove(block)
        self.pool.release([block])

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.mark_hittable(block)
        self.hittable.add(block)

    @precondition(lambda self: self.hittable)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.hittable)))
        self.pool.acquire(block)
        self.holds.append(block)

    @precondition(lambda self: self.hittable)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.hittable)))
        self.pool.forget(block)
        self.hittable.discard(block)

    @invariant()
    def adds_up(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_owned == 7
        assert pool.num_owned == len(set(self.holds))
        assert pool.num_cached == len(self.hittable - set(self.holds))
        assert all(pool.ref_count(b) == self.holds.count(b) for b in range(7))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_free_blocks_are_taken_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block in blocks:
        pool.mark_hittable(block)
    pool.release(reversed(blocks))
    taken = pool.allocate(4)
    assert taken == [3, blocks[2], blocks[1], blocks[0]]
    assert pool.num_evictions == 3


def test_releasing_a_block_nobody_holds_is_our_bug():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="not held"):
        pool.release([0])
