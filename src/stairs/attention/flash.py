"""The public op: exact attention over contiguous tensors, one call for every device.

Key j is visible to query i when ``causal`` implies j <= i + Sk - Sq (bottom-right aligned) and the
window holds it: i + Sk - Sq - left <= j <= i + Sk - Sq + right, ends included, -1 for no bound. A
row that sees no key gives O = 0 and LSE = -inf; LSE is the natural logarithm of the sum of
exp(score). On a GPU with tensor cores for bfloat16 the kernel is ours, elsewhere and where
gradients are wanted the same law runs in torch, tile by tile.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from stairs.attention.choose import Choice, Tile
from stairs.attention.devices import card_of, triton_supports
from stairs.attention.hopper import ForwardTile, forward_tile, hopper_lacks
from stairs.attention.hopper_check import self_test, triton_release
from stairs.attention.online import empty, finish, update
from stairs.attention.reference import compute_dtype
from stairs.attention.tiles import TritonTile, flash_tile
from stairs.errors import ConfigError

__all__ = ["choose_contiguous", "choose_flash", "flash_attention", "flash_attention_varlen"]

OPEN = (-1, -1)
BACKENDS = ("auto", "cpu", "online", "triton", "hopper")
SDPA_TILE = Tile(64, 512)  # that torch's CPU kernel holds a thread, from its source
TILE = Tile(256, 512)  # of the torch path: scores of one head held at a time


class _Call(NamedTuple):
    causal: bool
    scale: float
    window: tuple[int, int]
    softcap: float
    return_lse: bool


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = OPEN, softcap: float = 0.0, return_lse: Literal[False] = False,
    explain: Literal[False] = False, backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = OPEN, softcap: float = 0.0, return_lse: Literal[True],
    explain: Literal[False] = False, backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = OPEN, softcap: float = 0.0, return_lse: bool = False,
    explain: Literal[True], backend: str = "auto",
) -> Choice: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    return_lse: bool = False,
    explain: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor] | Choice:
    """softmax(scale * Q K^T) V: q (B, Sq, H, D), k and v (B, Sk, G, D) -> (B, Sq, H, D).

    H is a multiple of G (grouped heads). ``scale`` is 1/sqrt(D) when None; ``softcap`` c > 0 turns
    each scaled score s into c * tanh(s / c). ``return_lse`` adds LSE (B, H, Sq) in float32 (float64
    for float64 inputs). ``explain`` computes nothing and says what would run, and why. ``backend``
    is auto, cpu, online, triton, or hopper.

    Raises ConfigError, naming the argument, for what does not fit.
    """
    _check(q, k, v, num_dims=4)
    call = _checked_call(q, causal, scale, window, softcap, return_lse)
    if k.shape[0] != q.shape[0]:
        raise ConfigError(f"q has {q.shape[0]} sequences and k {k.shape[0]}", param="k")
    choice = choose_flash(q, k, v, causal=causal, max_q=q.shape[1], window=window, backend=backend)
    if explain:
        return choice
    if choice.implementation in ("triton", "hopper"):
        out, lse = _on_gpu(choice, q, k, v, call, None, None, q.shape[1])
    elif choice.implementation == "cpu" and not _needs_online(q, k, call):
        out, lse = _sdpa(q, k, v, call), q.new_empty(0)
    else:
        out, lse = _online(q, k, v, call)
    return (out, lse) if return_lse else out


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, *, max_q: int,
    causal: bool = False, scale: float | None = None, window: tuple[int, int] = OPEN,
    softcap: float = 0.0, return_lse: Literal[False] = False, explain: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, *, max_q: int,
    causal: bool = False, scale: float | None = None, window: tuple[int, int] = OPEN,
    softcap: float = 0.0, return_lse: Literal[True], explain: Literal[False] = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, *, max_q: int,
    causal: bool = False, scale: float | None = None, window: tuple[int, int] = OPEN,
    softcap: float = 0.0, return_lse: bool = False, explain: Literal[True],
    backend: str = "auto",
) -> Choice: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_kv: Tensor,
    *,
    max_q: int,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    return_lse: bool = False,
    explain: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor] | Choice:
    """Sequences of different lengths end to end: q (Tq, H, D), k and v (Tk, G, D) -> (Tq, H, D).

    Sequence s has rows cu_q[s] .. cu_q[s+1] of q and cu_kv[s] .. cu_kv[s+1] of k and v; both are
    int32 (S+1,), start at 0 and never fall. ``max_q`` bounds the queries of one sequence, so that
    no call waits for the device. LSE is (H, Tq). The rest as in ``flash_attention``.
    """
    _check(q, k, v, num_dims=3)
    call = _checked_call(q, causal, scale, window, softcap, return_lse)
    _check_ends(cu_q, cu_kv, q.device)
    args = q[None], k[None], v[None]
    choice = choose_flash(
        *args, causal=causal, max_q=max_q, window=window, backend=backend, is_ragged=True
    )
    if explain:
        return choice
    if choice.implementation in ("triton", "hopper"):
        out, lse = _on_gpu(choice, *args, call, cu_q, cu_kv, max_q)
        out, lse = out[0], lse[0] if return_lse else lse
    else:
        out, lse = _online_ragged(q, k, v, cu_q.tolist(), cu_kv.tolist(), call)
    return (out, lse) if return_lse else out


def choose_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, max_q: int,
    window: tuple[int, int] = OPEN, backend: str = "auto", is_ragged: bool = False,
) -> Choice:  # fmt: skip
    """What runs such a call, q (B, S, H, D), k and v (B, S, G, D), with which tile, and why."""
    if q.device.type != "cuda":
        return choose_contiguous(backend=backend, device=q.device.type)
    lacks = triton_supports(q.device, q.dtype, q.shape[-1])
    if lacks is None and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        lacks = "gradients are wanted"
    if lacks is not None:
        return choose_contiguous(
            backend=backend, device="cuda", triton_lacks=lacks, hopper_lacks=lacks
        )
    hopper = _hopper_tile(q, causal=causal, window=window, max_q=max_q, is_ragged=is_ragged)
    capability = divmod(card_of(q.device).capability, 10)
    problem = hopper_lacks(q, k, v, capability=capability, release=triton_release())
    if problem is None and hopper.measured is not None and backend == "auto":
        problem = self_test(q.device, q.shape[-1], causal or window[1] >= 0)
    tile = _tile(q, causal=causal, max_q=max_q)
    return choose_contiguous(
        backend=backend,
        device="cuda",
        triton_tile=Tile(tile.rows, tile.keys),
        hopper_lacks=problem,
        hopper_tile=Tile(hopper.rows, hopper.keys),
        hopper_tflops=hopper.measured,
    )


def choose_contiguous(
    *, backend: str, device: str, triton_lacks: str | None = None,
    triton_tile: Tile = TILE, hopper_lacks: str | None = None, hopper_tile: Tile = TILE,
    hopper_tflops: float | None = None,
) -> Choice:  # fmt: skip
    """``choose_flash`` of facts. ``hopper_tflops``: what its tile was measured at, if it was.

    Raises ConfigError for a backend that is unknown or cannot run the call.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend {backend!r} is unknown; one of {', '.join(BACKENDS)}", param="backend"
        )
    if {"cpu": "cpu", "triton": "cuda", "hopper": "cuda"}.get(backend, device) != device:
        raise ConfigError(f"backend {backend} does not run on {device}", param="backend")
    problem = {"triton": triton_lacks, "hopper": hopper_lacks}.get(backend)
    if problem:
        raise ConfigError(f"backend {backend} cannot run this: {problem}", param="backend")
    if backend == "online":
        return Choice("online", TILE, "tiles in torch: asked for")
    if device != "cuda":
        return Choice("cpu", SDPA_TILE, "torch's SDPA; tiles in torch where it lacks an option")
    if triton_lacks:
        return Choice("online", TILE, f"tiles in torch: {triton_lacks}")
    if backend == "hopper":
        return Choice("hopper", hopper_tile, "Gluon on Hopper: asked for")
    if backend == "auto" and hopper_lacks is None:
        if hopper_tflops is not None:
            return Choice("hopper", hopper_tile, f"Gluon on Hopper: {hopper_tflops:g} TFLOP/s")
        hopper_lacks = "it is not measured yet"
    why_not = f", not the Hopper kernel: {hopper_lacks}" if hopper_lacks else ""
    return Choice("triton", triton_tile, f"Triton's tiles on a GPU{why_not}")


def _hopper_tile(
    q: Tensor, *, causal: bool, window: tuple[int, int], max_q: int, is_ragged: bool
) -> ForwardTile:
    dense_q = 0 if is_ragged else max_q
    return forward_tile(q.shape[-1], causal=causal, window=window, dense_q=dense_q)


def _tile(q: Tensor, *, causal: bool, max_q: int) -> TritonTile:
    card = card_of(q.device)
    return flash_tile(q.shape[-1], causal=causal, num_q=max_q, itemsize=q.element_size(), card=card)


def _on_gpu(
    choice: Choice, q: Tensor, k: Tensor, v: Tensor, call: _Call, cu_q: Tensor | None,
    cu_kv: Tensor | None, max_q: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    card = card_of(q.device)
    with torch.cuda.device(q.device):
        if choice.implementation == "hopper":
            from stairs.attention.hopper_forward import hopper_forward  # Triton, only where used

            return hopper_forward(
                q, k, v, cu_q=cu_q, cu_kv=cu_kv, max_q=max_q, num_sms=card.num_sms,
                tile=_hopper_tile(q, causal=call.causal, window=call.window, max_q=max_q,
                                  is_ragged=cu_q is not None),
                **call._asdict(),
            )  # fmt: skip
        from stairs.attention.triton_flash import flash_forward

        tile = _tile(q, causal=call.causal, max_q=max_q)
        return flash_forward(
            q, k, v, cu_q=cu_q, cu_kv=cu_kv, max_q=max_q, tile=tile,
            uses_boxes=card.capability >= 90, **call._asdict(),
        )  # fmt: skip


def _needs_online(q: Tensor, k: Tensor, call: _Call) -> bool:
    """Whether torch's SDPA lacks what is asked: its causal mask is aligned top-left."""
    shifted = call.causal and q.shape[1] != k.shape[1]
    return bool(call.window != OPEN or call.softcap or call.return_lse or shifted or not k.shape[1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=call.causal, scale=call.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _online(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """(B, Sq, H, D), (B, Sk, G, D) in tiles of torch products; differentiable."""
    batch, num_q, heads, head_dim = q.shape
    num_kv, kv_heads = k.shape[1:3]
    dtype = compute_dtype(q.dtype, k.dtype)
    assert TILE.queries is not None and TILE.keys is not None
    # (B, G, H/G, Sq, D) against (B, G, 1, Sk, D): a kv head serves its group without a copy.
    queries = q.to(dtype).view(batch, num_q, kv_heads, heads // kv_heads, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4)
    keys, values = (x.to(dtype).transpose(1, 2).unsqueeze(2) for x in (k, v))
    outs, sums = [], []
    for row in range(0, num_q, TILE.queries):
        rows = queries[..., row : row + TILE.queries, :]
        state = empty(rows.shape[:-1], head_dim, like=queries)
        place = torch.arange(row, row + rows.shape[-2], device=q.device)[:, None] + num_kv - num_q
        for start in range(0, num_kv, TILE.keys):
            tile = slice(start, start + TILE.keys)
            scores = rows @ keys[..., tile, :].transpose(-1, -2) * call.scale
            if call.softcap:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            column = torch.arange(start, start + scores.shape[-1], device=q.device)
            scores = scores.masked_fill(~_visible(place, column, call), -torch.inf)
            state = update(state, scores, values[..., tile, :])
        out, lse = finish(state)
        outs.append(out)
        sums.append(lse)
    if not outs:
        return torch.empty_like(q), q.new_empty((batch, heads, 0), dtype=dtype)
    merged = torch.cat(outs, dim=-2).permute(0, 3, 1, 2, 4).reshape(q.shape)
    return merged.to(q.dtype), torch.cat(sums, dim=-1).reshape(batch, heads, num_q)


def _visible(place: Tensor, column: Tensor, call: _Call) -> Tensor:
    left, right = call.window
    seen = torch.ones_like(place * column, dtype=torch.bool)
    if call.causal:
        seen &= column <= place
    if left >= 0:
        seen &= column >= place - left
    if right >= 0:
        seen &= column <= place + right
    return seen


def _online_ragged(
    q: Tensor, k: Tensor, v: Tensor, ends_q: list[int], ends_kv: list[int], call: _Call
) -> tuple[Tensor, Tensor]:
    outs, sums = [q[:0]], [q.new_empty((q.shape[1], 0), dtype=compute_dtype(q.dtype, k.dtype))]
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_kv[i], ends_kv[i + 1])
        out, lse = _online(q[None, rows], k[None, keys], v[None, keys], call)
        outs.append(out[0])
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, dim=1)


def _checked_call(
    q: Tensor, causal: bool, scale: float | None, window: tuple[int, int], softcap: float,
    return_lse: bool,
) -> _Call:  # fmt: skip
    if len(window) != 2 or min(window) < -1:
        raise ConfigError(
            f"window must be (left, right), each -1 for no bound or at least 0, got {window}",
            param="window",
        )
    if softcap < 0:
        raise ConfigError(f"softcap must be 0 (none) or positive, got {softcap}", param="softcap")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:
        raise ConfigError(f"scale must be positive, got {scale}", param="scale")
    return _Call(causal, scale, (window[0], window[1]), softcap, return_lse)


def _check(q: Tensor, k: Tensor, v: Tensor, *, num_dims: int) -> None:
    if not q.ndim == k.ndim == v.ndim == num_dims:
        axes = "(B, S, H, D)" if num_dims == 4 else "(T, H, D)"
        raise ConfigError(f"q, k and v must be {axes}; q is {tuple(q.shape)}", param="q")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ConfigError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be equal, with q's head_dim "
            f"{q.shape[-1]}",
            param="k",
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not kv_heads or heads % kv_heads:
        raise ConfigError(f"q's {heads} heads are not a multiple of k's {kv_heads}", param="k")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ConfigError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}", param="k")
    if not q.device == k.device == v.device:
        raise ConfigError(f"q, k, v are on {q.device}, {k.device}, {v.device}", param="k")


def _check_ends(cu_q: Tensor, cu_kv: Tensor, device: torch.device) -> None:
    for name, ends in (("cu_q", cu_q), ("cu_kv", cu_kv)):
        if ends.ndim != 1 or not len(ends) or ends.dtype != torch.int32 or ends.device != device:
            raise ConfigError(f"{name} must be int32 (S+1,) on {device}", param=name)
    if len(cu_q) != len(cu_kv):
        raise ConfigError(f"cu_q has {len(cu_q)} ends and cu_kv {len(cu_kv)}", param="cu_kv")
