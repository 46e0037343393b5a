"""The law: small numbers by hand, merging in any order, and tiles against the specification."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention.ragged import make_ragged
from stairs.attention.choose import Tile
from stairs.attention.meta import AttnMeta
from stairs.attention.online import State, empty, finish, merge, paged_online, update
from stairs.attention.reference import reference_attention

DOUBLE = torch.zeros((), dtype=torch.float64)


def state_of(scores: list[float], values: list[float]) -> State:
    """One row that has seen these keys, each with a value of one number."""
    return update(
        empty((1,), 1, like=DOUBLE),
        torch.tensor([scores], dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64).view(-1, 1),
    )


def test_the_idea_in_numbers() -> None:
    """[2, 4], then [7, 3]: the first block is rescaled by exp(4 - 7) when 7 is seen."""
    first = state_of([2, 4], [1, 1])
    assert float(first.m) == 4
    assert float(first.l) == pytest.approx(1.1353, abs=5e-5)
    second = state_of([7, 3], [1, 1])
    assert float(second.m) == 7
    assert float(second.l) == pytest.approx(1.0183, abs=5e-5)
    assert math.exp(4 - 7) == pytest.approx(0.0498, abs=5e-5)
    merged = merge(first, second)
    assert float(merged.m) == 7
    assert float(merged.l) == pytest.approx(1.0748, abs=5e-5)
    assert float(merged.l) == pytest.approx(float(second.l + first.l * math.exp(4 - 7)))
    continued = update(
        first, torch.tensor([[7.0, 3.0]], dtype=torch.float64), torch.ones_like(DOUBLE).expand(2, 1)
    )
    torch.testing.assert_close(continued.l, merged.l)


def test_blocks_added_without_rescaling_are_not_softmax() -> None:
    scores, values = [2.0, 4.0, 7.0, 3.0], [1.0, -2.0, 5.0, 0.5]
    exact = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0) @ torch.tensor(
        values, dtype=torch.float64
    )
    first, second = state_of(scores[:2], values[:2]), state_of(scores[2:], values[2:])
    torch.testing.assert_close(finish(merge(first, second))[0].squeeze(), exact)
    unscaled = State(second.m, first.l + second.l, first.acc + second.acc)
    assert abs(float(finish(unscaled)[0]) - float(exact)) > 0.1
    separately = finish(first)[0] + finish(second)[0]
    assert abs(float(separately) - float(exact)) > 0.1


def test_two_empty_parts_merge_to_an_empty_part() -> None:
    """K13."""
    nothing = empty((3,), 2, like=DOUBLE)
    out, lse = finish(merge(nothing, nothing))
    assert torch.equal(out, torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(lse, torch.full((3,), -torch.inf, dtype=torch.float64))


def test_masked_and_missing_tiles_change_nothing() -> None:
    seen = state_of([1, 2], [3, 4])
    masked = update(seen, torch.full((1, 2), -torch.inf).double(), torch.ones(2, 1).double())
    absent = update(seen, torch.empty((1, 0)).double(), torch.empty((0, 1)).double())
    merged = merge(empty((1,), 1, like=DOUBLE), seen)
    for state in (masked, absent, merged):
        for got, want in zip(state, seen, strict=True):
            assert torch.equal(got, want)


def test_scores_of_ten_thousand() -> None:
    state = merge(state_of([1e4, -1e4], [1, 7]), state_of([9999, 0], [3, 9]))
    out, lse = finish(state)
    ratio = math.exp(-1)
    assert float(out) == pytest.approx((1 + 3 * ratio) / (1 + ratio))
    assert float(lse) == pytest.approx(1e4 + math.log1p(ratio))


# A part is a list of (score, value) of the keys it saw; a score of None is a masked key.
number = st.floats(-300, 300)
part = st.lists(st.tuples(st.one_of(st.none(), number), st.floats(-8, 8)), max_size=4)


def part_state(keys: list[tuple[float | None, float]]) -> State:
    return state_of(
        [-math.inf if score is None else score for score, _ in keys], [value for _, value in keys]
    )


def assert_same(a: State, b: State) -> None:
    for got, want in zip(finish(a), finish(b), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@given(part, part, part)
def test_merging_is_associative_and_knows_no_order(
    a: list[tuple[float | None, float]],
    b: list[tuple[float | None, float]],
    c: list[tuple[float | None, float]],
) -> None:
    x, y, z = part_state(a), part_state(b), part_state(c)
    left = merge(merge(x, y), z)
    assert_same(left, merge(x, merge(y, z)))
    assert_same(left, merge(z, merge(y, x)))
    assert_same(left, part_state(a + b + c))


@given(st.lists(part, max_size=4))
def test_however_the_keys_are_cut_it_is_one_softmax(
    parts: list[list[tuple[float | None, float]]],
) -> None:
    state = empty((1,), 1, like=DOUBLE)
    for keys in parts:
        state = merge(state, part_state(keys))
    seen = [(score, value) for keys in parts for score, value in keys if score is not None]
    out, lse = finish(state)
    if not seen:
        assert float(out) == 0 and float(lse) == -math.inf
        return
    scores = torch.tensor([score for score, _ in seen], dtype=torch.float64)
    values = torch.tensor([value for _, value in seen], dtype=torch.float64)
    torch.testing.assert_close(out.squeeze(), torch.softmax(scores, 0) @ values)
    torch.testing.assert_close(lse.squeeze(), torch.logsumexp(scores, 0))


def split_attention(q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    """Keys cut in two, each part attended alone, the parts merged by their O and LSE."""
    parts = []
    for keys in (slice(0, at), slice(at, None)):
        out, lse = reference_attention(q, k[keys], v[keys], causal=False)
        seen = (lse > -torch.inf).double()
        parts.append(State(lse, seen, out))
    return finish(merge(*parts))[0]


@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_finished_parts_merge_by_their_lse(at: int) -> None:
    batch = make_ragged([(3, 9)], dtype=torch.float64)
    q, k, v = batch.q, batch.keys[0], batch.values[0]
    whole, _ = reference_attention(q, k, v, causal=False)
    torch.testing.assert_close(split_attention(q, k, v, at), whole)


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (16, 16), (128, 128), (7, 1000)], ids=str)
@pytest.mark.parametrize("block_size", [3, 16])
def test_tiles_of_any_size(tile: tuple[int, int], block_size: int) -> None:
    batch = make_ragged([(1, 50), (20, 33), (9, 9)], dtype=torch.float64, block_size=block_size)
    block = batch.layer_kv.block_size
    batch.layer_kv.k[batch.meta.slots // block, :, batch.meta.slots % block] = batch.k
    batch.layer_kv.v[batch.meta.slots // block, :, batch.meta.slots % block] = batch.v
    out = torch.full_like(batch.q, torch.nan)
    paged_online(batch.q, batch.layer_kv, batch.meta, scale=1 / 8, tile=Tile(*tile), out=out)
    torch.testing.assert_close(out, batch.expected())
    pairs = [50, sum(range(14, 34)), 45]
    assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    assert batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist() == [
        n * 2 * 2 * 64 * 8 for n in (50, 33, 9)
    ]
