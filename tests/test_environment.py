from __future__ import annotations

import torch
from typer.testing import CliRunner

import stairs
from stairs.cli import app
from stairs.environment import describe


def test_env_tells_versions_and_machine() -> None:
    result = CliRunner().invoke(app, ["env"])
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert lines["stairs"] == stairs.__version__
    assert lines["torch"] == torch.__version__
    assert {"python", "cpu", "memory", "gpu", "pyzmq"} <= lines.keys()


def test_our_variables_are_told_but_never_a_key() -> None:
    said = describe({"STAIRS_PORT": "1234", "STAIRS_API_KEY": "hush", "OTHER": "quiet"})
    assert "STAIRS_PORT: 1234" in said and "STAIRS_API_KEY: set" in said
    assert "hush" not in said and "quiet" not in said
