"""The routes. Each says what it takes and gives; the work is in chat, completions and prefixes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

import stairs
from stairs.errors import InvalidRequestError, StairsError
from stairs.server import replies
from stairs.server.answers import Answers, ClientGoneError, Prompt
from stairs.server.chat import Chat
from stairs.server.completions import Completions
from stairs.server.errors import error_reply, invalid_field, status_reply
from stairs.server.gate import Gate
from stairs.server.openapi import described, documented
from stairs.server.options import ServeOptions
from stairs.server.prefixes import Definition, Prefix
from stairs.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
)
from stairs.server.service import Service, message_dict
from stairs.server.stream import EventStream, Reply, watched

__all__ = ["make_app"]

PAGE = files("stairs.server") / "page"


def make_app(service: Service, options: ServeOptions) -> FastAPI:
    app = FastAPI(
        title="Stairs",
        version=stairs.__version__,
        description="OpenAI's API over exact attention; prefixes by name; metrics.",
        redoc_url=None,
        docs_url=None,
    )
    _add_errors(app, service)
    _add_generation(app, service)
    _add_text(app, service)
    _add_prefixes(app, service)
    _add_state(app, service)
    _add_pages(app)
    described(app)
    app.add_middleware(
        Gate,
        api_keys=options.api_key,
        max_body_bytes=options.max_body_bytes,
        metrics=service.metrics,
    )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    async def stairs_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, StairsError)
        headers = {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(service.bridge.retry_after())
        return Reply(error_reply(error), status_code=error.status, headers=headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return Reply(error_reply(invalid_field(error.errors())), status_code=400)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # the framework could not even parse the body
            reply = error_reply(InvalidRequestError("the body is not valid JSON", param="body"))
        else:
            reply = status_reply(error.status_code, str(error.detail))
        return Reply(reply, status_code=error.status_code, headers=error.headers)

    async def internal(request: Request, error: Exception) -> Response:
        return Reply(status_reply(500, "internal error", "internal_error"), status_code=500)

    app.add_exception_handler(StairsError, stairs_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, internal)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **documented(replies.ChatCompletion, stream=True))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        chat = Chat(service, body)
        prompts = [await chat.prompt()]
        answers = service.bridge.submit(prompts, arrival=request.state.arrival)
        return await _answer(body.stream, request, answers, chat)

    @app.post("/v1/completions", **documented(replies.Completion, stream=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        call = Completions(service, body)
        prompts: list[Prompt] = await call.prompts()
        answers = service.bridge.submit(prompts, arrival=request.state.arrival)
        return await _answer(body.stream, request, answers, call)


async def _answer(
    stream: bool, request: Request, answers: Answers, call: Chat | Completions
) -> Response:
    if stream:
        # A refusal by the engine is still a plain reply with its status: then no stream begins.
        with answers.closed_on_error():
            await answers.accepted()
        return EventStream(call.chunks(answers), answers)
    try:
        async with watched(request.receive, answers):
            return Reply(await call.reply(answers))
    except ClientGoneError:
        return Response(status_code=499)


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", **documented(replies.Tokens))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Ids of a text, or of a conversation as the chat template writes it."""
        service.check_model(body.model)
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            tokens = await service.encode_chat(
                [message_dict(message) for message in body.messages],
                tools=tools or None,
                add_generation_prompt=body.add_generation_prompt,
                template_kwargs=body.chat_template_kwargs,
            )
        else:
            (tokens,) = await service.encode(
                [body.prompt or ""], add_special_tokens=body.add_special_tokens
            )
        limit = service.bridge.ready().max_model_len
        return Reply(replies.Tokens(len(tokens), limit, tokens))

    @app.post("/detokenize", **documented(replies.Text))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of ids, control tokens included."""
        service.check_model(body.model)
        return Reply(replies.Text(await service.decode(body.tokens)))


def _add_prefixes(app: FastAPI, service: Service) -> None:
    def reply(prefix: Prefix) -> replies.PrefixReply:
        pinned = prefix.pinned
        assert pinned is not None
        return replies.PrefixReply(
            prefix.definition.name,
            pinned.num_tokens,
            pinned.num_pinned_tokens,
            pinned.kv_bytes,
            pinned.source,
            prefix.kept,
        )

    @app.get("/v1/prefixes", **documented(replies.PrefixList))
    async def list_prefixes() -> Response:
        """The pinned prefixes."""
        limit = service.pin_bytes_limit
        return Reply(replies.PrefixList([reply(one) for one in service.prefixes.all], limit))

    @app.post("/v1/prefixes", **documented(replies.PrefixReply))
    async def add_prefix(body: PrefixRequest) -> Response:
        """Compute a prefix now and keep its K/V until it is deleted."""
        messages = [message_dict(message) for message in body.messages or ()] or None
        service.bridge.ready()
        definition = Definition(body.name, messages, body.prompt, body.cache_salt)
        prefix = await service.prepare_prefix(definition)
        return Reply(reply(await service.prefixes.add(prefix)))

    @app.delete("/v1/prefixes/{name}", **documented(replies.PrefixReply))
    async def delete_prefix(name: str) -> Response:
        """Let a prefix go; its K/V stay cached until their place is needed."""
        service.bridge.ready()
        return Reply(reply(service.prefixes.remove(name)))


def _add_state(app: FastAPI, service: Service) -> None:
    def model(name: str) -> replies.ModelReply:
        info = service.bridge.info
        return replies.ModelReply(name, service.created, info.max_model_len if info else None)

    @app.get("/v1/models", **documented(replies.ModelList))
    async def models() -> Response:
        """The names that are served."""
        return Reply(replies.ModelList([model(name) for name in service.names]))

    @app.get("/v1/models/{name:path}", **documented(replies.ModelReply))
    async def one_model(name: str) -> Response:
        """One of them."""
        return Reply(model(service.check_model(name)))

    @app.get("/health", **documented(replies.Health, also=(503,)))
    async def health() -> Response:
        """200 when requests are answered, else 503 and why not."""
        bridge = service.bridge
        status = 200 if bridge.state == "ready" else 503
        return Reply(replies.Health(bridge.state, bridge.reason), status_code=status)

    @app.get("/version", **documented(replies.Version))
    async def version() -> Response:
        """Of Stairs."""
        return Reply(replies.Version(stairs.__version__))

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def _add_pages(app: FastAPI) -> None:
    pages = {
        "/": "index.html", "/docs": "docs.html", "/page.css": "page.css", "/page.js": "page.js",
        "/docs.js": "docs.js", "/favicon.svg": "favicon.svg",
    }  # fmt: skip
    for path, name in pages.items():
        app.get(path, include_in_schema=False)(_page(name))


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        headers = {"Cache-Control": "no-cache", "Content-Security-Policy": "default-src 'self'"}
        return FileResponse(str(PAGE / name), headers=headers)

    return page
