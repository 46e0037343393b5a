"""From a step's plan to its tensors: the one place where lists become tensors.

The batch is persistent: a sequence owns a row from its first step until it leaves, and its block
table is changed by difference, never rebuilt. Axes as in attention/meta.py: T tokens fed,
S sequences of the step, P pages of the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stairs.attention.meta import AttnMeta
from stairs.attention.work import Cutter
from stairs.engine.scheduler import StepPlan
from stairs.engine.sequence import Sequence, Status

__all__ = ["Batch", "StepBatch"]


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows ``start`` .. ``end`` of T predict the next tokens whose log probability
    ``sequence`` still lacks."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    meta: AttnMeta
    logit_rows: Tensor  # (R,) int64  rows of T whose logits are wanted
    sampled: tuple[Sequence, ...]  # (R,) the sequences they belong to
    scored: tuple[Scored, ...]  # prompts whose log probabilities are wanted


class Batch:
    """Block tables of up to ``max_num_seqs`` sequences of at most ``max_blocks`` blocks."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        *,
        block_size: int,
        device: torch.device,
        cutter: Cutter | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.cutter = cutter
        self.batch_invariant = batch_invariant
        self.counting = cutter is None  # kernels that are cut for count only when asked
        self._table = np.full((max_num_seqs, max_blocks), -1, dtype=np.int32)
        self._rows: dict[Sequence, int] = {}
        self._filled: dict[Sequence, int] = {}  # blocks of each sequence already in its row
        self._admission: dict[Sequence, int] = {}  # preemptions before the one it has its row from
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def build(self, plan: StepPlan) -> StepBatch:
        """Tensors of one step; call before ``commit`` changes the sequences."""
        self._drop_absent()
        sequences = [item.sequence for item in plan.work]
        start = np.array([s.num_computed for s in sequences], dtype=np.int64)
        num_new = np.array([item.num_new for item in plan.work], dtype=np.int64)
        kv_len = start + num_new
        cu_q = np.concatenate(([0], np.cumsum(num_new)))
        rows = np.array([self._row(s) for s in sequences])
        pages = -(-int(kv_len.max()) // self.block_size)
        table = self._table[rows, :pages]

        ids = np.empty(cu_q[-1], dtype=np.int64)
        for s, item in enumerate(plan.work):
            ids[cu_q[s] : cu_q[s + 1]] = item.sequence.tokens[start[s] : kv_len[s]]
        positions = np.arange(cu_q[-1]) + np.repeat(start - cu_q[:-1], num_new)
        page = table[np.repeat(np.arange(len(rows)), num_new), positions // self.block_size]
        slots = page.astype(np.int64) * self.block_size + positions % self.block_size
        sampled = [item.sampled for item in plan.work]
        logit_rows = np.repeat(cu_q[1:] - 1, [len(branches) for branches in sampled])
        meta = AttnMeta(
            cu_q=self._tensor(cu_q.astype(np.int32)),
            kv_len=self._tensor(kv_len.astype(np.int32)),
            block_table=self._tensor(table),
            slots=self._tensor(slots),
            counts=torch.zeros((len(sequences), 3), dtype=torch.int64, device=self.device),
            work=() if self.cutter is None else self.cutter(num_new, kv_len),
            batch_invariant=self.batch_invariant,
            counting=self.counting,
        )
        return StepBatch(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            meta=meta,
            logit_rows=self._tensor(logit_rows),
            sampled=tuple(sequence for branches in sampled for sequence in branches),
            scored=tuple(
                Scored(s, int(cu_q[i] + first - start[i]), int(cu_q[i] + end - start[i]))
                for i, s in enumerate(sequences)
                for first, end in (_unscored(s, int(kv_len[i])),)
                if start[i] <= first < end
            ),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":  # from pinned memory the copy does not wait
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _row(self, sequence: Sequence) -> int:
        if sequence not in self._rows:
            self._rows[sequence] = self._free.pop()
            self._filled[sequence] = 0
            self._admission[sequence] = sequence.num_preemptions
        row, filled = self._rows[sequence], self._filled[sequence]
        new = sequence.blocks[filled:]
        if new:
            self._table[row, filled : filled + len(new)] = new
            self._filled[sequence] = filled + len(new)
        return row

    def _drop_absent(self) -> None:
        """Give back the rows of sequences that finished or were preempted since the last step: one
        that was taken in again already has other blocks than its row says."""
        for sequence in list(self._rows):
            admission = self._admission[sequence]
            if sequence.status is not Status.RUNNING or sequence.num_preemptions != admission:
                self._free.append(self._rows.pop(sequence))
                del self._filled[sequence], self._admission[sequence]


def _unscored(sequence: Sequence, computed: int) -> tuple[int, int]:
    """Positions below ``computed`` whose prediction of the prompt's next token is still wanted."""
    if sequence.sampling.prompt_logprobs is None:
        return 0, 0
    return len(sequence.prompt_logprobs), min(computed, sequence.num_prompt_tokens - 1)
