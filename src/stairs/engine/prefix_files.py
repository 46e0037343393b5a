"""A pinned prefix's K/V on disk, so that a restart reads them instead of computing them.

One safetensors file a prefix: its tokens and, per layer, k and v as (blocks, kv_heads, block_size,
head_dim). The header says of which model, dtype and block size they are; a file of another one,
or of other tokens, or a damaged one, is refused with the reason and never used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stairs.cache.prefix import Pin
from stairs.engine.core import Engine
from stairs.errors import CheckpointError, InvalidRequestError

__all__ = ["load_prefix", "read_prefix_tokens", "save_prefix"]

_FORMAT = "1"


def save_prefix(engine: Engine, name: str, *, file: Path) -> None:
    """Write the pin ``name``'s K/V, whole or not at all. Raises OSError where the disk does."""
    if name not in engine.prefix.pins:
        raise InvalidRequestError(f"no pinned prefix is named {name!r}", param="name")
    pin = engine.prefix.pins[name]
    blocks = torch.tensor(pin.blocks)
    tensors = {"tokens": torch.tensor(pin.tokens, dtype=torch.int32)}
    for i, layer in enumerate(engine.kv.layers):
        tensors[f"k.{i}"] = layer.k[blocks].cpu()
        tensors[f"v.{i}"] = layer.v[blocks].cpu()
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        save_file(tensors, beside, metadata=_identity(engine))
        beside.replace(file)
    except SafetensorError as error:  # the library's name for a full disk
        raise OSError(str(error)) from None
    finally:
        beside.unlink(missing_ok=True)


def read_prefix_tokens(file: Path) -> list[int]:
    """The tokens that a saved prefix stands for."""
    with _open(file) as saved:
        return [int(token) for token in _tensor(saved, file, "tokens").tolist()]


def load_prefix(
    engine: Engine, name: str, tokens: Tokens[int], *, file: Path, salt: str | None = None
) -> Pin:
    """Pin ``tokens`` as ``name`` with the K/V in ``file``.

    Raises CheckpointError with the reason for a file that is missing, damaged or of something
    else, InvalidRequestError for a prefix that cannot be pinned at all.
    """
    num_blocks = engine.check_prefix(name, tokens)
    size = engine.config.cache.block_size
    blocks: list[int] = []
    try:
        with _open(file) as saved:
            found = saved.metadata() or {}
            for key, wanted in _identity(engine).items():
                if found.get(key) != wanted:
                    raise CheckpointError(
                        f"{file.name}: the saved prefix is of {key} {found.get(key)!r:.80}, "
                        f"this engine has {wanted!r}"
                    )
            stored = _tensor(saved, file, "tokens").tolist()
            if stored[: len(stored) // size * size] != list(tokens[: num_blocks * size]):
                raise CheckpointError(f"{file.name}: the saved prefix has other tokens")
            blocks = engine.pool.allocate(num_blocks) or []
            if not blocks:
                raise CheckpointError(
                    f"{file.name}: {num_blocks} blocks are needed, "
                    f"{engine.pool.num_available} are free"
                )
            _read_pages(engine, saved, file, torch.tensor(blocks))
        return engine.prefix.pin(name, tokens, blocks, salt=salt)
    finally:
        engine.pool.release(reversed(blocks))


def _read_pages(engine: Engine, saved: Any, file: Path, blocks: torch.Tensor) -> None:
    """All shapes are checked before the first page is written."""
    pages = {}
    for i, layer in enumerate(engine.kv.layers):
        for part, pool in (("k", layer.k), ("v", layer.v)):
            rows = _tensor(saved, file, f"{part}.{i}")
            if rows.dtype != pool.dtype or rows.shape != (len(blocks), *pool.shape[1:]):
                raise CheckpointError(
                    f"{file.name}: {part}.{i} is {tuple(rows.shape)} of {rows.dtype}, wanted "
                    f"{(len(blocks), *pool.shape[1:])} of {pool.dtype}"
                )
            pages[part, i] = pool, rows
    for pool, rows in pages.values():
        pool[blocks.to(pool.device)] = rows.to(pool.device)


def _identity(engine: Engine) -> dict[str, str]:
    cache = engine.config.cache
    return {
        "format": _FORMAT,
        "model": engine.fingerprint,
        "dtype": f"{engine.config.dtype}/{cache.dtype}",
        "block_size": str(cache.block_size),
    }


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file.name}: the saved prefix cannot be read: {reason:.120}"
        ) from None


def _tensor(saved: Any, file: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = saved.get_tensor(name)
        return tensor
    except SafetensorError:
        raise CheckpointError(f"{file.name}: the saved prefix lacks {name}") from None
