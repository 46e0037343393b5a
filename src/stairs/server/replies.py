"""What the server answers: structs that are encoded as they stand and described in OpenAPI.

A field that is UNSET is left out; one that is None is written as null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stairs.outputs import RequestOutput

__all__ = [
    "Account",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "ErrorReply",
    "Health",
    "ModelList",
    "ModelReply",
    "PrefixList",
    "PrefixReply",
    "Text",
    "TokenLogprob",
    "Tokens",
    "ToolCall",
    "ToolFunction",
    "Usage",
    "Version",
    "components",
    "encode",
]

FinishReason = Literal["stop", "length", "tool_calls"]
encode = msgspec.json.Encoder().encode


class PromptDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, outputs: list[RequestOutput]) -> Usage:
        """A prompt counts once however many answers it got."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        answers = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return cls(prompt, answers, prompt + answers, PromptDetails(cached))


class Account(Struct):
    """What the request cost, by records: seconds, K/V bytes, query-key pairs."""

    time_to_first_token: float | None
    tokens_per_second: float | None
    kv_bytes_stored: int
    kv_bytes_cached: int
    kv_bytes_written: int
    kv_bytes_read: int
    score_pairs: int

    @classmethod
    def of(cls, outputs: list[RequestOutput], kv_bytes_per_token: int) -> Account:
        parts = [phase for o in outputs for phase in (o.metrics.prefill, o.metrics.decode)]
        written = sum(part.kv_bytes_written for part in parts)
        cached = sum(output.num_cached_tokens for output in outputs) * kv_bytes_per_token
        first = [o.metrics.time_to_first_token for o in outputs]
        gaps = [o.metrics.time_per_output_token for o in outputs]
        rates = [1 / gap for gap in gaps if gap]
        return cls(
            min((time for time in first if time is not None), default=None),
            sum(rates) if rates else None,
            written + cached,
            cached,
            written,
            sum(part.kv_bytes_read for part in parts),
            sum(part.pairs for part in parts),
        )


# -- chat ---------------------------------------------------------------------------------------


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ToolFunction(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: ToolFunction
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    stairs: Account
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET


class ChatChunk(Struct):
    """``usage`` is null in all chunks but the last where it was asked for, else absent."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    stairs: Account | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# -- completions --------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET


class Completion(Struct):
    """The whole answer, and also each chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    stairs: Account | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


# -- the rest -----------------------------------------------------------------------------------


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorBody


class ModelReply(Struct):
    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "stairs"


class ModelList(Struct):
    data: list[ModelReply]
    object: Literal["list"] = "list"


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Struct):
    prompt: str


class Version(Struct):
    version: str


class Health(Struct):
    status: Literal["loading", "ready", "restarting", "stopped"]
    reason: str | None = None


class PrefixReply(Struct):
    """``source``: where its K/V came from this time; ``kept``: it comes back after a restart."""

    name: str
    num_tokens: int
    num_pinned_tokens: int
    kv_bytes: int
    source: Literal["computed", "file"]
    kept: bool
    object: Literal["prefix"] = "prefix"


class PrefixList(Struct):
    data: list[PrefixReply]
    kv_bytes_limit: int
    object: Literal["list"] = "list"


def components(*types: type) -> dict[str, Any]:
    """JSON schemas of ``types`` and what they hold, by name, for OpenAPI's components."""
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return schemas
