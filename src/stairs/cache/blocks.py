"""The pool of K/V blocks: who holds each one, and which may be taken next.

Every block is in exactly one state:

    free    nobody holds it, nothing in it can be hit          taken first
    cached  nobody holds it, its content can still be hit      taken oldest first, when none is free
    owned   at least one sequence or pin holds it              never taken

so free + cached + owned = num_blocks at all times. Plain Python; ids only, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from stairs.cache.residency import Residency

__all__ = ["BlockPool"]


class BlockPool:
    """Reference counts and LRU order of ``num_blocks`` blocks.

    ``on_evict(block)`` is called before a cached block is handed out again, so that the
    prefix index forgets it first. ``residency``, where somebody attaches one, is told of it all.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.residency: Residency | None = None
        self.num_evictions = 0
        self._refs = [0] * num_blocks
        self._hittable = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: lowest id first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, num: int) -> list[int] | None:
        """``num`` blocks, held once by the caller; None, and no change, if too few are left."""
        if num > self.num_available:
            return None
        blocks = []
        for _ in range(num):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        if self.residency is not None:
            self.residency.allocated(blocks)
        return blocks

    def acquire(self, block: int) -> None:
        """Hold an owned or cached block once more."""
        if self._refs[block] == 0:
            del self._cached[block]
            if self.residency is not None:
                self.residency.reused(block)
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of each block once. Released last means reused last: pass a sequence's blocks
        tail first, so that a shared head outlives its tails."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hittable[block]:
                    self._cached[block] = None
                    if self.residency is not None:
                        self.residency.released(block)
                else:
                    self._free.append(block)

    def mark_hittable(self, block: int) -> None:
        """The content of an owned block is complete and published."""
        assert self._refs[block] > 0
        self._hittable[block] = True

    def forget(self, block: int) -> None:
        """The content of a block can no longer be hit; nobody's hold on it changes."""
        self._hittable[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._hittable[block] = False
        self.num_evictions += 1
        if self.residency is not None:
            self.residency.evicted(block)
        if self.on_evict is not None:
            self.on_evict(block)
        return block
