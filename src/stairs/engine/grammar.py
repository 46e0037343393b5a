"""Answers held to a grammar: which tokens may come next, as a mask over the vocabulary.

A grammar is a text in llguidance's Lark dialect (JSON schemas inside it as ``%json {...}``). Its
end allows the end-of-text tokens and nothing else. Measured against xgrammar in docs/decisions.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from stairs.errors import InvalidRequestError
from stairs.text.tokenizer import Tokenizer

__all__ = ["GrammarState", "Grammars", "check_grammar"]

_MAX_CHARS = 120_000  # compiled between two steps: about a quarter of a second that all wait
_WHERE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


def check_grammar(grammar: str, *, param: str) -> None:
    """Raise InvalidRequestError for what cannot be compiled. Needs no vocabulary."""
    if len(grammar) > _MAX_CHARS:
        raise InvalidRequestError(
            f"{param} has {len(grammar)} characters as a grammar; at most {_MAX_CHARS} are taken",
            param=param,
        )
    message = LLMatcher.validate_grammar(grammar)
    if message:
        lines = _WHERE.sub("", message).splitlines()
        told = [lines[0], *(line for line in lines[1:] if line.startswith("error: "))]
        raise InvalidRequestError(f"{param} cannot be honoured: {' '.join(told):.200}", param=param)


class Grammars:
    """Compiles grammars for one vocabulary of ``vocab_size`` logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise InvalidRequestError(
                "the model has no end-of-text token, which a grammar needs", param="response_format"
            )
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_ids[0])
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(eos_ids)
        )

    def states(self, grammar: str, num: int) -> list[GrammarState]:
        """``num`` independent states at the beginning of ``grammar``."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(
                f"the grammar cannot be compiled: {matcher.get_error():.200}",
                param="response_format",
            )
        return [
            GrammarState(matcher.deep_copy(), self._vocab_size, self._eos_ids) for _ in range(num)
        ]


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def forbidden(self) -> NDArray[np.bool_]:
        """(V,) True where a token may not come next."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        forbidden: NDArray[np.bool_] = bits[: self._vocab_size] == 0
        if forbidden.all():  # the vocabulary has no token for what must come: end here
            forbidden[self._eos_ids] = False
        return forbidden

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [t for t in range(vocab_size) if tokenizer.is_special(t)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
