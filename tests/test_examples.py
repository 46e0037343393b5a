"""The examples run: the shared prompt over a tiny model, the eight questions as they are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from stairs import LLM
from tiny_folder import write_tiny_folder

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shared_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    shared_prompt = example("shared_prompt")
    monkeypatch.setattr(shared_prompt, "LLM", lambda _: LLM(str(folder)))
    shared_prompt.main()

    out = capsys.readouterr().out
    pinned = re.search(r"pinned: (\d+) of its (\d+) tokens", out)
    assert pinned and int(pinned[1]) == int(pinned[2]) // 16 * 16
    lines = [line.replace(",", "").split() for line in out.splitlines()]
    rows = [line for line in lines if len(line) == 14 and line[0].isdigit() and line[5].isdigit()]
    assert [int(row[0]) for row in rows] == list(range(1, 9))
    for question, row in zip(shared_prompt.QUESTIONS, rows, strict=True):
        cached, fed = int(row[5]), int(row[6])
        assert cached >= int(pinned[1]), "questions that begin alike may share a block more"
        assert len(question) - 16 < fed < len(question) + 200
        assert row[8] == row[9], "pairs predicted and counted"
        assert row[10:12] == row[12:14], "K/V bytes predicted and allocated"
    assert "stairs compare" in out.split("Try next:")[1]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (1, "FLOPs 1 x"),
        (2, "18,883,584 of 18,883,584"),
        (3, "merged        m 7   l 1.0748"),
        (4, "FlashAttention"),
        (5, "another Q for the first token changes the newest row by 0.0e+00"),
        (6, "with the causal mask  128 of 128"),
        (7, "33,558,528   4,194,304"),
        (8, "33,558,528"),
    ],
)
def test_why(number: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("why").main(str(number))
    assert says in capsys.readouterr().out
