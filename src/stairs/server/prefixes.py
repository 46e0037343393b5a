"""Prefixes by name: rendered, pinned before the server is ready, kept across restarts.

Those of the command line are pinned first and again at every start. Those of the API are written
to ``added.json`` in the prefix folder and come back too, until they are deleted. Their K/V lie
beside it, one file by content, so a restart reads instead of computing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stairs.checkpoints.checkpoint import Checkpoint
from stairs.errors import ConfigError, InvalidRequestError, StairsError
from stairs.server import wire
from stairs.server.bridge import Bridge
from stairs.server.options import ServeOptions
from stairs.text.tokenizer import Tokenizer

__all__ = ["Definition", "Prefix", "PrefixTable", "definitions_of", "folder_for"]

_log = logging.getLogger(__name__)
_MOST = 1000
_UNUSED_DAYS = 30  # K/V files that no start has asked for are removed after this time

Messages = Sequence[Mapping[str, Any]]


class Definition(msgspec.Struct, frozen=True):
    """What a prefix is made of: ``messages`` through the chat template, or ``prompt`` as it is."""

    name: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    salt: str | None = None


@dataclass(slots=True)
class Prefix:
    definition: Definition
    tokens: list[int]
    kept: bool  # comes back after a restart of the server
    file: Path
    pinned: wire.Pinned | None = None


class PrefixTable:
    """What is pinned and what shall be. ``restore`` is the bridge's ``prepare``."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, *, given: Iterable[Definition]) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._bridge: Bridge | None = None
        self._prefixes: dict[str, Prefix] = {}
        for definition in given:
            if definition.name in self._prefixes:
                raise ConfigError(f"prefix {definition.name!r} is given twice", param="prefix")
            self._prefixes[definition.name] = self.prepare(definition)
        self._given = frozenset(self._prefixes)
        for definition in self._read_added():
            if definition.name not in self._prefixes:
                with contextlib.suppress(StairsError):  # of a template that has changed since
                    self._prefixes[definition.name] = self.prepare(definition)

    def attach(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @property
    def all(self) -> list[Prefix]:
        return [prefix for prefix in self._prefixes.values() if prefix.pinned is not None]

    async def restore(self) -> None:
        """Pin every prefix in a new engine; those of the command line must fit."""
        for name, prefix in list(self._prefixes.items()):
            began = time.monotonic()
            try:
                await self._pin(prefix)
            except StairsError as error:
                if name in self._given or error.status >= 500:
                    raise
                _log.warning("prefix %r of an earlier run is not pinned: %s", name, error)
                continue
            assert prefix.pinned is not None
            _log.info(
                "prefix %r: %d of %d tokens pinned, %.1f MB, %s in %.2f s",
                name,
                prefix.pinned.num_pinned_tokens,
                prefix.pinned.num_tokens,
                prefix.pinned.kv_bytes / 1e6,
                "read" if prefix.pinned.source == "file" else "computed",
                time.monotonic() - began,
            )
        self._remove_unused()

    async def add(self, prefix: Prefix) -> Prefix:
        """Pin what ``prepare`` made, and keep it across restarts."""
        definition = prefix.definition
        if definition.name in self._prefixes:
            raise InvalidRequestError(f"prefix {definition.name!r} is already pinned", param="name")
        if len(self._prefixes) >= _MOST:  # equal ones share their blocks: no budget ends them
            raise InvalidRequestError(f"this server keeps at most {_MOST} prefixes", param="name")
        self._prefixes[definition.name] = prefix
        try:
            await self._pin(prefix)
        except BaseException:
            del self._prefixes[definition.name]
            raise
        self._write_added()
        return prefix

    def remove(self, name: str) -> Prefix:
        prefix = self._prefixes.get(name)
        if prefix is None or prefix.pinned is None:
            raise InvalidRequestError(f"no pinned prefix is named {name!r:.80}", param="name")
        if name in self._given:
            raise InvalidRequestError(
                f"prefix {name!r} was given on the command line; it stays as long as the server",
                param="name",
            )
        assert self._bridge is not None
        self._bridge.unpin(name)
        del self._prefixes[name]
        if all(other.file != prefix.file for other in self._prefixes.values()):
            prefix.file.unlink(missing_ok=True)
        self._write_added()
        return prefix

    async def _pin(self, prefix: Prefix) -> None:
        assert self._bridge is not None
        with contextlib.suppress(OSError):
            os.utime(prefix.file)
        definition, prefix.pinned = prefix.definition, None  # of an engine that is gone
        prefix.pinned = await self._bridge.pin(
            definition.name, prefix.tokens, salt=definition.salt, file=str(prefix.file)
        )

    def prepare(self, definition: Definition) -> Prefix:
        """Its tokens, not yet pinned."""
        if definition.prompt is not None:
            tokens = self._tokenizer.encode(definition.prompt)
        else:
            tokens = self._tokenizer.encode_chat_prefix(definition.messages or [])
        content = json.dumps([tokens, definition.salt]).encode()
        name = hashlib.sha256(content).hexdigest()[:32]
        return Prefix(definition, tokens, True, self._folder / f"{name}.safetensors")

    # -- on disk ----------------------------------------------------------------------------

    def _read_added(self) -> list[Definition]:
        try:
            data = (self._folder / "added.json").read_bytes()
            return msgspec.json.decode(data, type=list[Definition])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the prefixes of earlier runs cannot be read: %s", error)
            return []

    def _write_added(self) -> None:
        added = [
            prefix.definition
            for name, prefix in self._prefixes.items()
            if name not in self._given and prefix.pinned is not None
        ]
        beside = self._folder / f"added.{os.getpid()}.part"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(msgspec.json.encode(added))
            beside.replace(self._folder / "added.json")
        except OSError as error:
            _log.warning("prefixes will not survive a restart: %s", error)
            for prefix in self._prefixes.values():
                prefix.kept = prefix.definition.name in self._given

    def _remove_unused(self) -> None:
        wanted = {prefix.file for prefix in self._prefixes.values()}
        oldest = time.time() - _UNUSED_DAYS * 86400
        files = (self._folder.glob(pattern) for pattern in ("*.safetensors", "*.part"))
        for file in itertools.chain.from_iterable(files):  # .part: of a writer that was killed
            with contextlib.suppress(OSError):
                if file not in wanted and file.stat().st_mtime < oldest:
                    file.unlink()


def definitions_of(options: ServeOptions) -> tuple[str | None, list[Definition]]:
    """The service's own system prompt, and every prefix the options name."""
    system = _read("system_prompt", options.system_prompt) if options.system_prompt else None
    found = []
    if system is not None:
        found.append(Definition("system-prompt", messages=[_system(system)]))
    for name, file in (pair.split("=", 1) for pair in options.prefix):
        text = _read("prefix", Path(file))
        found.append(Definition(name, messages=[_system(text)]))
    for name, file in (pair.split("=", 1) for pair in options.prefix_raw):
        found.append(Definition(name, prompt=_read("prefix_raw", Path(file), strip=False)))
    return system, found


def folder_for(options: ServeOptions, checkpoint: Checkpoint, root: Path) -> Path:
    """Where this model's prefixes lie: other weights, template or dtypes, another folder."""
    path = checkpoint.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = [
        str(path.resolve()), stats, options.load_format, options.dtype, options.kv_cache_dtype,
        options.block_size,
    ]  # fmt: skip
    identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return (options.prefix_folder or root / "prefixes") / identity


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _read(option: str, file: Path, *, strip: bool = True) -> str:
    flag = option.replace("_", "-")
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"--{flag}: cannot read {file}: {error.strerror}", param=option) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--{flag}: {file} is not UTF-8 text", param=option) from None
    text = text.strip() if strip else text
    if not text:
        raise ConfigError(f"--{flag}: {file} is empty", param=option)
    return text
