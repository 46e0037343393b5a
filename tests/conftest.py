from __future__ import annotations

import pytest

from harness import Tiny, make_tiny


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return make_tiny(request.param)


@pytest.fixture(scope="session")
def tiny_llama() -> Tiny:
    return make_tiny("llama")
