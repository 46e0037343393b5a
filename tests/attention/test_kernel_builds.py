"""Every Triton kernel compiles for every supported card, none of which need be here."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles; not in the interpreter's process", allow_module_level=True)

from attention.kernel_builds import Build, builds
from stairs.attention.tiles import CARDS

ALL = list(builds())
# In every run: the kinds of one card of each memory size, in the dtype that is served.
FEW = [
    build
    for build in ALL
    if build.dtype == "bf16"
    and build.capability in (89, 90)
    and ("D128" in build.name or "C576" in build.name or "silu" in build.name)
    and "Q512" not in build.name
    and "G32" not in build.name
    and "G1 " not in build.name
    and (
        "extras=False" in build.name
        or (build.capability == 90 and "causal=True" in build.name)
        or "flash" not in build.name
    )
]
REST = [build for build in ALL if build not in FEW] if os.environ.get("STAIRS_ALL_KERNELS") else []


def check(build: Build) -> None:
    compiled = build.compile()
    assert compiled.metadata.shared <= CARDS[build.capability].shared
    assert compiled.asm["cubin"]


@pytest.mark.parametrize("build", FEW, ids=lambda build: build.name)
def test_representative(build: Build) -> None:
    check(build)


@pytest.mark.slow
@pytest.mark.parametrize("build", REST, ids=lambda build: build.name)
def test_all(build: Build) -> None:
    """STAIRS_ALL_KERNELS=1, or `make test-kernels`: minutes on many cores."""
    check(build)
