"""`compare`: the same tokens seven ways, and figures that are the formulas' and the records'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import stairs.compare
from stairs.accounting import costs
from stairs.accounting.table import Table
from stairs.compare import TECHNIQUES, DifferentTokensError, compare, default_system_prompt
from tiny_folder import write_tiny_folder

SYSTEM = "Answer with care, and never with more words than are needed. " * 8
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("compare") / "tiny")


@pytest.fixture(scope="module")
def parts(folder: Path) -> list[str | Table]:
    return list(compare(str(folder), system=SYSTEM, user="Why?", max_tokens=TOKENS))


def figures(table: Table) -> dict[str, dict[str, float]]:
    """By technique, then by figure."""
    heads = [column.name for column in table.columns[1:]]
    return {
        head: {str(row[0]).split(",")[0]: row[i + 1] for row in table.rows}  # type: ignore[misc]
        for i, head in enumerate(heads)
    }


def test_there_are_two_tables_and_the_last_line_is_the_argument(parts: list[str | Table]) -> None:
    tables = [part for part in parts if isinstance(part, Table)]
    assert [table.title.split(":")[0] for table in tables] == ["Prefill", "Decode"]
    for table in tables:
        assert list(figures(table)) == [technique.name for technique in TECHNIQUES]
        assert max(len(line) for line in table.text(100).splitlines()) <= 100
    last = parts[-1]
    assert isinstance(last, str)
    for claim in ("L²·D → L·D", "128 × 4 = 512", "three trips → one"):
        assert claim in last


def test_prefill_says_what_each_technique_saves(parts: list[str | Table]) -> None:
    prefill = figures(next(part for part in parts if isinstance(part, Table)))
    plain, pinned, chunks = (prefill[n] for n in ("KV cache", "prompt pinned", "chunks of 128"))
    prompt = plain["query rows fed"]
    assert prompt > 3 * 128

    assert plain["pairs (counted)"] == costs.causal_pairs(int(prompt), int(prompt))
    assert plain["largest step"] == prompt * prompt
    assert plain["work before the request"] == 0 < pinned["work before the request"]

    assert pinned["query rows fed"] + pinned["K/V rows reused"] == prompt
    assert pinned["K/V rows reused"] % 16 == 0 and pinned["K/V rows reused"] >= len(SYSTEM) - 16
    assert pinned["pairs (counted)"] < plain["pairs (counted)"] / 3
    assert pinned["GFLOP"] < plain["GFLOP"] / 3

    assert chunks["pairs (counted)"] == plain["pairs (counted)"]
    assert chunks["GFLOP"] == plain["GFLOP"]
    assert chunks["largest step"] < plain["largest step"] / 2
    assert chunks["largest step"] < prefill["4 × 128 a step"]["largest step"]

    stored, tiled = prefill["scores stored"], prefill["scores tiled"]
    assert stored["pairs (counted)"] == tiled["pairs (counted)"]
    assert stored["scores held"] == prompt * prompt * 4 * 4 / 1024  # heads x float32
    assert tiled["scores held"] < stored["scores held"]
    assert tiled["moved"] < stored["moved"]
    assert (stored["memory trips"], tiled["memory trips"]) == ("3: QK^T, softmax, times V", "1")


def test_decode_feeds_one_row_a_token_with_a_cache(parts: list[str | Table]) -> None:
    prefill, decode = (figures(part) for part in parts if isinstance(part, Table))
    prompt = int(prefill["KV cache"]["query rows fed"])
    contexts = [prompt + i for i in range(1, TOKENS)]
    cached, without = decode["KV cache"], decode["no cache"]
    assert cached["query rows fed"] == TOKENS - 1
    assert cached["pairs (counted)"] == sum(contexts)
    assert cached["K/V rows reused"] == sum(contexts) - (TOKENS - 1)
    assert without["query rows fed"] == sum(contexts)
    assert without["pairs (counted)"] == sum(costs.causal_pairs(c, c) for c in contexts)
    assert without["K/V stored"] == without["K/V rows reused"] == 0 < cached["K/V stored"]


def test_different_tokens_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = stairs.compare._with_cache

    def wrong(llm: stairs.LLM, request: stairs.compare.Request) -> stairs.compare.Run:
        run = cached(llm, request)
        return replace(run, tokens=[*run.tokens[:-1], run.tokens[-1] ^ 1])

    techniques = (TECHNIQUES[1], replace(TECHNIQUES[3], run=wrong))
    monkeypatch.setattr(stairs.compare, "TECHNIQUES", techniques)
    with pytest.raises(DifferentTokensError, match="chunks of 128 gave"):
        list(compare(str(folder), system=SYSTEM, max_tokens=2))


def test_the_default_text_is_about_five_hundred_tokens() -> None:
    assert 300 <= len(default_system_prompt().split()) <= 450
