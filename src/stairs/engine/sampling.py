"""From logits to tokens, one row an answer.

A row's token depends on its own logits, parameters, seed and position only: neither the batch
nor a preemption changes what a seeded request draws. Log probabilities are of the model's own
logits, before any parameter touches them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from stairs.engine.sequence import Sequence, TokenLogprobs

__all__ = ["adjust", "sample", "token_logprobs"]

# Tokens among which a draw is looked for first on a CPU: a whole row's order costs 3.4 ms at
# 49,152 tokens, more than half of a step.
LIKELIEST = 256
# Less heat than this is none: in float32 a division by it would give no numbers any more.
GREEDY_BELOW = 1e-5


@torch.inference_mode()
def sample(
    logits: Tensor, sequences: tuple[Sequence, ...]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """``logits`` (R, V) in any float dtype, one row for each of ``sequences``: R token ids, and
    the log probabilities of those that asked.

    Order as in vLLM: grammar, bias, minimum length, penalties, temperature, min-p, top-k, top-p,
    draw.
    """
    if not sequences:
        return [], []
    raw = logits if logits.dtype == torch.float64 else logits.float()
    logits = raw.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.grammar is not None:
            forbidden = torch.from_numpy(sequence.grammar.forbidden())
            row.masked_fill_(forbidden.to(row.device), -torch.inf)
        adjust(row, sequence)
    tokens = _likeliest(logits)
    drawn = [row for row, s in enumerate(sequences) if s.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw_rows(logits[rows], [sequences[row] for row in drawn])
    wanted = [s.sampling.logprobs for s in sequences]
    return tokens.tolist(), token_logprobs(raw, tokens, wanted)


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: Rows[int | None]
) -> list[TokenLogprobs | None]:
    """For each row of ``logits`` (R, V) the log probability and rank of its token and the
    ``num_top`` likeliest; None where that is None."""
    asked = [row for row, num in enumerate(num_top) if num is not None]
    found: list[TokenLogprobs | None] = [None] * len(tokens)
    if not asked:
        return found
    logprobs = logits[asked].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[asked][:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(max(num_top[row] or 0 for row in asked), logits.shape[1]))
    # One wait for the device rather than one a number.
    tokens, own, ranks, values, ids = (x.cpu() for x in (tokens, own, ranks, values, ids))
    for i, row in enumerate(asked):
        num = num_top[row]
        top = tuple(zip(ids[i, :num].tolist(), values[i, :num].tolist(), strict=True))
        found[row] = TokenLogprobs(int(tokens[row]), float(own[i, 0]), int(ranks[i]), top)
    return found


def adjust(row: Tensor, sequence: Sequence) -> None:
    """Bias, minimum length and penalties, in place on one row (V,)."""
    sampling = sequence.sampling
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    if sequence.num_generated < sampling.min_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -torch.inf
    if sampling.repetition_penalty != 1.0:
        # Over all tokens, also those whose K/V came from the cache (Keskar et al. 2019).
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        scores = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(sequence.tokens[sequence.num_prompt_tokens :])
        seen = torch.tensor(list(counts), dtype=torch.long, device=row.device)
        times = torch.tensor(list(counts.values()), device=row.device)
        row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest in each row; torch takes ten times as long for it on a CPU as
    numpy: 29 and 3 us for 49,152."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _draw_rows(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """``_draw``, without a whole row's order where the token is found among the likeliest."""
    if logits.device.type != "cpu" or logits.shape[1] <= LIKELIEST:
        return _draw(logits, sequences)
    tokens = [_draw_likeliest(row, s) for row, s in zip(logits, sequences, strict=True)]
    rest = [row for row, token in enumerate(tokens) if token is None]
    if rest:
        for row, token in zip(rest, _draw(logits[rest], [sequences[r] for r in rest]), strict=True):
            tokens[row] = int(token)
    return torch.tensor(tokens)


def _draw_likeliest(row: Tensor, sequence: Sequence) -> int | None:
    """The token that ``_draw`` takes from ``row`` (V,), or None if it, or what its cuts keep, may
    lie beyond the ``LIKELIEST`` tokens."""
    p, point = sequence.sampling, _uniform(sequence)
    least = row.topk(LIKELIEST).values[-1]
    ids = ((row >= least) & (row > -torch.inf)).nonzero().squeeze(1)
    scores, place = row[ids].sort(descending=True, stable=True)
    if not len(ids) or p.top_k > len(ids):  # nothing that compares, or too few
        return None

    def weights(logits: Tensor) -> Tensor:
        scaled = (logits - scores[0]) / p.temperature
        if p.min_p:
            scaled = scaled.masked_fill(scaled < math.log(p.min_p), -torch.inf)
        return scaled.double().exp()

    first = weights(scores)
    if p.top_k > 0:
        first = first[: p.top_k]
    probs = first / (first.sum() if p.top_k > 0 else weights(row).sum())
    cumulative = probs.cumsum(dim=0)
    kept = int((cumulative - probs < p.top_p).sum())
    if kept < len(probs) or p.top_k > 0:
        point *= float(cumulative[kept - 1])
    elif p.top_p < 1:
        return None
    index = int(torch.searchsorted(cumulative[:kept], point, right=True))
    if index == kept:  # beyond, or at the very end of what is kept
        if kept == len(probs) and p.top_k <= 0:
            return None
        index = int((probs[:kept] > 0).sum()) - 1
    return int(ids[place[index]])


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """One token a row from softmax(logits / temperature) cut by min-p, top-k, then top-p."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=logits.dtype)[:, None]

    params = [s.sampling for s in sequences]
    vocab_size = logits.shape[1]
    # Descending order puts every cut at a column, and ties at the lower id (stable).
    scores, order = logits.sort(dim=-1, descending=True, stable=True)
    scores = (scores - scores[:, :1]) / column([p.temperature for p in params])
    log_min_p = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
    top_k = column([p.top_k if p.top_k > 0 else vocab_size for p in params])
    place = torch.arange(vocab_size, device=logits.device)
    probs = scores.masked_fill((scores < log_min_p) | (place >= top_k), -torch.inf)
    probs = probs.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= column([p.top_p for p in params]), 0.0)
    cumulative = probs.cumsum(dim=-1)
    point = torch.tensor([_uniform(s) for s in sequences], device=logits.device).double()
    # The first place whose cumulative probability exceeds the point: never one of probability 0.
    index = torch.searchsorted(cumulative, point[:, None] * cumulative[:, -1:], right=True)
    # At least place 0: a row of NaN, from a broken model, must not end everyone else's step.
    last = ((probs > 0).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) from the seed and the position alone: Philox is counter-based."""
    bits = np.random.Philox(key=sequence.seed, counter=len(sequence.tokens))
    return float(np.random.Generator(bits).random())
