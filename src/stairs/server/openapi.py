"""How routes are described in /openapi.json: replies by their structs, errors by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from stairs.server import replies

__all__ = ["described", "documented"]

_ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such model or page.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "A fault of the server's.",
    503: "The engine is loading, restarting or stopped.",
}


def documented(reply: type, *, stream: bool = False, also: Sequence[int] = ()) -> dict[str, Any]:
    """Keyword arguments for a route that answers with ``reply``, as events too if ``stream``;
    for the statuses ``also`` it answers with it as well."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(reply)}}
    responses: dict[int, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": _ref(kind)}}}
        for status, text in _ERRORS.items()
        for kind in (reply if status in also else replies.ErrorReply,)
    }
    if stream:
        content = content | {"text/event-stream": {"schema": {"type": "string"}}}
    responses[200] = {"description": "Done.", "content": content}
    return {"responses": responses, "response_class": Response}


def described(app: FastAPI) -> None:
    """Let ``app`` describe itself with our structs among its components."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            kinds = [getattr(replies, name) for name in replies.__all__ if name[0].isupper()]
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components |= replies.components(*kinds)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # ours is 400
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
