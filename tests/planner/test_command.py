"""``stairs plan`` as a process: quick, without torch, and one line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stairs.planner import command
from stairs.planner.catalogue import CATALOGUE

RUN = "from stairs.cli import main; main()"
WITHOUT_TORCH = """
import sys
from stairs.planner.command import plan_as_json, plan_as_svg, plan_model
from stairs.planner.options import PlanOptions
plan = plan_model(sys.argv[1], PlanOptions(gpu="h200", users=3))
plan_as_json(plan), plan_as_svg(plan)
loaded = {"torch", "numba", "transformers", "numpy"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else 0)
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(command.__file__).parents[2])}


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )


def stairs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(RUN, *arguments)


def test_it_answers_in_under_a_second_from_process_start() -> None:
    """Of its own CPU time, which a busy machine does not lengthen much."""
    took = []
    for _ in range(3):
        before = os.times()
        done = stairs("plan", "gpt2", "--users", "100")
        after = os.times()
        took.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "3,600 MiB (3.77 GB)" in done.stdout
    assert min(took) < 1.0, took


def test_no_torch_no_numpy() -> None:
    done = python(WITHOUT_TORCH, "llama-3.1-8b")
    assert done.returncode == 0, done.stderr


def test_all_options_together_as_json() -> None:
    done = stairs(
        "plan", "llama-3.1-8b", "--gpu", "h200", "--max-model-len", "8192", "--users", "100",
        "--system-prompt-tokens", "2000", "--kv-cache-dtype", "fp8",
        "--max-num-batched-tokens", "512", "--target", "ttft=0.5s", "--target", "users=200",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    raw = json.loads(done.stdout)
    assert raw["kv_cache_dtype"] == "fp8"
    assert "Targets" in [table["title"] for table in raw["tables"]]


def test_svg_goes_to_stdout() -> None:
    done = stairs("plan", "gpt2", "--svg")
    assert done.stdout.startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "no-such-model"),
        (["gpt2", "--gpu", "abacus"], "abacus"),
        (["gpt2", "--max-model-len", "2000"], "max_model_len"),
        (["gpt2", "--users", "0"], "users"),
        (["gpt2", "--target", "ttft=soon"], "ttft"),
        (["gpt2", "--kv-cache-dtype", "fp3"], "kv_cache_dtype"),
        (["gpt2", "--json", "--svg"], "--svg"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], words: str) -> None:
    done = stairs("plan", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_heads": 3}, "n_heads"),
        ({"n_layer": None}, "n_layer"),
        ({"n_embd": -1}, "n_embd"),
    ],
)
def test_a_wrong_missing_or_nonsense_key_is_named(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(CATALOGUE["openai-community/gpt2"]) | change))
    done = stairs("plan", str(file))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
