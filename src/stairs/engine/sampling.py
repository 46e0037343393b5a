"""From logits to tokens, one row a sequence.

A row's token depends on its own logits, parameters, seed and position only: neither the batch
nor a preemption changes what a seeded request draws.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stairs.engine.sequence import Sequence

__all__ = ["sample"]


@torch.inference_mode()
def sample(logits: Tensor, sequences: tuple[Sequence, ...]) -> list[int]:
    """``logits`` (R, V) in any float dtype, one row for each of ``sequences``; returns R token ids.

    Order of operations as in vLLM: mask, temperature, top-k, top-p, draw.
    """
    if not sequences:
        return []
    logits = logits if logits.dtype == torch.float64 else logits.float()
    for row, sequence in enumerate(sequences):
        if sequence.num_generated < sequence.sampling.min_tokens and sequence.stop_ids:
            logits[row, list(sequence.stop_ids)] = -torch.inf
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
    return tokens.tolist()


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """One token a row from softmax(logits / temperature) cut to its top-k, then its top-p."""
    device = logits.device
    temperature = torch.tensor([s.sampling.temperature for s in sequences], device=device)
    top_k = [s.sampling.top_k if s.sampling.top_k > 0 else logits.shape[1] for s in sequences]
    top_p = torch.tensor([s.sampling.top_p for s in sequences], device=device, dtype=torch.float64)
    # Descending order puts every cut at a column, and ties at the lower id (stable).
    scores, order = (logits / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    column = torch.arange(logits.shape[1], device=device)
    scores = scores.masked_fill(column >= torch.tensor(top_k, device=device)[:, None], -torch.inf)
    probs = scores.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= top_p[:, None], 0.0)  # the first column always stays
    cumulative = probs.cumsum(dim=-1)
    point = (
        torch.tensor([_uniform(s) for s in sequences], device=device)[:, None] * cumulative[:, -1:]
    )
    # The first column whose cumulative probability exceeds the point: never one of probability 0.
    index = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[1] - 1)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) from the seed and the position alone: Philox is counter-based."""
    bits = np.random.Philox(key=sequence.seed, counter=len(sequence.tokens))
    return float(np.random.Generator(bits).random())
