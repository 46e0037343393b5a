"""Every backend on every kind of batch, against a float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.ragged import BACKENDS, Ragged, fresh, make_ragged
from stairs.attention.attend import attend, write_kv
from stairs.attention.meta import AttnMeta, LayerKV
from stairs.errors import ConfigError

MIXED = [(1, 300), (113, 203), (0, 7), (1, 1), (3, 3), (5, 64), (15, 700), (16, 33), (130, 130)]

backends = pytest.mark.parametrize("backend", BACKENDS)


def run(batch: Ragged, backend: str) -> Tensor:
    return attend(batch.q, batch.k, batch.v, batch.layer_kv, batch.meta, backend=backend)


def torch_own(batch: Ragged) -> list[Tensor]:
    """PyTorch's two ways in the queries' dtype: SDPA, and products around a softmax."""
    fused, composed = torch.zeros_like(batch.q), torch.zeros_like(batch.q)
    for sequence, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.rows(sequence)
        q = batch.q[rows].transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        k, v = (x.to(q.dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        num_q, num_kv = q.shape[1], k.shape[1]
        visible = torch.ones(num_q, num_kv, dtype=torch.bool).tril(num_kv - num_q)
        if num_q and num_kv:
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)
            fused[rows] = attended[0].transpose(0, 1)
            scores = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill(~visible, -torch.inf)
            composed[rows] = (scores.softmax(-1) @ v).transpose(0, 1)
    return [fused, composed]


def assert_as_exact_as_torch(out: Tensor, batch: Ragged) -> None:
    """Error at most twice PyTorch's own in that dtype, and one rounding of the largest value."""
    exact = batch.expected()
    own = max((other.double() - exact).abs().max().item() for other in torch_own(batch))
    slack = torch.finfo(batch.q.dtype).eps * exact.abs().max().item()
    assert out.dtype == batch.q.dtype
    assert (out.double() - exact).abs().max().item() <= 2 * own + slack


@backends
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_a_mixed_step_is_as_exact_as_torch(
    backend: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_ragged(MIXED, dtype=dtype, kv_dtype=kv_dtype)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize("lengths", [(113, 203), (1, 300), (1023, 1024), (15, 1023)], ids=str)
def test_ugly_shapes(backend: str, lengths: tuple[int, int]) -> None:
    repeats = max(1, 20 // lengths[0])  # the largest error of few outputs is a matter of luck
    batch = make_ragged([lengths] * repeats, num_heads=3, kv_heads=1)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize(
    ("num_heads", "kv_heads"), [(7, 7), (6, 2), (12, 2), (12, 1), (96, 8), (1, 1)]
)
def test_query_heads_share_kv_heads(backend: str, num_heads: int, kv_heads: int) -> None:
    batch = make_ragged([(1, 70), (2, 9), (17, 40)], num_heads=num_heads, kv_heads=kv_heads)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
def test_heads_that_do_not_divide_are_refused(backend: str) -> None:
    batch = make_ragged([(1, 5)], num_heads=3, kv_heads=2)
    with pytest.raises(ConfigError, match="num_heads 3 is not a multiple of num_kv_heads 2"):
        run(batch, backend)


@backends
@pytest.mark.parametrize("head_dim", [1, 40, 64, 80, 96, 100, 128, 256])
def test_head_dims(backend: str, head_dim: int) -> None:
    batch = make_ragged([(1, 70), (4, 33), (20, 50)], head_dim=head_dim)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 48, 100, 192, 256])
def test_page_sizes(backend: str, block_size: int) -> None:
    batch = make_ragged(
        [(1, 257), (7, 48), (1, 300), (19, 210)], block_size=block_size, head_dim=32
    )
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("part", ["k", "v"])
def test_unowned_bytes_never_reach_an_output(backend: str, part: str, poison: float) -> None:
    """K1, K2: the end of a page in K only and in V only; both is every other test's pool."""
    batch = make_ragged([(1, 13), (1, 1), (3, 30), (20, 21)], block_size=4, poison=poison)
    other = batch.layer_kv.v if part == "k" else batch.layer_kv.k
    other.masked_fill_(~other.isfinite(), 0)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize("tail", [-1, 2**30, 2**31 - 1])
def test_stale_table_entries_are_never_followed(backend: str, tail: int) -> None:
    batch = make_ragged([(1, 13), (20, 40), (1, 90)], tail=tail)
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
@pytest.mark.parametrize("num_q", [1, 20])
@pytest.mark.parametrize("beyond", [-1, 0, 2**30])
def test_a_page_outside_the_pool_raises(backend: str, num_q: int, beyond: int) -> None:
    batch = make_ragged([(num_q, 40)])
    num_blocks = batch.layer_kv.k.shape[0]
    batch.meta.block_table[0, 1] = beyond if beyond < 0 else num_blocks + beyond
    with pytest.raises(IndexError):
        run(batch, backend)


@backends
@pytest.mark.parametrize("slot", [-1, 2**40])
def test_a_slot_outside_the_pool_raises(backend: str, slot: int) -> None:
    batch = make_ragged([(2, 40)])
    batch.meta.slots[1] = slot
    with pytest.raises(IndexError):
        run(batch, backend)


@backends
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 0), (1, 1), (0, 0), (1, 1)],
        [(0, 3), (5, 7), (0, 0)],
        [(0, 5), (0, 9)],
        [],
    ],
    ids=str,
)
def test_sequences_without_queries(backend: str, lengths: list[tuple[int, int]]) -> None:
    """K19, K20, K21: zero-length sequences anywhere, an empty batch."""
    batch = make_ragged(lengths)
    out = run(batch, backend)
    assert out.shape == batch.q.shape
    assert_as_exact_as_torch(out, batch) if out.numel() else None
    idle = torch.tensor([num_q == 0 for num_q, _ in lengths], dtype=torch.bool)
    assert not batch.meta.counts[idle].any()


@backends
@pytest.mark.parametrize("num_q", [3, 20])
def test_a_sequence_without_keys_answers_zero(backend: str, num_q: int) -> None:
    batch = make_ragged([(1, 20), (2, 2)])
    meta = dataclasses.replace(
        batch.meta,
        cu_q=torch.tensor([0, num_q, num_q + 1], dtype=torch.int32),
        kv_len=torch.tensor([0, 2], dtype=torch.int32),
        block_table=batch.meta.block_table[[1, 1]],
        slots=batch.meta.slots[1:2].expand(num_q + 1).contiguous(),
    )
    q = torch.randn(num_q + 1, 6, 64)
    rows = torch.randn(num_q + 1, 2, 64)
    out = attend(q, rows, rows, batch.layer_kv, meta, backend=backend)
    assert not out[:num_q].any()
    assert meta.counts[0, AttnMeta.PAIRS] == 0
    assert meta.counts[0, AttnMeta.KV_BYTES_READ] == 0


@backends
@pytest.mark.parametrize(("num_q", "num_kv"), [(5, 2), (40, 17), (20, 3)])
def test_more_queries_than_keys(backend: str, num_q: int, num_kv: int) -> None:
    """K11, K14: bottom-right, so the first num_q - num_kv rows see nothing and answer zero."""
    batch = make_ragged([(num_kv, num_kv), (1, 9)])
    spare = num_q - num_kv
    meta = dataclasses.replace(
        batch.meta,
        cu_q=torch.tensor([0, num_q, num_q + 1], dtype=torch.int32),
        slots=torch.cat((batch.meta.slots[:1].expand(spare), batch.meta.slots)),
    )
    q = torch.cat((torch.randn(spare, 6, 64), batch.q))
    first = torch.cat((batch.k[:1].expand(spare, -1, -1), batch.k))
    second = torch.cat((batch.v[:1].expand(spare, -1, -1), batch.v))
    out = attend(q, first, second, batch.layer_kv, meta, backend=backend)
    assert not out[:spare].any()
    assert_as_exact_as_torch(out[spare:], batch)


@backends
@pytest.mark.parametrize(("query", "key"), [(-(2.0**8), 2.0**6), (2.0**6, 2.0**5)], ids=str)
def test_large_scores_are_ordinary_scores(backend: str, query: float, key: float) -> None:
    """K8: no finite number stands for minus infinity, and no exponential overflows.

    Scores of -131072 and 16384, exact in any order of summation and equal along a row, so that
    the answer is the mean of the values a row sees.
    """
    batch = make_ragged([(1, 100), (20, 100)], head_dim=64)
    batch.q.fill_(query)
    batch.k.fill_(key)
    block = batch.layer_kv.block_size
    position = torch.arange(100)
    for sequence in range(2):
        page = batch.meta.block_table[sequence, position // block].long()
        batch.layer_kv.k[page, :, position % block] = key
        batch.keys[sequence].fill_(key)
    out = run(batch, backend)
    mean = batch.values[0].mean(0).repeat_interleave(3, 0)
    torch.testing.assert_close(out[0], mean, rtol=1e-5, atol=1e-6)
    assert_as_exact_as_torch(out, batch)


@backends
def test_nan_in_a_query_arrives_in_its_row_only(backend: str) -> None:
    batch = make_ragged([(1, 70), (2, 70), (30, 64)])
    batch.q[1].fill_(torch.nan)
    batch.q[12].fill_(torch.nan)
    out = run(batch, backend)
    assert out[[1, 12]].isnan().all()
    kept = [row for row in range(33) if row not in (1, 12)]
    assert out[kept].isfinite().all()


@backends
def test_strided_views_of_a_fused_projection(backend: str) -> None:
    batch = make_ragged([(1, 40), (20, 30)], num_heads=4, kv_heads=4)
    fused = torch.cat((batch.q, batch.k, batch.v), dim=1)
    batch.q, batch.k, batch.v = fused.split(4, dim=1)
    assert not batch.q.is_contiguous()
    assert_as_exact_as_torch(run(batch, backend), batch)


@backends
def test_scale_is_an_argument(backend: str) -> None:
    batch = make_ragged([(1, 40), (20, 30)], dtype=torch.float64)
    out = attend(
        batch.q * 2, batch.k, batch.v, batch.layer_kv, batch.meta, scale=1 / 16, backend=backend
    )
    torch.testing.assert_close(out, batch.expected())


@backends
def test_counts_are_what_was_visited(backend: str) -> None:
    """Pairs by hand, over 6 heads; bytes of 2 kv heads x 64 values x 4 bytes, K and V."""
    batch = make_ragged([(1, 300), (4, 10), (0, 9), (20, 50), (33, 33)])
    run(batch, backend)
    row = 2 * 64 * 4 * 2
    pairs = [300, 7 + 8 + 9 + 10, 0, sum(range(31, 51)), sum(range(1, 34))]
    assert batch.meta.counts[:, AttnMeta.PAIRS].tolist() == [6 * n for n in pairs]
    assert batch.meta.counts[:, AttnMeta.KV_BYTES_READ].tolist() == [
        row * n for n in (300, 10, 0, 50, 33)
    ]
    assert batch.meta.counts[:, AttnMeta.KV_BYTES_WRITTEN].tolist() == [
        row * n for n in (1, 4, 0, 20, 33)
    ]


@backends
def test_counts_add_up_over_layers_in_the_pool_dtype(backend: str) -> None:
    batch = make_ragged([(2, 40), (20, 40)], kv_dtype=torch.bfloat16)
    run(batch, backend)
    once = batch.meta.counts.clone()
    run(batch, backend)
    assert torch.equal(batch.meta.counts, 2 * once)
    assert once[:, AttnMeta.KV_BYTES_READ].tolist() == [40 * 2 * 64 * 2 * 2] * 2


@backends
def test_only_the_slots_are_written(backend: str) -> None:
    batch = make_ragged([(1, 40), (20, 30)])
    run(batch, backend)
    block = batch.layer_kv.block_size
    for pool, rows, owned in (
        (batch.layer_kv.k, batch.k, batch.keys),
        (batch.layer_kv.v, batch.v, batch.values),
    ):
        written = pool[batch.meta.slots // block, :, batch.meta.slots % block]
        assert torch.equal(written, rows)
        assert pool.isfinite().sum() == sum(keys.numel() for keys in owned)


def test_write_kv_alone_casts_to_the_pool() -> None:
    batch = make_ragged([(1, 40), (20, 30)], kv_dtype=torch.bfloat16)
    write_kv(batch.k, batch.v, batch.layer_kv, batch.meta)
    block = batch.layer_kv.block_size
    written = batch.layer_kv.k[batch.meta.slots // block, :, batch.meta.slots % block]
    assert torch.equal(written, batch.k.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 2, 32)}, "k .* and v .* must both be"),
        ({"v": torch.zeros(2, 2, 64)}, "k .* and v .* must both be"),
        ({"k": torch.zeros(3, 2, 64, dtype=torch.float16)}, "differ in dtype"),
        ({"q": torch.zeros(3, 6, 32)}, "must both be"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit(change: dict[str, Tensor], message: str) -> None:
    batch = dataclasses.replace(make_ragged([(3, 9)]), **change)
    with pytest.raises(ConfigError, match=message):
        run(batch, "auto")


def test_a_pool_of_another_head_dim() -> None:
    batch = make_ragged([(3, 9)])
    pool = torch.zeros(4, 2, 16, 32)
    with pytest.raises(ConfigError, match="pool's head_dim 32 is not q's 64"):
        run(dataclasses.replace(batch, layer_kv=LayerKV(pool, pool)), "auto")


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="attention_backend 'best' is unknown; one of auto,"):
        run(make_ragged([(1, 4)]), "best")


def test_a_page_whose_offset_passes_two_to_the_31() -> None:
    """K5: one page near the end of a pool of more than 2^31 elements, never touched elsewhere."""
    block, head_dim = 256, 256
    num_blocks = 2**31 // (block * head_dim) + 2
    batch = make_ragged(
        [(1, 200)], num_heads=1, kv_heads=1, head_dim=head_dim, block_size=block,
        kv_dtype=torch.bfloat16, generator=fresh(),
    )  # fmt: skip
    torch.use_deterministic_algorithms(False)  # pages that are not touched cost no memory
    far = LayerKV(
        torch.empty((num_blocks, 1, block, head_dim), dtype=torch.bfloat16),
        torch.empty((num_blocks, 1, block, head_dim), dtype=torch.bfloat16),
    )
    page = int(batch.meta.block_table[0, 0])
    far.k[-1], far.v[-1] = batch.layer_kv.k[page], batch.layer_kv.v[page]
    batch.meta.block_table[0, 0] = num_blocks - 1
    batch.meta.slots[0] += (num_blocks - 1 - page) * block
    batch.layer_kv = far
    assert_as_exact_as_torch(run(batch, "cpu"), batch)
