from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import Server
from tiny_folder import write_tiny_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    """The one that most tests share: 64 blocks of 16 tokens, 4 answers at once, 4 that wait."""
    started = Server(
        tiny_model,
        *("--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--max-queue", "4"),
        *("--max-body-bytes", "200000"),
    )
    yield started.wait_ready()
    assert started.stop() == 0, "".join(started.log)
