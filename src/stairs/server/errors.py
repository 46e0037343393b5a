"""Every failure as OpenAI's error object; never more than 200 characters of what a client sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stairs.errors import InvalidRequestError, StairsError
from stairs.server.replies import ErrorBody, ErrorReply

__all__ = ["clip", "error_reply", "invalid_field", "status_reply"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE = 400  # our own words around at most 200 of the client's
_WORD = re.compile(r"[a-z_][a-z0-9_]*", re.IGNORECASE)
_KINDS = frozenset({"str", "int", "float", "bool", "dict", "list", "none"})


def clip(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def error_reply(error: StairsError) -> ErrorReply:
    kind = _kind(error.status)
    return ErrorReply(ErrorBody(clip(str(error), _MAX_MESSAGE), kind, error.param, error.code))


def status_reply(status: int, message: str, code: str | None = None) -> ErrorReply:
    return ErrorReply(ErrorBody(clip(message, _MAX_MESSAGE), _kind(status), None, code))


def _kind(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def invalid_field(errors: Sequence[Any]) -> InvalidRequestError:
    """The one of pydantic's complaints that tells the client most, by the field's path."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError("the body is not valid JSON", param="body")
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return InvalidRequestError(
            "the body must be a JSON object, sent with Content-Type: application/json", param="body"
        )
    field = tuple(first["loc"][:2])
    same = [error for error in errors if tuple(error["loc"][:2]) == field]
    # A union complains for each of its members: what is wrong in the right one counts.
    telling = [error for error in same if not error["type"].endswith(("_type", "_parsing"))]
    best = (telling or same)[0]
    path = clip(_path(best["loc"]), 100) or "body"
    message = best["msg"].removeprefix("Value error, ")
    if best["type"] == "extra_forbidden":
        message = "this field is not supported"
    elif not telling and len(same) > 1:
        message = "this is of the wrong type"
    return InvalidRequestError(f"{path}: {clip(message)}", param=path)


def _path(loc: Sequence[Any]) -> str:
    """messages[0].content from ("body", "messages", 0, "content", "str")."""
    path = ""
    for part in loc[1:] if loc and loc[0] in ("body", "query", "path") else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _WORD.fullmatch(part) and part not in _KINDS:
            path += f".{part}" if path else part
    return path
