"""JSON from a file nobody vouches for: its size and the number of its values are bounded first.

A few bytes can ask for many: ``[[],[],...`` takes 20 times its length once parsed. So what is
counted before parsing is not only bytes but what makes values: commas and opening brackets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from stairs.errors import CheckpointError

__all__ = ["parse_object", "read_object"]

_MAX_BYTES = 2**20
_MAX_VALUES = 60_000


def read_object(
    path: Path, *, max_bytes: int = _MAX_BYTES, max_values: int = _MAX_VALUES
) -> dict[str, Any]:
    """The object in ``path``; ``CheckpointError`` names the file."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    return parse_object(data, path.name, max_bytes=max_bytes, max_values=max_values)


def parse_object(
    data: bytes, where: str, *, max_bytes: int = _MAX_BYTES, max_values: int = _MAX_VALUES
) -> dict[str, Any]:
    if len(data) > max_bytes:
        raise CheckpointError(f"{where} is larger than {max_bytes} bytes")
    if sum(data.count(mark) for mark in b",[{") > max_values:
        raise CheckpointError(f"{where} holds more than {max_values} values")
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{where} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold an object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
