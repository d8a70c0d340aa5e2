"""The application: the routes of each protocol, the operators' routes and the page; and how uvicorn runs it."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import metadata, resources
from typing import Any

import uvicorn
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette import types
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..backends import on_lost
from ..engine import Request as EngineRequest
from ..engine import TokenFilter
from ..errors import TaperError, printable
from .completions import CompletionResponse
from .engine_loop import EngineLoop
from .limits import Gate, Limits, start_again
from .metrics import Metrics
from .protocols import messages, openai, responses
from .protocols.bodies import MAX_PARAM_CHARACTERS, read_body
from .protocols.errors import (
    ApiError,
    ErrorReply,
    MessagesErrorReply,
    errors_at,
    fields_named,
    queue_full,
    to_api_error,
)
from .protocols.events import Events
from .protocols.openai_events import ChatEvents, InfillEvents, TextEvents
from .reference import reference_page
from .served import ServedModel

log = logging.getLogger("taper.server")
MAX_CONNECTIONS = 1 << 14
RESTART_SECONDS = 60  # a server whose device is lost starts again only if it has served for so long
REPLY_SECONDS = 1  # for the replies to all who wait then; some do not read theirs
MAX_WAITING_SCHEMAS = 8  # each may take two seconds, and SIGTERM waits for them
SMALL_BODY = 1 << 16  # bytes; checked in milliseconds
# These need no key, like the page's files: they hold no secrets and show no data.
_PUBLIC_PATHS = ("/health", "/v1/health", "/ready")
_CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_EVENT_SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
_FilterFactory = Callable[[], TokenFilter]
# The page may load its own files and talk to its own server, and nothing else.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def serve(served: ServedModel, limits: Limits, listener: socket.socket) -> None:
    """Serve a model on a socket until SIGTERM or Ctrl-C; requests accepted before are still completed.

    If its device is lost, they end with an error, and the process starts again; not on Windows, which cannot do that.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    if sys.platform != "win32":  # there, connections are not files
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # each connection is a file
            wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    # A body may hold a million lists; by default, reading them takes five times as long.
    gc.set_threshold(50_000, 20, 100)
    engine_loop = EngineLoop(served.llm, Metrics(served.llm.engine), limits.max_waiting)
    if sys.platform != "win32":
        on_lost.append(partial(_on_lost, engine_loop, listener))
    uvicorn.Server(uvicorn_config(served, limits, engine_loop)).run(sockets=[listener])


def _on_lost(engine_loop: EngineLoop, listener: socket.socket) -> None:
    """Answer all requests, and start this process again, if it has served for a while before its device was lost.

    It runs in a thread that cannot go on, such as the engine's.
    """
    if time.monotonic() - engine_loop.ready_at < RESTART_SECONDS:
        return
    log.warning("the server starts again")
    engine_loop.lose_device()
    time.sleep(REPLY_SECONDS)
    start_again(listener)


def uvicorn_config(served: ServedModel, limits: Limits, engine_loop: EngineLoop) -> uvicorn.Config:
    """How uvicorn runs the server."""
    return uvicorn.Config(
        create_app(served, limits, engine_loop),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.max_seconds) + 1,
        timeout_keep_alive=limits.keep_alive_seconds,
        h11_max_incomplete_event_size=1 << 16,
    )


def create_app(served: ServedModel, limits: Limits, engine_loop: EngineLoop) -> types.ASGIApp:
    """The server of a model, as an ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine_loop.start()
        yield
        await run_sync(engine_loop.stop)

    app = FastAPI(
        title="Taper",
        version=metadata.version("taper-llm"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = _Route
    app.state.one_large_body = CapacityLimiter(1)  # at a time: checking it takes a fraction of a second and 200 MB
    for kind in (HTTPException, RequestValidationError, TaperError, Exception):
        app.add_exception_handler(kind, _error_response)
    _add_model_routes(app, served, limits, engine_loop)
    _add_operator_routes(app, served, engine_loop)
    reference = Response(reference_page(app.openapi()), headers=_PAGE_HEADERS, media_type="text/html")
    page = [*_page_routes(), Route("/docs", reference, methods=["GET"])]
    app.router.routes += page
    gate: types.ASGIApp = Gate(app, limits, [*_PUBLIC_PATHS, *(route.path for route in page)])
    if limits.cors_origins:
        gate = CORSMiddleware(gate, limits.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    paths = [getattr(route, "path", "") for route in app.routes]
    return _RequestLog(gate, engine_loop.metrics, paths, limits.root_path)


def _add_model_routes(app: FastAPI, served: ServedModel, limits: Limits, engine_loop: EngineLoop) -> None:
    errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}}
    messages_errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": MessagesErrorReply}}
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT_SCHEMA}}}}
    one_schema = CapacityLimiter(1)  # at a time; requests without a schema do not wait for it

    def complete(
        body: openai.CompletionFields, events: Events, prepare: Callable[[], Awaitable[list[EngineRequest]]]
    ) -> CompletionResponse:
        if limits.log_prompts:
            log.info("request: %s", body.model_dump_json(exclude_unset=True))
        engine_loop.check_room(1)  # before the prompt is encoded
        return CompletionResponse(engine_loop, body, events, prepare, limits.max_seconds)

    async def compiled(compile_: Callable[[], _FilterFactory], param: str) -> _FilterFactory:
        if one_schema.statistics().tasks_waiting >= MAX_WAITING_SCHEMAS:
            raise queue_full()
        with errors_at(param):
            return await run_sync(compile_, limiter=one_schema)

    def complete_chat(body: openai.ChatRequest, events: Events, names: Mapping[str, str]) -> CompletionResponse:
        """Complete a chat; `names` are those of its fields in the request's protocol, where they differ."""

        async def prepare() -> list[EngineRequest]:
            token_filter: _FilterFactory | None = None
            compile_: Callable[[], _FilterFactory]
            with fields_named(names):
                if body.json_schema is not None:
                    compile_ = partial(served.llm.grammars.compile, body.json_schema, bool(body.continue_final_message))
                    token_filter = await compiled(compile_, "response_format.json_schema.schema")
                elif body.usable_tools:
                    how = body.allows_one_call, body.requires_call
                    compile_ = partial(served.llm.grammars.compile_calls, body.callable_tools, *how)
                    # Calls that nobody requires are read without a grammar too.
                    with suppress(*() if body.requires_call or body.has_strict_tools else (TaperError, ApiError)):
                        token_filter = await compiled(compile_, "tools")
                return await run_sync(served.chat, body, token_filter)

        return complete(body, events, prepare)

    @app.post("/v1/chat/completions", response_model=openai.ChatCompletion, responses=errors | stream)
    async def chat_completions(body: openai.ChatRequest) -> Response:
        """Complete a conversation."""
        goes_on, tools = bool(body.continue_final_message), list(body.callable_tools)
        events = ChatEvents(served.name, served.llm.tokenizer, body.num_choices, goes_on, tools)
        return complete_chat(body, events, {})

    @app.post("/v1/responses", response_model=responses.ResponseReply, responses=errors | stream)
    async def create_response(body: responses.ResponsesRequest) -> Response:
        """Complete a conversation, as OpenAI's Responses do; nothing is kept."""
        events = responses.ResponseEvents(served.name, served.llm.tokenizer, body)
        return complete_chat(body.chat, events, body.chat_names)

    @app.post("/v1/responses/input_tokens", responses=errors)
    async def input_tokens(body: responses.InputTokensRequest) -> responses.InputTokens:
        """How many tokens the prompt of a response has."""
        with fields_named(body.chat_names):
            count = await run_sync(served.count, body.chat)
        return responses.InputTokens(object="response.input_tokens", input_tokens=count)

    @app.post("/v1/messages", response_model=messages.MessageReply, responses=messages_errors | stream)
    async def create_message(body: messages.MessagesRequest) -> Response:
        """Complete a conversation, as Anthropic's API does."""
        events = messages.MessageEvents(served.name, served.llm.tokenizer, body)
        return complete_chat(body.chat, events, body.chat_names)

    @app.post("/v1/messages/count_tokens", responses=messages_errors)
    async def count_tokens(body: messages.CountTokensRequest) -> dict[str, int]:
        """How many tokens the prompt of a message has."""
        with fields_named(body.chat_names):
            return {"input_tokens": await run_sync(served.count, body.chat)}

    @app.post("/v1/completions", response_model=openai.TextCompletion, responses=errors | stream)
    async def completions(body: openai.CompletionRequest) -> Response:
        """Complete texts."""
        events = TextEvents(served.name, served.llm.tokenizer, body)
        return complete(body, events, partial(run_sync, served.complete, body))

    @app.post("/infill", response_model=openai.Infill, responses=errors | stream)
    async def infill(body: openai.InfillRequest) -> Response:
        """Fill in what is missing between two texts, as llama-server does."""
        events = InfillEvents(served.name)
        return complete(body, events, partial(run_sync, served.infill, body))

    @app.get("/v1/models", response_model_exclude_none=True)
    @app.get("/v1/models/", response_model_exclude_none=True, include_in_schema=False)
    async def models() -> openai.ModelList:
        """The model that is served."""
        return openai.ModelList(object="list", data=[served.describe()])

    @app.get("/v1/models/{name:path}", response_model_exclude_none=True, responses=errors)
    async def model(name: str) -> openai.ModelReply:
        """The model of this name."""
        served.check_name(name)
        return served.describe()

    @app.post("/tokenize", responses=errors)
    async def tokenize(body: openai.TokenizeRequest) -> openai.Tokens:
        """Token ids of a text or a conversation."""
        ids = await run_sync(served.tokenize, body)
        return openai.Tokens(tokens=ids, count=len(ids), max_model_len=served.llm.engine.backend.context_length)


def _add_operator_routes(app: FastAPI, served: ServedModel, engine_loop: EngineLoop) -> None:
    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)  # as llama-server has it
    async def health() -> dict[str, str]:
        """Whether the engine runs."""
        engine_loop.check_alive()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether there is room for a request."""
        engine_loop.check_room(1)
        return {"status": "ready", "model": served.name}

    @app.get("/props")
    async def props() -> openai.Props:
        """What clients of llama-server ask for: the context, how many outputs run at a time, the chat template."""
        return served.props()

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(engine_loop.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _page_routes() -> list[Route]:
    """Routes for the files of the page."""
    routes = []
    for file in (resources.files(__package__) / "page").iterdir():
        if content_type := _CONTENT_TYPES.get(file.name.rpartition(".")[2]):
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = Response(file.read_bytes(), headers=_PAGE_HEADERS, media_type=content_type)
            routes.append(Route(path, response, methods=["GET"]))
    return routes


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation

        class JsonRequest(Request):
            async def json(self) -> Any:
                """The body as the route's model, checked here so that a large one does not block the event loop."""
                body = await self.body()
                if len(body) <= SMALL_BODY:
                    return read_body(body, model)
                return await run_sync(read_body, body, model, limiter=self.app.state.one_large_body)

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404 and error.detail == "Not Found":
        path = printable(request.url.path)[:MAX_PARAM_CHARACTERS]
        message = f"there is no {path} here; /docs lists what there is"
        return ApiError(404, message, code="no_route").response(request.scope["path"])
    if isinstance(error, HTTPException) and error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)  # which say what is allowed
    return to_api_error(error).response(request.scope["path"])


class _RequestLog:
    """Counts requests and writes a line for each to the log, without its content."""

    def __init__(self, app: types.ASGIApp, metrics: Metrics, paths: Sequence[str], root_path: str) -> None:
        self._app, self._metrics, self._paths, self._root_path = app, metrics, frozenset(paths), root_path

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, scope = scope["method"], {**scope, "root_path": self._root_path}  # the proxy has removed it
        if method == "HEAD":  # as GET; the web server leaves out the body
            scope = {**scope, "method": "GET"}
        started, status = time.perf_counter(), 0

        async def send_and_note_status(message: types.Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count_request(path, status)
            shown = printable(scope["path"])[:MAX_PARAM_CHARACTERS]
            log.info("%s %s %s %.3f s", method, shown, status or "left", time.perf_counter() - started)
