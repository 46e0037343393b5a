"""Text to token ids and back, over the ``tokenizers`` library; built from a folder or a GGUF.

Ids are transformers' own. Three rules stand here and nowhere else: a prompt starts with at most
one BOS; what a user types in a chat never becomes a control token; a token is bytes, and text is
what the bytes of all tokens decode to.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from stairs.errors import CheckpointError, InvalidRequestError
from stairs.text.chat import ChatTemplate, plain_data, plain_messages
from stairs.text.json_file import read_object
from stairs.text.vocabulary import backend_from_gguf

__all__ = ["Tokenizer"]

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MAX_CONFIG = 4 * 2**20  # bytes; some list every added token
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """``vocab_size`` counts added tokens; ``bos_token_id`` is None where prompts get none."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        add_bos: bool,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._named_tokens = dict(named_tokens)  # bos_token: "<s>", ... as templates see them
        self._special = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_ids = frozenset(self._special.values())
        self._added = {
            token_id: token.content.encode()
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        kinds = _decoder_kinds(backend)
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise CheckpointError(
                f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither "
                "byte-level nor SentencePiece's"
            )
        self._bytes_of = _bytes_of_byte_level if "ByteLevel" in kinds else _bytes_of_piece
        self._prefix = b" " if kinds & {"Strip", "Metaspace"} else b""
        self.vocab_size: int = backend.get_vocab_size()
        bos = backend.token_to_id(self._named_tokens["bos_token"]) if add_bos else None
        self.bos_token_id: int | None = bos
        self._chat_template = ChatTemplate(chat_template) if chat_template else None
        self._guard: _Guard | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json, and tokenizer_config.json and chat_template.jinja where there."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder.name} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # the library raises plain Exception
            reason = str(error).splitlines()[:1]
            raise CheckpointError(f"tokenizer.json cannot be read: {reason}") from None
        backend.no_padding()
        backend.no_truncation()
        config_file = folder / "tokenizer_config.json"
        config = read_object(config_file, max_bytes=_MAX_CONFIG) if config_file.is_file() else {}
        named = {name: _content(config.get(name)) for name in _TOKEN_NAMES}
        named_tokens = {name: token for name, token in named.items() if token is not None}
        bos = backend.token_to_id(named_tokens.get("bos_token", ""))
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos is not None and bos in backend.encode("").ids
        template = folder / "chat_template.jinja"
        return cls(
            backend,
            named_tokens=named_tokens,
            add_bos=bool(adds_bos) and bos is not None,
            chat_template=(
                template.read_text("utf-8")
                if template.is_file()
                else _default_template(config.get("chat_template"))
            ),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the ``tokenizer`` keys of a GGUF's metadata."""
        backend = backend_from_gguf(metadata)
        names = {"unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
        named = {}
        for name in _TOKEN_NAMES:
            word = names.get(name, name.removesuffix("_token"))
            token_id = metadata.get(f"tokenizer.ggml.{word}_token_id")
            token = backend.id_to_token(token_id) if isinstance(token_id, int) else None
            if token is not None:
                named[name] = token
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
        if adds_bos is None:  # llama.cpp's own defaults
            adds_bos = metadata.get("tokenizer.ggml.model") == "llama" or (
                metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3", "tekken")
            )
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            named_tokens=named,
            add_bos=bool(adds_bos) and "bos_token" in named,
            chat_template=template if isinstance(template, str) else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt. Control tokens written in ``text`` are control tokens: the caller owns
        the whole prompt. With ``add_special_tokens`` it starts with one BOS where the model has
        one, also where ``text`` already begins with it."""
        ids = self._ids(self._backend, text)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation, with one BOS where the model has one.

        A control token spelled in a message (``<|im_end|>``) is encoded as the text it is.
        """
        guard = self._guard = self._guard or _Guard(self._special, self._backend)
        text = self._render(
            messages, guard.hide, add_generation_prompt, tools, chat_template, variables
        )
        if guard.hid_nothing(text):
            return self.encode(text)
        ids = guard.restore(self._ids(guard.backend, guard.mark(text)))
        bos = self.bos_token_id
        return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids

    def encode_chat_prefix(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """The ids that all conversations beginning with ``messages`` have in common."""
        start = list(messages)
        a, b = (
            self.encode_chat([*start, {"role": "user", "content": text}]) for text in ("0", "A")
        )
        num = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
        return a[:num]

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the text of a prompt, to be shown; ``encode_chat`` gives its ids."""
        return self._render(messages, str, add_generation_prompt, tools, chat_template, variables)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._chat_template.source if self._chat_template else None

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another template; ConfigError where that is no Jinja."""
        other = copy.copy(self)
        other._chat_template = ChatTemplate(source)
        return other

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` as a whole: without the space SentencePiece puts before a text, and with
        U+FFFD for bytes that are no UTF-8."""
        data = b"".join(
            self.token_bytes(token_id)
            for token_id in ids
            if not (skip_special_tokens and token_id in self._special_ids)
        )
        return data.removeprefix(self._prefix).decode("utf-8", "replace")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a prompt of n tokens has at most n times as many."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the output; nothing for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return list(backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                "the text is not valid Unicode: it holds half of a surrogate pair", param="prompt"
            ) from None
        except Exception as error:  # the library raises plain Exception
            reason = str(error).splitlines()[:1]
            raise CheckpointError(f"the tokenizer cannot encode a text: {reason}") from None

    def _render(
        self,
        messages: Iterable[Mapping[str, Any]],
        change: Callable[[str], str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        template = ChatTemplate(chat_template) if chat_template else self._chat_template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; pass one with chat_template, or send a prompt",
                param="messages",
            )
        return template.render(
            plain_messages(messages, change),
            tools=plain_data(tools, change, "tools"),
            add_generation_prompt=add_generation_prompt,
            **self._named_tokens | plain_data(variables, change, "chat_template_kwargs"),
        )


class _Guard:
    """Keeps control tokens that a user typed apart from those that the template wrote.

    ``hide`` replaces them in the messages by random words before rendering. Where a rendered text
    holds such words, ``mark`` turns the template's control tokens into other random words, which
    ``backend`` knows as added tokens, and the hidden ones back into what was typed; ``backend``
    itself takes control tokens for text. Both sets of words are new for each process.
    """

    def __init__(self, special: Mapping[str, int], backend: tokenizers.Tokenizer) -> None:
        self._special = dict(special)
        self._source = backend
        self._copy: tokenizers.Tokenizer | None = None
        nonce = secrets.token_hex(12)
        self._hidden = {token: f"h{nonce}x{index}h" for index, token in enumerate(special)}
        self._marks = {token: f"m{nonce}x{index}m" for index, token in enumerate(special)}
        self._any = _any_of(special)
        self._any_hidden = _any_of(self._hidden.values())
        self._typed = {word: token for token, word in self._hidden.items()}

    def hide(self, text: str) -> str:
        return self._any.sub(lambda found: self._hidden[found[0]], text)

    def hid_nothing(self, text: str) -> bool:
        return not self._any_hidden.search(text)

    def mark(self, text: str) -> str:
        marked = self._any.sub(lambda found: self._marks[found[0]], text)
        return self._any_hidden.sub(lambda found: self._typed[found[0]], marked)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        if self._copy is None:
            copy = tokenizers.Tokenizer.from_str(self._source.to_str())
            copy.encode_special_tokens = True
            copy.add_tokens([AddedToken(mark, normalized=False) for mark in self._marks.values()])
            self._restored = {
                copy.token_to_id(mark): self._special[token] for token, mark in self._marks.items()
            }
            self._copy = copy
        return self._copy

    def restore(self, ids: Iterable[int]) -> list[int]:
        return [self._restored.get(token_id, token_id) for token_id in ids]


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """The longest of ``words`` at the leftmost place; nothing at all where there are none."""
    ordered = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """The types of the decoder and of its parts."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    return {part["type"] for part in (state, *state.get("decoders", ())) if "type" in part}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    spelled = {chr(byte): byte for byte in own}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:  # not spelled in the alphabet: the text itself, as the library decodes it
        return token.encode()


def _bytes_of_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _content(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _default_template(value: object) -> str | None:
    """One template, or a list of named ones of which the default counts."""
    if isinstance(value, list):
        named = [one for one in value if isinstance(one, Mapping) and one.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else None
