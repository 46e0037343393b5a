"""What the GPU in front of us is: its row of ``tiles.CARDS``, and whether our kernels run on it."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

import torch

from stairs.attention.choose import Choice, choose
from stairs.attention.hopper import chunk_tile
from stairs.attention.hopper_decode_check import decode_self_test
from stairs.attention.meta import LayerKV
from stairs.attention.tiles import CARDS, MAX_HEAD_DIM, Card, hopper_tiles, paged_tiles
from stairs.attention.work import Cutter, Tiles

__all__ = [
    "MIN_CAPABILITY",
    "card_of",
    "choose_paged",
    "cuda_problem",
    "cutter_for",
    "hopper_decode_lacks",
    "hopper_measured",
    "triton_supports",
]

MIN_CAPABILITY = (8, 0)  # the first with bfloat16 tensor cores and asynchronous copies


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card's own figures; its row is that of the nearest capability at or below."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    nearest = max(known for known in CARDS if known <= capability)
    return replace(
        CARDS[nearest],
        shared=getattr(properties, "shared_memory_per_block_optin", CARDS[nearest].shared),
        num_sms=properties.multi_processor_count,
    )


@functools.cache
def cuda_problem() -> str | None:
    """Why this machine's GPU is not used, in one line; None if it is, "" if there is none."""
    if torch.version.hip or (getattr(torch, "xpu", None) and torch.xpu.is_available()):
        return "only NVIDIA GPUs are supported; running on the CPU"
    if torch.backends.mps.is_available():
        return "Apple GPUs are not supported; running on the CPU"
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} is sm_{major}{minor}; GPUs from sm_80 (Ampere) on are "
            f"supported; running on the CPU"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'stairs[gpu]'); running on the CPU"
    return None


def cutter_for(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str = "triton",
) -> Cutter:
    """How steps of such a model are cut on ``device``, for the kernels of ``implementation``."""
    card, group = card_of(device), num_heads // kv_heads
    tiles: Tiles = paged_tiles(head_dim, group, itemsize=dtype.itemsize, card=card)
    if implementation == "hopper":
        tiles = (*hopper_tiles(head_dim, group), tiles[-1], chunk_tile(head_dim))
    return Cutter(group=group, kv_heads=kv_heads, tiles=tiles, num_sms=card.num_sms, device=device)


def hopper_measured(head_dim: int, group: int) -> str | None:
    """Where Hopper's kernels were the quicker ones for decodes; None unless chunks have a figure
    too: one step runs both."""
    return hopper_tiles(head_dim, group)[0].measured if chunk_tile(head_dim).measured else None


def choose_paged(
    layer_kv: LayerKV,
    *,
    backend: str,
    dtype: torch.dtype,
    num_heads: int,
    device: torch.device,
) -> Choice:
    """``choose`` for queries (T, num_heads, D) over such pages, with what the card lacks.

    Raises ConfigError for a backend that is unknown or does not run that.
    """
    if device.type != "cuda":
        return choose(
            backend=backend,
            device=device.type,
        )
    _, kv_heads, _, head_dim = layer_kv.k.shape
    measured = hopper_measured(head_dim, num_heads // kv_heads)
    hopper_lacks = hopper_decode_lacks(
        layer_kv,
        dtype=dtype,
        num_heads=num_heads,
        capability=torch.cuda.get_device_capability(device),
    )
    if backend == "auto" and measured and not hopper_lacks:
        hopper_lacks = decode_self_test(device)
    return choose(
        backend=backend,
        device="cuda",
        triton_lacks=triton_supports(device, dtype, head_dim),
        hopper_lacks=hopper_lacks,
        hopper_measured=measured,
    )


def hopper_decode_lacks(
    layer_kv: LayerKV, *, dtype: torch.dtype, num_heads: int, capability: tuple[int, int]
) -> str | None:
    """What keeps queries of ``num_heads`` heads from attention/hopper_decode.py, and with it from
    the forward over pages, which takes pages of any multiple of 8; None if nothing.

    There a page is a box of rows of the pool seen as (N * G * B, D).
    """
    num_blocks, kv_heads, block_size, head_dim = layer_kv.k.shape
    if capability != (9, 0):
        return f"the card is sm_{capability[0]}{capability[1]}, not sm_90"
    if dtype not in (torch.bfloat16, torch.float16) or layer_kv.k.dtype != dtype:
        return f"queries of {dtype} over {layer_kv.k.dtype}, not bfloat16 or float16 for both"
    if not 64 <= head_dim <= 256 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 from 64 to 256"
    if num_heads // kv_heads > 64:
        return f"{num_heads // kv_heads} query heads a kv head are over 64"
    tiles = hopper_tiles(head_dim, num_heads // kv_heads)
    if block_size % 8 or any(t.keys % block_size and block_size % t.keys for t in tiles):
        return f"pages of {block_size} do not divide tiles of {tiles[0].keys} keys, nor those them"
    if num_blocks * kv_heads * block_size > 2**31 - 256:
        return f"{num_blocks} pages of {kv_heads} x {block_size} rows are over 2**31 - 256"
    aligned = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (layer_kv.k, layer_kv.v))
    return None if aligned else "the pool is not contiguous from a multiple of 16 bytes"


@functools.cache
def triton_supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None where our kernels run, else what stands against it."""
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the card is older than sm_80"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels have no {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is over {MAX_HEAD_DIM}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None
