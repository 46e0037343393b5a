from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stairs.attention import devices
from stairs.attention.choose import choose, score_bytes_held
from stairs.attention.devices import hopper_decode_lacks
from stairs.attention.hopper import ForwardTile
from stairs.attention.meta import LayerKV
from stairs.attention.tiles import HopperTile, hopper_tiles
from stairs.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, "cpu"),
        ({"backend": "cpu"}, "cpu"),
        ({"backend": "online"}, "online"),
        ({"backend": "reference", "device": "cuda"}, "reference"),
        ({"device": "cuda"}, "triton"),
        ({"device": "cuda", "backend": "online"}, "online"),
        ({"device": "cuda", "triton_lacks": "the kernels have no float64"}, "online"),
        ({"device": "mps"}, "online"),
    ],
)
def test_what_is_chosen(asked: dict[str, object], chosen: str) -> None:
    choice = choose(**asked)  # type: ignore[arg-type]
    assert choice.implementation == chosen
    assert choice.reason


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backend": "flash"}, "attention_backend 'flash' is unknown; one of auto, reference"),
        ({"backend": "cpu", "device": "cuda"}, "attention_backend cpu does not run on cuda"),
        ({"backend": "triton"}, "attention_backend triton does not run on cpu"),
        (
            {"backend": "triton", "device": "cuda", "triton_lacks": "the card is older"},
            "attention_backend triton cannot run this: the card is older",
        ),
    ],
)
def test_what_is_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        choose(**asked)  # type: ignore[arg-type]
    assert refused.value.param == "attention_backend"


def test_hopper_s_kernels_are_asked_for_or_measured() -> None:
    assert choose(device="cuda").implementation == "triton"
    assert choose(device="cuda", backend="hopper").implementation == "hopper"
    assert choose(device="cuda", hopper_measured="H200").implementation == "hopper"
    assert choose(device="cuda", hopper_measured="H200", backend="triton").trips == choose().trips
    for lacks in ({"hopper_lacks": "pages of 48"}, {"triton_lacks": "float64"}):
        options = {"device": "cuda", "hopper_measured": "H200", **lacks}
        assert choose(**options).implementation != "hopper"
        with pytest.raises(
            ConfigError, match="hopper cannot run this: " + next(iter(lacks.values()))
        ):
            choose(**options, backend="hopper")
    with pytest.raises(ConfigError, match="hopper does not run on cpu"):
        choose(backend="hopper")


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({}, None),
        ({"capability": (8, 0)}, "sm_80"),
        ({"capability": (10, 0)}, "sm_100"),
        ({"dtype": torch.float32}, "float32"),
        ({"dtype": torch.float16}, "float16 over"),
        ({"num_heads": 130}, "65 query heads"),
        ({"shape": (3, 2, 48, 128)}, "pages of 48"),
        ({"shape": (3, 2, 4, 128)}, "pages of 4 "),
        ({"shape": (3, 2, 8, 128)}, None),
        ({"shape": (3, 2, 256, 80)}, None),
        ({"shape": (3, 2, 16, 100)}, "head_dim 100"),
        ({"shape": (3, 2, 16, 40)}, "head_dim 40"),
        ({"shape": (2**26, 2, 16, 64)}, "over 2\\*\\*31"),
        ({"shape": (2**26 - 16, 2, 16, 64)}, None),
    ],
)
def test_what_hopper_s_decode_lacks(change: dict[str, Any], lacks: str | None) -> None:
    options = {"shape": (3, 2, 16, 128), "dtype": torch.bfloat16, "num_heads": 8,
               "capability": (9, 0)} | change  # fmt: skip
    pool = torch.empty(options.pop("shape"), dtype=torch.bfloat16, device="meta")
    found = hopper_decode_lacks(LayerKV(pool, pool), **options)
    assert found is None if lacks is None else re.search(lacks, found or "")


def test_hopper_counts_as_measured_where_both_of_a_step_s_kernels_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for decodes, chunks, known in (
        ("file", 650.0, "file"), ("file", None, None), (None, 650.0, None)
    ):  # fmt: skip
        short = (HopperTile(16, 64, 3, 2, measured=decodes), HopperTile(64, 64, 3, 2))
        tile = ForwardTile(128, 2, 2, 240, measured=chunks)
        monkeypatch.setattr(devices, "hopper_tiles", lambda *_, short=short: short)
        monkeypatch.setattr(devices, "chunk_tile", lambda _, tile=tile: tile)
        assert devices.hopper_measured(128, 4) == known


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 32])
def test_a_tile_that_is_said_to_be_measured_has_a_record(head_dim: int, group: int) -> None:
    records = Path(__file__).parents[2] / "bench" / "records"
    for tile in hopper_tiles(head_dim, group):
        assert tile.measured is None or (records / tile.measured).is_file()


def test_materialised_attention_makes_three_trips_and_tiles_make_one() -> None:
    assert choose(backend="reference").trips == ("QK^T", "softmax", "times V")
    assert len(choose(backend="online").trips) == 1
    assert len(choose().trips) == 1


def test_scores_held() -> None:
    whole = choose(backend="reference")
    # One head of a 32,768-token prompt in bfloat16: 2 GiB.
    assert score_bytes_held(whole, rows=32768, keys=32768, heads=1, itemsize=2) == 2 * 2**30
    tiled = choose(backend="online")
    assert score_bytes_held(tiled, rows=32768, keys=32768, heads=9, itemsize=4) == (
        128 * 128 * 9 * 4
    )
    assert score_bytes_held(tiled, rows=1, keys=20, heads=9, itemsize=4) == 20 * 9 * 4


@pytest.mark.parametrize("num_q", [1, 512])
def test_scores_held_by_threads_do_not_grow_with_the_context(num_q: int) -> None:
    choice = choose(group_size=3, num_threads=2)
    held = [
        score_bytes_held(choice, rows=num_q, keys=keys, heads=9, itemsize=4)
        for keys in (1024, 65536)
    ]
    assert held == [num_q * 64 * 6 * 4] * 2


def test_choosing_loads_neither_torch_nor_numba() -> None:
    code = (
        "import sys; import stairs.attention.choose; "
        "assert not {'torch', 'numba'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
