"""Text from a stream of token ids: whole characters only, stop strings never leaked.

    pushed bytes    [ emitted | held: may start a stop string | pending: half a character ]

The concatenated deltas are the text: there is no second way to decode an answer. A push costs
the token's own bytes plus the lengths of the stop strings, whatever was said before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "TokenDecoder"]


class TokenDecoder(Protocol):
    """What a stream needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextStream:
    """One answer's text.

    A stop string ends the answer at the character that completes it: ``stop_reason`` is then the
    string and ``num_tokens`` the number of tokens to keep, the completing one included. A match
    that is complete before ``min_tokens`` tokens is no match. An answer continues its prompt, so
    a leading space that belongs to its first token is kept.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """The text this token lets go; empty while it is undecided, and after a stop string."""
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._accept(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What was held back. Half a character becomes U+FFFD: its bytes are all there is."""
        if self.stop_reason is not None:
            return ""
        text = self._accept(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _accept(self, new: str) -> str:
        text = self._held + new
        match = self._first_match(text) if new and self.num_tokens >= self._min_tokens else None
        if match is not None:
            start, self.stop_reason = match
            self._held = ""
            return text[: start + len(self.stop_reason) if self._include_stop else start]
        keep = len(text) - self._undecided(text)
        self._held = text[keep:]
        return text[:keep]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that is complete first begins; of two at once the longer.

        Only matches that end in new text count: what was held was searched when it came.
        """
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
