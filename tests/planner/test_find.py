"""Where a config comes from, and the one line for each way in which there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.model_files import CONFIG, write_tiny_gguf
from stairs.errors import CheckpointError, ModelNotFoundError, StairsError
from stairs.planner.catalogue import CATALOGUE
from stairs.planner.find import find_model

GPT2: dict[str, Any] = dict(CATALOGUE["openai-community/gpt2"])


def write(path: Path, raw: object) -> Path:
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


def test_built_in_names_need_no_network() -> None:
    for name in ("gpt2", "GPT2", "openai-community/gpt2"):
        found = find_model(name)
        assert (found.name, found.origin) == ("openai-community/gpt2", "built-in config")
        assert found.config.num_layers == 12


def test_a_config_file_and_a_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", GPT2)
    assert find_model(str(file)).config == find_model("gpt2").config
    assert find_model(str(tmp_path)).config == find_model("gpt2").config
    assert find_model(str(tmp_path)).name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ("[]", "must hold an object"),
        ({}, "model_type"),
        (GPT2 | {"n_embd": "768"}, "n_embd"),
        (GPT2 | {"rotary_pct": 0.25}, "rotary_pct"),
        ({k: v for k, v in GPT2.items() if k != "n_layer"}, "n_layer"),
        (GPT2 | {"model_type": "gptj"}, "gptj"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(StairsError, match=words) as refused:
        find_model(str(write(tmp_path / "config.json", content)))
    assert "\n" not in str(refused.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(5 * 2**20)
    with pytest.raises(CheckpointError, match="larger"):
        find_model(str(file))


def test_a_ggufs_header_is_enough(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = find_model(str(file))
    assert (found.name, found.config.num_layers) == ("tiny", CONFIG.num_layers)
    assert find_model(str(tmp_path)) == found


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a \.gguf"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "missing.gguf", "x/config.json"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="gpt2") as refused:
        find_model(name)
    assert refused.value.param == "model"


def test_the_hub_is_asked_for_the_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, file: str, *, revision: str | None) -> str:
        asked.append((repo, file, revision))
        return str(write(tmp_path / "config.json", GPT2))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found = find_model("someone/some-gpt2", revision="v1")
    assert asked == [("someone/some-gpt2", "config.json", "v1")]
    assert (found.origin, found.config.num_layers) == ("hub", 12)
    # A revision of a built-in model is another file than the one written out here.
    assert find_model("openai-community/gpt2", revision="v2").origin == "hub"


def test_a_silent_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(StairsError, match="no route") as refused:
        find_model("someone/some-gpt2")
    assert "\n" not in str(refused.value)
