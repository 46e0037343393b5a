"""What clients may send, in OpenAI's words and vLLM's where those are more.

A field that is not here is refused by name, so that nothing accepted is ignored; those under
"without effect" are accepted because their meaning asks nothing of a server like this one. A null
means "not given". Ranges stand here too, so that /openapi.json tells them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "PrefixRequest",
    "ResponseFormat",
    "SamplingFields",
    "TokenizeRequest",
    "Tool",
    "too_deep",
]

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 128
MAX_TOOLS = 128
MAX_MESSAGES = 10_000
MAX_DEPTH = 100  # of free-form objects: what reads them on, reads them recursively


def too_deep(value: Any) -> bool:
    """Whether lists and objects in ``value`` nest more than ``MAX_DEPTH`` deep."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    if too_deep(value):
        raise ValueError(f"this is nested more than {MAX_DEPTH} deep")
    return value


Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# No dot first: ".." is a step up in a path, not a name.
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
LogprobCount = Annotated[int, Field(ge=0, le=20)]
Object = Annotated[dict[str, Any], AfterValidator(_shallow)]
Label = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class StreamOptions(Body):
    include_usage: bool = False


class SamplingFields(Body):
    model: str | None = Field(None, max_length=512)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Count = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=1024)]
        | None
    ) = None
    ignore_eos: bool = False
    cache_salt: Salt | None = None
    # Without effect.
    user: Label | None = None
    metadata: Annotated[Object, Field(max_length=64)] | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(SamplingFields):
    """``prompt``: a text, token ids, or a list of either."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        ]
    )
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: Name
    arguments: str


class ToolCallMessage(Body):
    id: Annotated[str, Field(max_length=128)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Count | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the assistant")
        return self


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: Annotated[Object, Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema")
        return self


class FunctionTool(Body):
    name: Name
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
TemplateKwargs = Annotated[Object, Field(max_length=64)]


class ChatRequest(SamplingFields):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # without effect where there are no tools
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


class TokenizeRequest(Body):
    """``prompt`` as text, or ``messages`` through the chat template."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class PrefixRequest(Body):
    """``messages`` that conversations begin with, or ``prompt``, the beginning of plain text."""

    name: Name
    messages: Messages | None = None
    prompt: str | None = None
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> PrefixRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
