"""A pinned prefix's K/V on disk, so that a restart reads them instead of computing them.

One safetensors file a prefix: its tokens and, per layer, k and v as (blocks, kv_heads, block_size,
head_dim). A file is an optimisation and nothing more: one that is missing, broken or of other
tokens, shapes or dtypes is computed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence as Tokens
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stairs.cache.prefix import Pin
from stairs.engine.core import Engine

__all__ = ["load_prefix", "save_prefix"]

_log = logging.getLogger(__name__)


def save_prefix(engine: Engine, name: str, *, file: Path) -> None:
    """Write the pin ``name``'s K/V, whole or not at all. A full disk is a warning."""
    pin = engine.prefix.pins[name]
    blocks = torch.tensor(pin.blocks)
    tensors = {"tokens": torch.tensor(pin.tokens[: pin.num_pinned_tokens], dtype=torch.int32)}
    for i, layer in enumerate(engine.kv.layers):
        tensors[f"k.{i}"] = layer.k[blocks].cpu()
        tensors[f"v.{i}"] = layer.v[blocks].cpu()
    beside = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_file(tensors, beside)
        beside.replace(file)
    except (OSError, SafetensorError) as error:
        _log.warning("prefix %r is pinned but not saved: %s", name, error)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def load_prefix(
    engine: Engine, name: str, tokens: Tokens[int], *, file: Path, salt: str | None = None
) -> Pin | None:
    """Pin ``tokens`` as ``name`` from ``file``; None where it must be computed.

    Raises InvalidRequestError for a prefix that could not be pinned either way.
    """
    num_blocks = engine.check_prefix(name, tokens)
    held = tokens[: num_blocks * engine.config.cache.block_size]
    blocks: list[int] | None = None
    try:
        with safe_open(file, framework="pt") as saved:
            if saved.get_tensor("tokens").tolist() != list(held):
                return None
            blocks = engine.pool.allocate(num_blocks)
            if blocks is None:
                return None
            target = torch.tensor(blocks)
            for i, layer in enumerate(engine.kv.layers):
                for part, pages in (("k", layer.k), ("v", layer.v)):
                    rows = saved.get_tensor(f"{part}.{i}")
                    if rows.dtype != pages.dtype or rows.shape != (num_blocks, *pages.shape[1:]):
                        return None
                    pages[target] = rows.to(pages.device)
        return engine.prefix.pin(name, tokens, blocks, salt=salt)
    except (OSError, SafetensorError):
        return None
    finally:
        engine.pool.release(reversed(blocks or ()))
