"""JSON files are bounded before they are parsed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from stairs.errors import CheckpointError
from stairs.text.json_file import read_object


def test_an_object(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"a": [1, "é", null]}')
    assert read_object(tmp_path / "a.json") == {"a": [1, "é", None]}


@pytest.mark.parametrize(("text", "message"), [
    ("", "a.json is not JSON"),
    ("{", "a.json is not JSON"),
    ("[1]", "a.json must hold an object"),
    ('{"a": NaN}', "NaN is no JSON number"),
    ('{"a": -Infinity}', "-Infinity is no JSON number"),
    ('{"a": ' + "9" * 5000 + "}", "a.json is not JSON"),
    ('{"a":' * 40_000, "nested too deep"),
    ('{"a":"' + "x" * 2**20 + '"}', "larger than 1048576 bytes"),
    ('{"a":[' + "[]," * 60_000 + "[]]}", "more than 60000 values"),
    ("\xff", "a.json is not JSON"),
])  # fmt: skip
def test_anything_else_is_one_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            read_object(tmp_path / "a.json")
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"b\.json cannot be read: No such file"):
        read_object(tmp_path / "b.json")
