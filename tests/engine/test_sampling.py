from __future__ import annotations

import math

import pytest
import torch

from stairs.config import SamplingParams
from stairs.engine import sampling as sampling_module
from stairs.engine.sampling import sample
from stairs.engine.sequence import Sequence


def sequence(seed: int = 0, position: int = 1, stop_ids=frozenset(), **sampling) -> Sequence:
    made = Sequence(
        request=0, tokens=[0] * position, sampling=SamplingParams(**sampling), max_tokens=100,
        stop_ids=frozenset(stop_ids), seed=seed,
    )  # fmt: skip
    return made


def tokens_of(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return sample(logits, sequences)[0]


def draws(logits: list[float], num: int = 4000, **sampling) -> torch.Tensor:
    """Share of each token over ``num`` positions of one seeded request."""
    rows = torch.tensor(logits).expand(num, -1).clone()
    tokens, _ = sample(rows, tuple(sequence(5, i + 1, **sampling) for i in range(num)))
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / num


def test_greedy_takes_the_first_of_equal_maxima():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert tokens_of(logits, sequence(temperature=0), sequence(temperature=0)) == [1, 0]


def test_frequencies_follow_the_softmax():
    logits = [0.0, 1.0, 2.0, -1.0]
    for temperature in (1.0, 0.5):
        wanted = (torch.tensor(logits) / temperature).softmax(0)
        assert (draws(logits, temperature=temperature) - wanted).abs().max() < 0.03


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {2}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_k": 3, "top_p": 0.96}, {0, 1, 2}),
        ({"top_k": 1}, {2}),
        ({"top_k": -1, "top_p": 1.0}, {0, 1, 2, 3}),
    ],
)
def test_cuts_keep_exactly_the_likeliest(limits, kept):
    # probabilities 0.09, 0.24, 0.64, 0.03
    shares = draws([0.0, 1.0, 2.0, -1.0], temperature=1.0, **limits)
    assert {i for i, share in enumerate(shares) if share > 0} == kept
    probs = torch.tensor([0.0, 1.0, 2.0, -1.0]).softmax(0)
    wanted = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(probs.tolist())])
    assert (shares - wanted / wanted.sum()).abs().max() < 0.03


def test_equal_scores_at_the_cut_keep_top_k_of_them():
    shares = draws([1.0] * 6, temperature=1.0, top_k=2)
    assert (shares > 0).sum() == 2


def test_seed_and_position_alone_decide():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    mine = sequence(7, 4, temperature=1.3)
    alone = tokens_of(logits[1:2], mine)
    others = sequence(8, 4, temperature=0.7), sequence(9, 9, temperature=0)
    together = tokens_of(logits, others[0], mine, others[1])
    assert together[1] == alone[0]
    across_seeds = {tokens_of(logits[1:2], sequence(s, 4))[0] for s in range(30)}
    across_positions = {tokens_of(logits[1:2], sequence(7, p))[0] for p in range(1, 30)}
    assert len(across_seeds) > 5 and len(across_positions) > 5


def test_min_tokens_masks_every_stop_id():
    logits = torch.tensor([[1.0, 9.0, 8.0, 0.0]])
    young = sequence(temperature=0, min_tokens=2, stop_ids={1, 2})
    assert tokens_of(logits, young) == [0]
    young.tokens += [0, 0]
    assert tokens_of(logits, young) == [1]


def test_impossible_tokens_are_never_drawn():
    shares = draws([-math.inf, 0.0, -math.inf, -200.0], temperature=2.0)
    assert shares.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_tiny_temperature_is_greedy_and_finite():
    assert draws([1.0, 1.001, 0.0], num=50, temperature=1e-6).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "limits",
    [
        {}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 1}, {"top_k": 40}, {"top_k": 2000},
        {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"temperature": 30.0},
    ],
)  # fmt: skip
def test_the_likeliest_tokens_give_the_draw_of_a_whole_order(limits: dict) -> None:
    """Ties, impossible tokens and flat rows included; and the short way is really taken. A cut on a
    token's very edge, as 0.9 of 3000 equal ones, may round either way."""
    torch.manual_seed(1)
    noise = torch.randn(40, 2999)
    logits = torch.cat([noise[:20] * 4, noise[20:].round(), torch.zeros(2, 2999)])
    logits[3, 10:] = -torch.inf
    found = 0
    for row in logits:
        for seed in range(6):
            one = sequence(seed, **{"temperature": 1.0} | limits)
            token = sampling_module._draw_likeliest(row, one)
            found += token is not None
            assert token in (None, int(sampling_module._draw(row[None], [one])))
    assert found > 60 or "temperature" in limits or limits.get("top_k") == 2000


def test_a_row_that_is_not_a_number_ends_nobodys_step() -> None:
    row = torch.full((3000,), torch.nan)
    assert sampling_module._draw_likeliest(row, sequence(0, temperature=1.0)) is None


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-320])
def test_hardly_any_heat_is_none(temperature: float):
    """In float32 the coldest of these is zero, and a division by it would be no number."""
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
    drawn = {tokens_of(logits, sequence(seed, temperature=temperature))[0] for seed in range(8)}
    assert drawn == {int(logits.argmax())}
