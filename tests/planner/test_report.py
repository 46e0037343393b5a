"""What a reader sees: both units, a kind for every number, 100 columns; what a program reads."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any, get_args

import pytest

from stairs.accounting.table import Kind
from stairs.accounting.weights import dense_weights
from stairs.config import EngineConfig, ModelConfig
from stairs.engine.resolve import resolve
from stairs.planner.cards import startup_table, tile_memory
from stairs.planner.catalogue import SHORT_NAMES
from stairs.planner.command import plan_as_json, plan_as_svg
from stairs.planner.plan import Plan
from stairs.planner.report import plan_tables

Plans = Callable[..., Plan]
NAMES = sorted(set(SHORT_NAMES) - {"smollm2"})


def text_of(plan: Plan) -> str:
    return "\n".join(table.text(units="both") for table in plan_tables(plan))


def test_gpt2_for_100_and_1000_users(plan_for: Plans) -> None:
    assert "3,600 MiB (3.77 GB)" in text_of(plan_for("gpt2", users=100))
    assert "36,000 MiB (37.7 GB)" in text_of(plan_for("gpt2", users=1000))


def test_llama_8b_stores_128_kib_a_token(plan_for: Plans) -> None:
    text = text_of(plan_for("llama-3.1-8b", max_model_len=32768))
    assert "128 KiB (131.1 kB)" in text
    assert "4 GiB (4.29 GB)" in text
    assert "GFLOP" in text
    assert "MAC" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_model_fits_100_columns(plan_for: Plans, name: str) -> None:
    text = text_of(
        plan_for(
            name,
            max_model_len=1000,
            users=7,
            system_prompt_tokens=200,
            targets={"ttft": 1e-6, "users": 10**6, "tpot": 100.0},
        )
    )
    titles = [line for line in text.splitlines() if len(line) > 100]
    assert not titles


def test_every_number_says_how_it_is_known(plan_for: Plans) -> None:
    raw = json.loads(plan_as_json(plan_for("gpt-oss-20b", users=8, targets={"users": 9})))
    kinds = set(get_args(Kind))

    def numbers(table: dict[str, Any]) -> int:
        count = 0
        for row in table["rows"]:
            for column in table["columns"]:
                cell = row[column["name"]]
                if isinstance(cell, dict):
                    assert cell["kind"] in kinds
                    count += 1
                elif cell is not None and not isinstance(cell, str):
                    assert column["axis"] != "none", (table["title"], column)
                    count += 1
        return count

    assert sum(map(numbers, raw["tables"])) > 80
    assert {effect["kind"] for effect in raw["techniques"]} <= kinds


def test_json_has_exact_numbers(plan_for: Plans) -> None:
    raw = json.loads(plan_as_json(plan_for("llama-3.1-8b", max_model_len=8192)))
    assert raw["model"]["parameters"] == 8_030_261_248
    assert raw["recommended_max_num_batched_tokens"] == 256
    memory = {row["what"]: row["value"] for row in raw["tables"][0]["rows"]}
    assert memory["K/V of a token"] == {
        "value": 131_072,
        "unit": "B",
        "axis": "stored bytes",
        "kind": "exact",
        "source": "2 x 32 layers x 8 kv heads x 128 x 2 B",
    }
    effect = next(e for e in raw["techniques"] if e["technique"] == "KV cache")
    assert set(effect) == {"technique", "axis", "what", "without", "with", "kind"}


def test_a_windowed_model_shows_its_two_numbers(plan_for: Plans) -> None:
    text = text_of(plan_for("gpt-oss-20b", max_model_len=8192))
    assert "K/V fixed, a request" in text
    assert "K/V growing, a token" in text
    assert "K/V of a token" not in text


def test_what_does_not_fit_says_so(plan_for: Plans) -> None:
    text = text_of(plan_for("deepseek-v3", max_model_len=8192))
    assert "not one user fits on this card; it takes 8 of them" in text
    small = plan_for("llama-3.1-70b", gpu="cpu", max_model_len=1024)
    assert "not one user's K/V" in text_of(small)


def test_only_visible_options_make_rows(plan_for: Plans) -> None:
    plain = text_of(plan_for("gpt2"))
    assert "users that share it" not in plain
    assert "Targets" not in plain
    shared = text_of(plan_for("gpt2", system_prompt_tokens=500, targets={"users": 1}))
    assert "users that share it" in shared
    assert "496 cached" in shared
    assert "Targets" in shared


def test_tiles_against_on_chip_memory(plan_for: Plans) -> None:
    assert tile_memory(128, 2, q_tile=128, k_tile=128, stages=2) == 160 * 1024

    def tiles(gpu: str) -> list[str]:
        plan = plan_for("llama-3.1-8b", gpu=gpu, max_model_len=1024)
        rows = plan_tables(plan)[-1].rows
        sources = [row[3] for row in rows if str(row[0]).startswith("tiles 128")]
        return [str(source).rsplit(": ")[-1] for source in sources]

    assert tiles("h200") == ["fits", "fits", "fits"]  # 227 KiB
    assert tiles("4090") == ["does not fit", "fits", "fits"]  # 99 KiB


def test_the_start_up_card_is_the_resolved_engines(model: Callable[[str], ModelConfig]) -> None:
    config = model("smollm2")
    engine = resolve(config, EngineConfig(max_model_len=2048), memory=2**32)
    table = startup_table(config, engine, name="smollm2", weights=dense_weights(config, 4))
    rows = {row[0]: row[1].value for row in table.rows}  # type: ignore[union-attr]
    assert rows["K/V pool"] == (engine.cache.num_blocks or 0) * 16 * 46_080
    assert rows["users that fit"] == (engine.cache.num_blocks or 0) // 128
    assert rows["weights"] == 4 * 134_515_008
    assert rows["smallest prefix that hits"] == 16


def test_the_picture_is_svg_with_all_three_parts(plan_for: Plans) -> None:
    svg = plan_as_svg(plan_for("gpt2", system_prompt_tokens=100))
    root = ET.fromstring(svg)
    titles = [e.text or "" for e in root.iter() if e.get("class") == "title"]
    assert len(titles) == 3
    assert "96 tokens reused" in svg
