"""A mapping read strictly: each key is taken once with its type and limits, the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from stairs.errors import ConfigError

__all__ = ["Keys"]

T = TypeVar("T")


class _Required:
    """The default of a key that must be there."""


_REQUIRED = _Required()


class Keys:
    """A config's keys. A null counts as absent; every fault is a ``ConfigError`` with the key."""

    def __init__(self, raw: Mapping[str, Any], *, where: str = "") -> None:
        self._raw = {key: value for key, value in raw.items() if value is not None}
        self._taken: set[str] = set()
        self._where = where  # the enclosing key and a dot, for messages

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def take(self, name: str, *, default: Any = _REQUIRED) -> Any:
        """The value as it is; absent without a default is an error that names the key."""
        self._taken.add(name)
        value = self._raw.get(name, default)
        if isinstance(value, _Required):
            raise ConfigError(f"the config has no {self._where}{name}", param=self._where + name)
        return value

    @overload
    def integer(self, name: str, *, low: int = 1, high: int = 2**31) -> int: ...
    @overload
    def integer(self, name: str, *, default: int, low: int = 1, high: int = 2**31) -> int: ...
    @overload
    def integer(
        self, name: str, *, default: None, low: int = 1, high: int = 2**31
    ) -> int | None: ...
    def integer(
        self, name: str, *, default: Any = _REQUIRED, low: int = 1, high: int = 2**31
    ) -> int | None:
        """An integer in [low, high]."""
        value = self.take(name, default=default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}", value)
        return value

    @overload
    def number(self, name: str) -> float: ...
    @overload
    def number(self, name: str, *, default: float) -> float: ...
    @overload
    def number(self, name: str, *, default: None) -> float | None: ...
    def number(self, name: str, *, default: Any = _REQUIRED) -> float | None:
        """A finite number of at least 0."""
        value = self.take(name, default=default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self._wrong(name, "a finite number of at least 0", value)
        return float(value)

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, *, default: str) -> str: ...
    @overload
    def text(self, name: str, *, default: None) -> str | None: ...
    def text(self, name: str, *, default: Any = _REQUIRED) -> str | None:
        value = self.take(name, default=default)
        if value is None and default is None:
            return None
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.take(name, default=default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids: one, a list, or none."""
        value = self.take(name, default=())
        ids = value if isinstance(value, list | tuple) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self._wrong(name, f"token ids below vocab_size {vocab_size}", value)
        return tuple(ids)

    def expect(self, name: str, *allowed: Any, required: bool = False) -> None:
        """The key, if there or ``required``, must have a value the code is written for."""
        value = self.take(name) if required else self.take(name, default=allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self._wrong(name, " or ".join(map(repr, allowed)), value)

    def refuse_rest(self, no_effect: frozenset[str] = frozenset()) -> None:
        """Refuse what nobody took, by name."""
        rest = sorted(self._raw.keys() - self._taken - no_effect)
        if rest:
            raise ConfigError(
                f"{self._where}{rest[0]} is a key that is not understood here "
                f"(its value is {self._raw[rest[0]]!r:.80})",
                param=self._where + rest[0],
            )

    def _wrong(self, name: str, rule: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self._where}{name} must be {rule}, got {value!r:.80}", param=self._where + name
        )
