"""Our forward pass against transformers' on the same weights."""

from __future__ import annotations

import random

import torch

from harness import Tiny, prompt_logits


def test_logits_equal_transformers(family: Tiny) -> None:
    rng = random.Random(3)
    for length in (1, 17, 300):
        prompt = [rng.randrange(211) for _ in range(length)]
        ours = prompt_logits(family.engine(dtype="float32"), prompt)
        with torch.no_grad():
            theirs = family.reference(torch.tensor([prompt])).logits[0]
        assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-5
