"""Our forward pass against transformers' on the same weights."""

from __future__ import annotations

import random

import pytest
import torch

from harness import DictSource, Tiny, prompt_logits
from stairs.engine.build import build_engine
from stairs.errors import CheckpointError


def test_logits_equal_transformers(tiny: Tiny) -> None:
    rng = random.Random(3)
    for length in (1, 17, 300):
        prompt = [rng.randrange(211) for _ in range(length)]
        ours = prompt_logits(tiny.engine(dtype="float32"), prompt)
        with torch.no_grad():
            theirs = tiny.reference(torch.tensor([prompt])).logits[0]
        assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-5


@pytest.mark.parametrize("damage", ["missing", "unknown", "misshapen"])
def test_every_tensor_is_used_once_or_named(tiny: Tiny, damage: str) -> None:
    tensors = dict(tiny.source.tensors)
    name = sorted(tensors)[5]
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors[name + "_2"] = tensors[name]
    else:
        tensors[name] = tensors[name][:-1]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        build_engine(tiny.config, DictSource(tensors))
