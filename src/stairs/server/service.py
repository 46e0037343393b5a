"""What the routes share: names, text to ids and back, sampling defaults, the bridge."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from stairs.checkpoints.configs import GenerationDefaults
from stairs.config import SamplingParams
from stairs.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from stairs.server.bridge import Bridge
from stairs.server.metrics import Metrics
from stairs.server.prefixes import Definition, Prefix, PrefixTable
from stairs.server.schemas import Message, ResponseFormat, SamplingFields
from stairs.server.tools import ToolUse, json_grammar
from stairs.text.tokenizer import Tokenizer

__all__ = ["Service", "message_dict", "new_id"]

T = TypeVar("T")

_LONG_TEXT = 4096  # characters; encoding more than that leaves the event loop
_RESERVED = frozenset({"messages", "tools", "chat_template", "add_generation_prompt"})


class Service:
    """One served model. ``names``: what clients may call it, the first is its own."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        bridge: Bridge,
        prefixes: PrefixTable,
        metrics: Metrics,
        system_prompt: str | None,
        pin_memory_fraction: float,
    ) -> None:
        self.names = tuple(names)
        self.tokenizer = tokenizer
        self.bridge = bridge
        self.prefixes = prefixes
        self.metrics = metrics
        self.created = int(time.time())
        self._defaults = defaults
        self._system_prompt = system_prompt
        self._pin_fraction = pin_memory_fraction
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def check_model(self, name: str | None) -> str:
        if name is None or name in self.names:
            return name or self.names[0]
        raise ModelNotFoundError(
            f"model {name!r:.80} is not served here; use {', '.join(self.names)}", param="model"
        )

    # -- text -------------------------------------------------------------------------------

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each prompt; many short ones together are as long as one."""
        for text in texts:
            if not text:
                raise InvalidRequestError("the prompt is empty", param="prompt")
            self._check_length(len(text), "prompt")

        def encode() -> list[list[int]]:
            return [
                self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]

        return await self._off_loop(encode, sum(map(len, texts)))

    async def decode(self, tokens: list[int]) -> str:
        wrong = next((token for token in tokens if token >= self.tokenizer.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"token id {wrong} is outside the vocabulary of {self.tokenizer.vocab_size}",
                param="tokens",
            )

        def decode() -> str:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        return await self._off_loop(decode, len(tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat; the service's own system prompt stands before one without a system
        message."""
        variables = dict(template_kwargs or {})
        reserved = _RESERVED & variables.keys()
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {min(reserved)}", param="chat_template_kwargs"
            )
        if self._system_prompt and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        length = sum(map(_num_chars, messages))
        self._check_length(length, "messages")
        described = sum(map(_num_chars, tools or ()))
        self._check_length(described, "tools")
        length += described

        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )

        return await self._off_loop(encode, length)

    async def prepare_prefix(self, definition: Definition) -> Prefix:
        text = definition.prompt if definition.prompt is not None else definition.messages
        length = _num_chars(text)
        self._check_length(length, "messages" if definition.prompt is None else "prompt")
        return await self._off_loop(lambda: self.prefixes.prepare(definition), length)

    def _check_length(self, num_chars: int, param: str) -> None:
        """Refuse what no tokenizer could make fit, before it is encoded: a token is at most
        ``longest_token`` bytes, and a character at least one."""
        limit = self.bridge.ready().max_model_len
        longest = self.tokenizer.longest_token
        if num_chars > limit * longest:
            raise ContextLengthError(
                f"{param} has {num_chars} characters, more than {limit} tokens can hold",
                param=param,
            )

    async def _off_loop(self, work: Callable[[], T], length: int) -> T:
        """Long texts are encoded in a thread, so that the streams of others go on."""
        if length < _LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- answers ----------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        return self.bridge.info.kv_bytes_per_token if self.bridge.info else 0

    @property
    def pin_bytes_limit(self) -> int:
        """K/V bytes that prefixes may hold."""
        info = self.bridge.ready()
        blocks = int(info.num_blocks * self._pin_fraction)
        return blocks * info.block_size * info.kv_bytes_per_token

    async def grammar(self, wanted: ResponseFormat | None, tools: ToolUse | None) -> str | None:
        """What the answer must follow, checked; None where anything goes."""
        called = tools.grammar() if tools else None
        if wanted is None or wanted.type == "text":
            grammar, param = called, "tools"
        else:
            if called is not None:
                raise InvalidRequestError(
                    "response_format cannot be kept by an answer that is a tool call",
                    param="response_format",
                )
            schema = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
            grammar, param = json_grammar(schema), "response_format"
        if grammar is not None:
            # Imported on first use: llguidance takes 0.1 s.
            from stairs.engine.grammar import check_grammar

            await self._off_loop(lambda: check_grammar(grammar, param=param), len(grammar))
        return grammar

    # -- sampling ---------------------------------------------------------------------------

    def sampling(self, request: SamplingFields, **more: Any) -> SamplingParams:
        """The request's fields over the model's own defaults; None means not given."""
        given = {
            name: getattr(request, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed",
                "min_tokens", "presence_penalty", "frequency_penalty", "ignore_eos",
                "include_stop_str_in_output", "skip_special_tokens", "stop_token_ids",
            )
        }  # fmt: skip
        defaults = {
            name: getattr(self._defaults, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        stop = request.stop or ()
        chosen = defaults | {name: value for name, value in given.items() if value is not None}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        return SamplingParams(
            **chosen,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logit_bias=bias,
            **more,
        )


def _num_chars(value: Any) -> int:
    """Of all texts in a message or a tool, names of fields included: a template may write any."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(key) + _num_chars(item) for key, item in value.items())
    if isinstance(value, Sequence):
        return sum(map(_num_chars, value))
    return 1


def message_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: developer is system, arguments are objects."""
    plain = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain.setdefault("content", message.refusal)
    return plain


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
