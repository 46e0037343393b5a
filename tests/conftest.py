from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from harness import FAMILIES, Tiny, make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from more, and lose much where other processes run beside them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """For a model of real size."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return make_tiny(request.param)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Tiny:
    return make_tiny(request.param)


@pytest.fixture(scope="session")
def tiny_llama() -> Tiny:
    return make_tiny("llama")
