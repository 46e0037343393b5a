"""What a plan is asked: the flags of ``stairs plan``, checked when built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stairs.config import DTYPE_BYTES
from stairs.errors import ConfigError
from stairs.planner.timing import KV_DTYPE_BYTES

__all__ = ["TARGETS", "PlanOptions", "parse_targets"]

TARGETS: Mapping[str, str] = {  # name: the unit it is given in
    "ttft": "a time, as 0.5s or 500ms",
    "tpot": "a time, as 30ms",
    "users": "a count, as 200",
}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|ms)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    gpu: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    users: int | None = None
    system_prompt_tokens: int = 0
    max_num_batched_tokens: int = 512
    prefill_chunk_size: int = 128
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    targets: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "prefill_chunk_size", "block_size"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("max_model_len", "users"):
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "must be at least 1")
        self._require(self.system_prompt_tokens >= 0, "system_prompt_tokens", "must be at least 0")
        self._require(
            self.max_num_batched_tokens % self.prefill_chunk_size == 0,
            "max_num_batched_tokens",
            f"must be a multiple of prefill_chunk_size {self.prefill_chunk_size}",
        )
        self._require(
            self.prefill_chunk_size % self.block_size == 0,
            "prefill_chunk_size",
            f"must be a multiple of block_size {self.block_size}",
        )
        self._require(
            0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "must lie in (0, 1]"
        )
        for name, known in (("dtype", DTYPE_BYTES), ("kv_cache_dtype", KV_DTYPE_BYTES)):
            value = getattr(self, name)
            choices = ", ".join(["auto", *known])
            self._require(value in ("auto", *known), name, f"must be one of {choices}")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name} {rule}, got {getattr(self, name)!r}", param=name)


def parse_targets(texts: Iterable[str]) -> dict[str, float]:
    """``ttft=0.5s``, ``tpot=30ms``, ``users=200`` as seconds and counts."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in TARGETS:
            raise ConfigError(
                f"target {text!r} is not one of {', '.join(f'{t}=...' for t in TARGETS)}",
                param="target",
            )
        time = _TIME.fullmatch(value)
        if name == "users" and value.isdigit() and int(value) > 0:
            found[name] = int(value)
        elif name != "users" and time and float(time[1]) > 0:
            found[name] = float(time[1]) * (1e-3 if time[2] == "ms" else 1)
        else:
            raise ConfigError(
                f"target {name} must be {TARGETS[name]}, got {value!r}", param="target"
            )
    return found
