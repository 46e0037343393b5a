"""Every option of ``stairs serve``, once: flag, STAIRS_… variable and key of --config FILE.

A flag beats the environment, the environment beats the file, the file beats the default. In the
environment a list is separated by commas; the file is TOML, keys with ``-`` or ``_``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from stairs.config import AttentionBackend, CacheConfig, DeviceName, EngineConfig
from stairs.errors import ConfigError

__all__ = ["ServeOptions", "load_options"]

_MOST = 10**6  # of answers that wait, and of seconds: no clock overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    model: Annotated[str, "An alias (smollm2), a .gguf file, a folder or a hub id."] = "smollm2"
    host: Annotated[str, "Address to listen on; 0.0.0.0 for every one."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0: a free one."] = 8000
    api_key: Annotated[tuple[str, ...], "Key that clients must send; repeatable."] = ()
    allowed_origins: Annotated[tuple[str, ...], "Origins browsers may call from; repeatable."] = ()
    served_model_name: Annotated[tuple[str, ...], "Names to answer to; repeatable."] = ()
    chat_template: Annotated[Path | None, "A Jinja file in place of the model's template."] = None
    system_prompt: Annotated[
        Path | None, "A file: put before chats that bring no system message, and pinned."
    ] = None
    prefix: Annotated[tuple[str, ...], "NAME=FILE: a system message to pin; repeatable."] = ()
    prefix_raw: Annotated[tuple[str, ...], "NAME=FILE: plain text to pin; repeatable."] = ()
    prefix_folder: Annotated[Path | None, "Where prefixes are kept across restarts."] = None
    pin_memory_fraction: Annotated[float, "Share of the K/V pool that prefixes may hold."] = 0.25
    max_queue: Annotated[int, "Answers that may wait; one more gets status 429."] = 256
    max_body_bytes: Annotated[int, "Larger requests get status 413, unread."] = 4 * 2**20
    drain_timeout: Annotated[float, "Seconds that running answers get at shutdown."] = 30.0
    watchdog_timeout: Annotated[
        float, "Seconds a step may take before the engine is started anew; 0: any number."
    ] = 300.0
    revision: Annotated[str | None, "Branch, tag or commit of a hub model."] = None
    load_format: Annotated[str, "auto, gguf, safetensors or dummy."] = "auto"
    dtype: Annotated[str, "auto, float32, bfloat16, float16 or float64."] = "auto"
    kv_cache_dtype: Annotated[str, "As --dtype, for K and V."] = "auto"
    max_model_len: Annotated[int | None, "Context in tokens; default: the model's."] = None
    max_num_seqs: Annotated[int, "Answers computed at once."] = 64
    max_num_batched_tokens: Annotated[int, "Prompt tokens a step."] = 512
    prefill_chunk_size: Annotated[int, "Prompt tokens of a chunk."] = 128
    block_size: Annotated[int, "Tokens of a K/V block."] = 16
    kv_cache_memory_bytes: Annotated[int | None, "Size of the K/V pool."] = None
    num_gpu_blocks_override: Annotated[int | None, "Blocks of the K/V pool."] = None
    enable_prefix_caching: Annotated[bool, "Share the K/V of equal beginnings."] = True
    attention_backend: Annotated[str, "auto, reference, online, cpu, triton or hopper."] = "auto"
    device: Annotated[str, "auto (a supported GPU if there is one), cpu or cuda."] = "auto"
    gpu_memory_utilization: Annotated[float, "Share of a GPU's memory that we may use."] = 0.9
    batch_invariant: Annotated[bool, "The same bits in any batch; float32 on a CPU."] = False
    seed: Annotated[int | None, "Of requests without their own; default: random."] = None
    log_level: Annotated[str, "debug, info, warning or error."] = "info"
    log_format: Annotated[str, "text or json."] = "text"

    def __post_init__(self) -> None:
        self._require(0 <= self.port < 65536, "port", "must lie in [0, 65535]")
        for name in ("max_queue", "drain_timeout", "watchdog_timeout"):
            within = 0 <= getattr(self, name) <= _MOST
            self._require(within, name, f"must lie in [0, {_MOST}]")
        self._require(self.max_body_bytes >= 1, "max_body_bytes", "must be at least 1")
        levels = ("debug", "info", "warning", "error")
        self._require(self.log_level in levels, "log_level", f"is one of {', '.join(levels)}")
        self._require(self.log_format in ("text", "json"), "log_format", "is text or json")
        for name, kind in (("attention_backend", AttentionBackend), ("device", DeviceName)):
            rule = f"is one of {', '.join(get_args(kind))}"
            self._require(getattr(self, name) in get_args(kind), name, rule)
        self._require(all(self.api_key), "api_key", "must not be empty")
        for name in ("prefix", "prefix_raw"):
            whole = all(all(part.partition("=")[::2]) for part in getattr(self, name))
            self._require(whole, name, "must be NAME=FILE")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"--{_dashed(name)} {rule}, got {getattr(self, name)!r}", param=name)

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_size=self.prefill_chunk_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            dtype=self.dtype,
            batch_invariant=self.batch_invariant,
            attention_backend=cast(AttentionBackend, self.attention_backend),
            device=cast(DeviceName, self.device),
            gpu_memory_utilization=self.gpu_memory_utilization,
            seed=self.seed,
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_gpu_blocks_override,
                memory_bytes=self.kv_cache_memory_bytes,
                dtype=self.kv_cache_dtype,
                enable_prefix_caching=self.enable_prefix_caching,
                pin_memory_fraction=self.pin_memory_fraction,
            ),
        )


def load_options(
    flags: Mapping[str, Any], environment: Mapping[str, str], *, file: Path | None = None
) -> ServeOptions:
    """Options from what was given: ``flags`` holds those flags that are not None.

    Raises ConfigError that names the flag, the variable or the key at fault.
    """
    kinds = _kinds()
    values = _from_file(file, kinds) if file else {}
    for name, kind in kinds.items():
        variable = f"STAIRS_{name.upper()}"
        if variable in environment:
            values[name] = _parse(name, kind, environment[variable], variable)
    values |= flags
    return ServeOptions(**values)


def _from_file(file: Path, kinds: Mapping[str, str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {file}: {reason}", param="config") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{file}: unknown key {key!r:.80}", param="config")
        values[name] = _convert(name, kinds[name], value, f"{file}: {key}")
    return values


def _kinds() -> dict[str, str]:
    """By option: str, int, float, bool, Path or tuple."""
    hints = get_type_hints(ServeOptions)
    unions = {
        name: get_args(hint)[0] if type(None) in get_args(hint) else hint
        for name, hint in hints.items()
    }
    return {name: (get_origin(kind) or kind).__name__ for name, kind in unions.items()}


def _parse(name: str, kind: str, text: str, source: str) -> Any:
    """A value from a variable's text."""
    if kind == "tuple":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind == "bool":
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ConfigError(f"{source} must be true or false, got {text!r:.80}", param=name)
        return words[text.lower()]
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            raise ConfigError(f"{source} must be a number, got {text!r:.80}", param=name) from None
    return Path(text) if kind == "Path" else text


def _convert(name: str, kind: str, value: Any, source: str) -> Any:
    """A value from a TOML value."""
    if kind == "tuple":
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
    elif kind == "Path" and isinstance(value, str):
        return Path(value)
    elif kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value).__name__ == kind:
        return value
    raise ConfigError(f"{source} must be a {kind}, got {value!r:.80}", param=name)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
