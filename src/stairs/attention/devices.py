"""What the GPU in front of us is: its row of ``tiles.CARDS``, and whether our kernels run on it."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

import torch

from stairs.attention.tiles import CARDS, Card, paged_tiles
from stairs.attention.work import Cutter

__all__ = ["MIN_CAPABILITY", "card_of", "cuda_problem", "cutter_for", "triton_supports"]

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


MAX_HEAD_DIM = 256


def cutter_for(
    num_heads: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> Cutter:
    """How steps of such a model are cut on ``device``."""
    card, group = card_of(device), num_heads // kv_heads
    return Cutter(
        group=group,
        kv_heads=kv_heads,
        tiles=paged_tiles(head_dim, group, itemsize=dtype.itemsize, card=card),
        num_sms=card.num_sms,
        device=device,
    )


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
