"""The Hugging Face hub behind two functions; the library's cache, token and offline mode apply.

A config is fetched and read before any weights are, so a model that cannot run costs a few
kilobytes. Only files that are read are fetched: no pickles, no code, no second copies of weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from stairs.checkpoints.configs import read_config
from stairs.errors import ModelNotFoundError
from stairs.text.json_file import read_object

__all__ = ["fetch", "fetch_file"]

_INDEX = "model.safetensors.index.json"
_DESCRIPTION = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", _INDEX,
]  # fmt: skip
_PART = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


def fetch(
    repo: str, *, file: str | None, revision: str | None, wanted: Literal["all", "config"]
) -> Path:
    """The local folder of a repository, or one of its GGUFs where ``file`` says which."""
    folder = _snapshot(repo, revision, _DESCRIPTION)
    if file is not None or not (folder / "config.json").is_file():
        return _gguf(repo, file, revision, folder)
    read_config(read_object(folder / "config.json"))
    if wanted == "config":
        return folder
    if not _has_weights(folder):
        index = folder / _INDEX
        weights = ["model-*-of-*.safetensors"] if index.is_file() else ["model.safetensors"]
        folder = _snapshot(repo, revision, weights)
    return folder


def _has_weights(folder: Path) -> bool:
    """Whether the library's cache already holds them for this very commit."""
    if not (folder / _INDEX).is_file():
        return (folder / "model.safetensors").is_file()
    shards = list(folder.glob("model-*-of-*.safetensors"))
    return bool(shards) and shards[0].stem.endswith(f"-of-{len(shards):05d}")


def fetch_file(repo: str, file: str, *, revision: str | None = None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the library and its HTTP client raise many kinds
        raise _not_fetched(repo, error) from None


def _gguf(repo: str, wanted: str | None, revision: str | None, snapshot: Path) -> Path:
    """The one GGUF whose name holds ``wanted``, with its other parts where it is split."""
    names = [name for name in _list_files(repo, revision, snapshot) if name.endswith(".gguf")]
    chosen = [name for name in names if wanted is None or wanted.lower() in name.lower()]
    firsts = [n for n in chosen if not _PART.fullmatch(n) or "-00001-of-" in n]
    if len(firsts) != 1:
        shown = ", ".join(firsts[:6] or names[:6]) or "none"
        raise ModelNotFoundError(
            f"{repo} has not one GGUF{f' that fits {wanted!r}' if wanted else ''} "
            f"(it has {shown}); write {repo}:FILE",
            param="model",
        )
    stem = firsts[0].replace("-00001-of-", "-*-of-")
    return _snapshot(repo, revision, [stem]) / firsts[0]


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    bar = _no_bar() if patterns is _DESCRIPTION else None  # kilobytes need none
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(patterns), tqdm_class=bar
            )
        )
    except Exception as error:  # the library and its HTTP client raise many kinds
        raise _not_fetched(repo, error) from None


def _no_bar() -> type:
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]

    class NoBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    return NoBar


def _list_files(repo: str, revision: str | None, snapshot: Path) -> list[str]:
    """The repository's files; where the hub cannot be asked, those of them that are here."""
    from huggingface_hub import HfApi

    try:
        return sorted(HfApi().list_repo_files(repo, revision=revision))
    except Exception as error:  # as above
        here = sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf"))
        if here:
            return here
        raise _not_fetched(repo, error) from None


def _not_fetched(repo: str, error: Exception) -> ModelNotFoundError:
    """One line for each way to fail, with what to do."""
    advice = {
        "GatedRepoError": "ask for access on its page, then set HF_TOKEN",
        "RepositoryNotFoundError": "no such repository, or a private one: check name and HF_TOKEN",
        "RevisionNotFoundError": "no such revision",
        "EntryNotFoundError": "no such file in it",
        "RemoteEntryNotFoundError": "no such file in it",
        "LocalEntryNotFoundError": "not in the cache, and the hub cannot be reached",
        "OfflineModeIsEnabled": "not in the cache, and HF_HUB_OFFLINE is set",
    }
    name = type(error).__name__
    reason = advice.get(name) or f"{name}: {str(error).strip().splitlines()[:1]}"
    return ModelNotFoundError(f"{repo} on the hub: {reason:.300}", param="model")
