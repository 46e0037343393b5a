"""Where each implementation of each door is held to the numerics rule: none goes without.

The rule: its error against float64 is at most twice PyTorch's own in that dtype, and one rounding
of the largest value. Kernels for a GPU are held to it on one, and on a CPU by the values of an
interpreter or a simulator.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stairs.attention import choose, flash

# Of a kernel the test on a GPU, then the one without.
LIST: dict[tuple[str, str], tuple[str, ...]] = {
    ("attend", "reference"): ("test_attend.test_a_mixed_step_is_as_exact_as_torch",),
    ("attend", "online"): ("test_attend.test_a_mixed_step_is_as_exact_as_torch",),
    ("attend", "cpu"): ("test_attend.test_a_mixed_step_is_as_exact_as_torch",),
    ("attend", "triton"): ("test_on_gpu.test_a_mixed_step", "test_interpreted.test_a_mixed_step"),
    ("attend", "hopper"): (
        "test_hopper_decode_on_gpu.test_a_mixed_step", "test_hopper_decode.test_numerics",
        "test_hopper_on_gpu.test_chunks_over_pages", "test_hopper_chunks.test_pages",
    ),
    ("flash_attention", "cpu"): ("test_flash.test_every_rule",),
    ("flash_attention", "online"): ("test_flash.test_every_rule",),
    ("flash_attention", "triton"): (
        "test_on_gpu.test_ugly_shapes", "test_interpreted.test_contiguous",
    ),
    ("flash_attention", "hopper"): (
        "test_hopper_on_gpu.test_ugly_shapes", "test_hopper_forward.test_ugly_shapes",
    ),
}  # fmt: skip
KERNELS = ("triton", "hopper")


def test_every_implementation_has_an_entry() -> None:
    doors = {"attend": choose.IMPLEMENTATIONS, "flash_attention": flash.BACKENDS}
    asked = {(door, name) for door, names in doors.items() for name in names}
    assert set(LIST) == {(door, name) for door, name in asked if name != "auto"}


@pytest.mark.parametrize(("door", "name"), LIST, ids=str)
def test_the_entries_are_tests(door: str, name: str) -> None:
    """By their source: an interpreter's are skipped where they would be imported."""
    on_gpu = []
    for entry in LIST[door, name]:
        module, test = entry.split(".")
        tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
        assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        marks = [
            ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        on_gpu.append("pytest.mark.gpu" in "".join(marks))
    assert on_gpu == [True, False] * (len(on_gpu) // 2) if name in KERNELS else on_gpu == [False]
