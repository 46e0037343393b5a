"""Rope scaling reduced to one form: a divisor for each frequency, and one factor on cos and sin.

Frequency i of a head is theta^(-2i / head_dim); its wavelength is 2 pi theta^(2i / head_dim).
``linear``, ``llama3`` and ``yarn`` differ only in how they choose the divisors, so a model knows
one formula and a GGUF that stores the divisors themselves (rope_freqs.weight) needs no other.
Scalings that depend on the length of the sequence (dynamic, longrope) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stairs.checkpoints.keys import Keys
from stairs.errors import ConfigError

__all__ = ["Rope", "read_rope"]


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    factors: tuple[float, ...] = ()  # (head_dim / 2,) or empty for 1 everywhere
    attention_factor: float = 1.0


def read_rope(keys: Keys, head_dim: int, *, theta: float | None, context: int) -> Rope:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    name = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    raw = keys.take(name, default={})
    outer_theta = keys.number("rope_theta", default=None)
    outer_share = keys.number("partial_rotary_factor", default=1.0)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} must be an object, got {raw!r:.80}", param=name)
    scaling = Keys(_with_rope_type(raw), where=name + ".")
    theta = scaling.number("rope_theta", default=None) or outer_theta or theta
    if theta is None:
        raise ConfigError("the config has no rope_theta", param="rope_theta")
    if scaling.number("partial_rotary_factor", default=outer_share) != 1.0:
        raise ConfigError("partial_rotary_factor must be 1", param="partial_rotary_factor")
    kind = scaling.text("rope_type", default="default")
    if kind not in _SCALINGS:
        raise ConfigError(
            f"{name}.rope_type {kind!r} is not supported; one of {', '.join(_SCALINGS)}",
            param=name + ".rope_type",
        )
    rope = _SCALINGS[kind](scaling, head_dim, theta, context)
    scaling.refuse_rest()
    return rope


def _with_rope_type(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``type`` is the older name of ``rope_type``; where both are given the newer one counts."""
    kind = raw.get("rope_type", raw.get("type"))
    return {key: value for key, value in raw.items() if key != "type"} | {"rope_type": kind}


def _unscaled(scaling: Keys, head_dim: int, theta: float, context: int) -> Rope:
    return Rope(theta)


def _linear(scaling: Keys, head_dim: int, theta: float, context: int) -> Rope:
    return Rope(theta, (_at_least_one(scaling, "factor"),) * (head_dim // 2))


def _llama3(scaling: Keys, head_dim: int, theta: float, context: int) -> Rope:
    """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated
    (Llama 3.1's release code)."""
    factor = _at_least_one(scaling, "factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    original = scaling.integer("original_max_position_embeddings")
    if not 0 < low < high:
        raise ConfigError(
            f"rope_scaling needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}",
            param="rope_scaling.high_freq_factor",
        )
    divisors = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - keep) / factor + keep))
    return Rope(theta, tuple(divisors))


def _yarn(scaling: Keys, head_dim: int, theta: float, context: int) -> Rope:
    """YaRN (arXiv 2309.00071): a ramp over the frequencies, and a temperature on the scores."""
    original = scaling.integer("original_max_position_embeddings", default=context)
    factor = scaling.number("factor", default=None) or context / original
    fast, slow = scaling.number("beta_fast", default=32.0), scaling.number("beta_slow", default=1.0)
    mscale = scaling.number("mscale", default=0.0)
    mscale_all_dim = scaling.number("mscale_all_dim", default=0.0)
    default_attention = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        default_attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    attention_factor = scaling.number("attention_factor", default=default_attention)
    rounded = scaling.flag("truncate", default=True)
    if theta <= 1 or fast <= 0 or slow <= 0 or factor < 1:
        raise ConfigError(
            "yarn needs rope_theta above 1, positive betas and a factor of at least 1",
            param="rope_scaling",
        )

    def dim_with_turns(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_with_turns(fast), dim_with_turns(slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    divisors = []
    for pair in range(head_dim // 2):
        keep = 1 - min(max((pair - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - keep) / factor + keep))
    return Rope(theta, tuple(divisors), attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _at_least_one(scaling: Keys, name: str) -> float:
    value = scaling.number(name)
    if value < 1:
        raise ConfigError(f"rope_scaling.{name} must be at least 1, got {value}", param=name)
    return value


_SCALINGS: Mapping[str, Callable[[Keys, int, float, int], Rope]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
