"""Whether the Hopper forward computes what torch does, on this card and under this Triton.

Asked once a process and kind of call, before auto takes the kernel on a release of Triton that it
never ran on.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stairs.attention.hopper import TILES, ForwardTile, padded
from stairs.attention.online import empty, finish, update

__all__ = ["RAN_ON", "self_test", "triton_release", "what_is_wrong"]

# Triton releases under which this kernel's tests passed on an H200.
RAN_ON = frozenset({"3.6.0"})

Forward = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def triton_release() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "0.0"


@functools.cache
def self_test(device: torch.device, head_dim: int, has_right_edge: bool) -> str | None:
    """None where the kernel may be used for such calls, else what is wrong with it here."""
    if triton_release() in RAN_ON:
        return None
    from stairs.attention.hopper_forward import hopper_forward  # Triton, only where it is used

    with torch.no_grad():
        return what_is_wrong(hopper_forward, device, [(padded(head_dim), has_right_edge)])


def what_is_wrong(
    forward: Forward, device: torch.device, rows: Iterable[tuple[int, bool]] = TILES
) -> str | None:
    """Small calls of the tiles in each of ``rows`` of the table, dense and ragged."""
    for tile, head_dim, rules in _cases(rows):
        told = f"D {head_dim}, {rules}, Triton {triton_release()}"
        generator = torch.Generator(device).manual_seed(head_dim)
        make = functools.partial(torch.randn, generator=generator, device=device)
        q, k, v = (
            make((1, rows, heads, head_dim)).to(torch.bfloat16)
            for rows, heads in ((250, 4), (383, 2), (383, 2))
        )
        for ends in (None, ([0, 100, 101, 250], [0, 210, 210, 383])):
            try:
                error = _error(forward, q, k, v, ends, tile=tile, **rules)
            except Exception as problem:  # whatever a compiler or a driver of another day raises
                return f"the self-test failed ({told}): {problem}"
            if not error < 0.02:
                return f"the self-test is {error:.2g} off ({told})"
    return None


def _cases(
    rows: Iterable[tuple[int, bool]],
) -> Iterator[tuple[ForwardTile, int, dict[str, Any]]]:
    for head_dim, has_right_edge in rows:
        for tile in TILES[head_dim, has_right_edge]:
            yield tile, head_dim, {"causal": has_right_edge, "window": (-1, -1)}
            yield tile, head_dim, {"causal": has_right_edge, "window": (150, -1)}


def _error(
    forward: Forward, q: Tensor, k: Tensor, v: Tensor, ends: tuple[list[int], list[int]] | None,
    *, tile: ForwardTile, causal: bool, window: tuple[int, int],
) -> float:  # fmt: skip
    """The largest difference to the online law in float32; NaN if there is one."""
    cu = [torch.tensor(each, dtype=torch.int32, device=q.device) for each in ends or ()]
    out, lse = forward(
        q, k, v, cu_q=cu[0] if cu else None, cu_kv=cu[1] if cu else None, max_q=q.shape[1],
        scale=q.shape[-1] ** -0.5, causal=causal, window=window, softcap=0.0, return_lse=True,
        tile=tile,
    )  # fmt: skip
    worst = torch.zeros((), device=q.device)
    starts = ends or ([0, q.shape[1]], [0, k.shape[1]])
    for i in range(len(starts[0]) - 1):
        rows, keys = (slice(each[i], each[i + 1]) for each in starts)
        exact, exact_lse = _exact(q[:, rows], k[:, keys], v[:, keys], causal, window[0])
        both = lse[..., rows].isneginf() & exact_lse.isneginf()
        far = (lse[..., rows] - exact_lse).masked_fill(both, 0.0)
        worst = torch.stack((worst, (out[:, rows] - exact).abs().max(), far.abs().max())).max()
    return float(worst)


def _exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (x.float().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    place = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)
    hidden = (key > place) & causal
    if left >= 0:
        hidden |= key < place - left
    scores = (queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    out, lse = finish(update(empty(scores.shape[:-1], q.shape[-1], like=scores), scores, values))
    return out.transpose(1, 2), lse
