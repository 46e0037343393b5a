"""Attention over contiguous tensors in float64, materialised: the oracle of the public op."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_float64"]


def attention_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, G, D) -> O (B, Sq, H, D) and natural LSE (B, H, Sq)."""
    num_q, num_kv, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    queries, keys, values = q.double(), k.double(), v.double()
    keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(num_q, device=q.device)[:, None] + num_kv - num_q
    key = torch.arange(num_kv, device=q.device)[None]
    seen = torch.ones((num_q, num_kv), dtype=torch.bool, device=q.device)
    if causal:
        seen &= key <= place
    if window[0] >= 0:
        seen &= key >= place - window[0]
    if window[1] >= 0:
        seen &= key <= place + window[1]
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees nothing answers 0
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return out, torch.logsumexp(scores, -1)
