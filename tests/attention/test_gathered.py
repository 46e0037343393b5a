"""Long rows: one vector is the whole mask."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.ragged import make_ragged
from stairs.attention import gathered
from stairs.attention.attend import attend
from stairs.attention.choose import ROW_GROUP


class _LargestStorage(TorchDispatchMode):
    """Bytes of the largest memory behind any tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


@pytest.fixture(autouse=True)
def _long_rows_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with narrow vectors, and no pages kept of what ran before in this process."""
    monkeypatch.setattr("stairs.attention.choose.has_wide_vectors", lambda: False)
    monkeypatch.setattr(gathered, "_kept", threading.local())


def test_no_mask_of_queries_by_keys_is_made() -> None:
    batch = make_ragged([(ROW_GROUP, 5000)], num_heads=1, kv_heads=1, head_dim=8)
    with _LargestStorage() as largest:
        attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
    assert largest.nbytes < ROW_GROUP * 5000  # a bool for every pair


@pytest.mark.parametrize("num_q", [ROW_GROUP - 1, ROW_GROUP, ROW_GROUP + 1, 3 * ROW_GROUP + 5])
@pytest.mark.parametrize("past", [0, 1, 70])
def test_groups_of_rows_meet(num_q: int, past: int) -> None:
    batch = make_ragged(
        [(num_q, num_q + past)], num_heads=2, kv_heads=1, head_dim=16, dtype=torch.float64
    )
    out = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
    torch.testing.assert_close(out, batch.expected())
    assert batch.meta.counts[0, 0] == 2 * sum(range(past + 1, past + num_q + 1))


def test_a_longer_context_after_a_shorter_one_and_back() -> None:
    """The memory for gathered pages is kept and grows: nothing of the last sequence shows."""
    for num_kv in (40, 400, 40, 100):
        batch = make_ragged([(20, num_kv)], dtype=torch.float64)
        out = attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend="cpu")
        torch.testing.assert_close(out, batch.expected())


def test_only_so_much_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_KEPT_BYTES", 2**16)
    small = gathered._buffers((1, 100, 8), torch.float32)
    assert gathered._buffers((1, 90, 8), torch.float32).data_ptr() == small.data_ptr()
    large = gathered._buffers((1, 4000, 8), torch.float64)
    assert large.shape == (2, 1, 4000, 8)
    assert gathered._buffers((1, 100, 8), torch.float32).data_ptr() == small.data_ptr()
