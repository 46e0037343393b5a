"""Placing an engine without a GPU, and the card's own arithmetic."""

from __future__ import annotations

import pytest
import torch

from harness import Tiny
from stairs.attention.tiles import CARDS, Card
from stairs.attention.workspace import engine_tiles, workspace_bytes
from stairs.config import CacheConfig, EngineConfig
from stairs.engine.capacity import MARGIN_BYTES, Capacity
from stairs.engine.resolve import resolve
from stairs.errors import ConfigError

GIB = 2**30


def test_the_card_adds_up() -> None:
    capacity = Capacity(
        card="Card", total=80 * GIB, usable=72 * GIB, others=GIB, weights=16 * GIB, step=2 * GIB,
        pool=53 * GIB, num_blocks=1000, block_size=16,
    )  # fmt: skip
    assert capacity.in_use == 72 * GIB
    head, *rows = capacity.lines()
    assert head == "Card: 80.00 GiB, of which 72.00 GiB may be used"
    assert any("1000 blocks = 16000 tokens" in row and "53.00 GiB" in row for row in rows)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("card", CARDS.values(), ids=str)
def test_a_step_in_more_pieces_than_the_largest_fits_the_margin(card: Card, itemsize: int) -> None:
    """The largest step is measured; smaller ones may be cut finer."""
    for head_dim in (16, 64, 80, 128, 256):
        for kv_heads, group in ((1, 1), (1, 64), (1, 128), (8, 4), (32, 1)):
            tiles = engine_tiles(head_dim, group, itemsize=itemsize, card=card)
            most = workspace_bytes(
                tiles, num_seqs=4096, num_tokens=2**20, num_heads=kv_heads * group,
                kv_heads=kv_heads, head_dim=head_dim, num_sms=card.num_sms,
            )  # fmt: skip
            assert most <= MARGIN_BYTES / 4


def test_on_a_gpu_the_dtype_is_bfloat16_and_the_pool_waits_for_the_measurement(
    tiny_llama: Tiny,
) -> None:
    resolved = resolve(tiny_llama.config, EngineConfig(device="cuda"))
    assert (resolved.dtype, resolved.cache.dtype) == ("bfloat16", "bfloat16")
    assert resolved.cache.num_blocks is None
    given = EngineConfig(device="cuda", cache=CacheConfig(memory_bytes=2**20))
    assert resolve(tiny_llama.config, given).cache.num_blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there(tiny_llama: Tiny) -> None:
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible") as refused:
        tiny_llama.engine(device="cuda")
    assert refused.value.param == "device"
    assert tiny_llama.engine().config.device == "cpu"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"device": "tpu"}, "device"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_options_are_checked(change: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**change)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_batch_invariance_is_the_cpu_s(tiny_llama: Tiny) -> None:
    with pytest.raises(ConfigError, match="batch_invariant runs on a CPU only"):
        tiny_llama.engine(device="cuda", dtype="float32", batch_invariant=True)
