"""One step's ragged batch as the attention sees it. An argument, never a global.

Axes: T tokens fed this step, S sequences, P pages of the longest table, H query heads,
G kv heads, D head_dim, B block size, N blocks in the pool.
A decode is a sequence with one query; prefill chunks and decodes share one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from stairs.attention.workspace import PagedTile

__all__ = ["AttnMeta", "LayerKV", "WorkList"]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's part of the pool. One head's block is contiguous."""

    k: Tensor  # (N, G, B, D)
    v: Tensor  # (N, G, B, D)
    # What the copy engine knows k and v by, made by the first kernel that asks, by box.
    boxes: dict[tuple[int, int], tuple[Any, Any]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class WorkList:
    """What GPU programs of one tile do, fields as in attention/work.py. W and M are capacities:
    ``numbers`` on the device says how many entries and merges there are. Copied to the device, as
    block tables are, never written by a kernel: one launched early reads them at once."""

    tile: PagedTile
    entries: Tensor  # (W, 8) int32
    merges: Tensor  # (M, 8) int32
    numbers: Tensor  # (2,) int32
    starts: Tensor  # (C+1,) int32  of C persistent programs; (0,) where each entry has its own
    num_partials: int  # capacity of the workspace, in tiles
    most_partials: int  # of one merge
    most_rows: int  # of one merge
    num_programs: int  # of a ForwardTile: that take entries x query heads in turn


@dataclass(frozen=True, slots=True)
class AttnMeta:
    """Query i of sequence s (0-based, q_len of them) sits at position kv_len[s] - q_len + i
    and sees keys 0 .. that position: bottom-right aligned causal mask."""

    cu_q: Tensor  # (S+1,) int32  queries of sequence s are rows cu_q[s] .. cu_q[s+1]
    kv_len: Tensor  # (S,) int32    keys of s, this step's included
    block_table: Tensor  # (S, P) int32  page ids; entries past the last used page are never read
    slots: Tensor  # (T,) int64    page * B + offset where each new K/V row goes
    counts: Tensor  # (S, 3) int64  the kernels add what their loops visited; columns below
    work: tuple[WorkList, ...] = ()  # for a GPU: built with the batch
    batch_invariant: bool = False  # a row's bits depend on its own sequence alone
    counting: bool = True  # GPU kernels count only for tests and ``verify``; a CPU's always do

    # Columns of ``counts``, each summed over layers. Pairs: over query heads too.
    PAIRS: ClassVar[int] = 0
    KV_BYTES_READ: ClassVar[int] = 1
    KV_BYTES_WRITTEN: ClassVar[int] = 2
