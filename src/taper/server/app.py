"""The routes: OpenAI's, what operators need, and the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata, resources
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import Request as EngineRequest
from ..errors import TaperError
from . import limits as errors
from .completions import ChatEvents, Events, TextEvents
from .engine_loop import EngineLoop, Job
from .limits import PUBLIC_PATHS, ApiError, Gate, Limits, body, to_api_error
from .metrics import Metrics
from .protocol import (
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    ErrorReply,
    ModelList,
    ModelReply,
    TextCompletion,
    TokenizeRequest,
    Tokens,
)
from .served import ServedModel

Body = TypeVar("Body", ChatRequest, CompletionRequest)

log = logging.getLogger("taper.server")
_CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page may load its own files and talk to its own server, and nothing else.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_app(served: ServedModel, limits: Limits) -> ASGIApp:
    """The server of a model, as an ASGI application."""
    metrics = Metrics()
    engine_loop = EngineLoop(served.llm, metrics, limits.max_waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine_loop.start()
        yield
        await run_sync(engine_loop.stop)

    app = FastAPI(
        title="Taper", version=metadata.version("taper-llm"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for kind in (HTTPException, RequestValidationError, TaperError, Exception):
        app.add_exception_handler(kind, _tell)
    _add_openai_routes(app, served, limits, engine_loop, metrics)
    _add_operators_routes(app, served, engine_loop, metrics)
    gate: ASGIApp = Gate(app, limits, (*PUBLIC_PATHS, *_add_page(app)))
    if limits.cors_origins:
        gate = CORSMiddleware(gate, limits.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return _Logged(gate, metrics, [getattr(route, "path", "") for route in app.routes])


def _add_openai_routes(
    app: FastAPI, served: ServedModel, limits: Limits, engine_loop: EngineLoop, metrics: Metrics
) -> None:
    refused: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}}
    streamed: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
    }

    async def answer(
        body: Body, prepare: Callable[[Body], list[EngineRequest]], events: Callable[[int], Events]
    ) -> Answer:
        arrived = time.perf_counter()
        if limits.log_prompts:
            log.info("request: %s", body.model_dump_json(exclude_unset=True))
        engine_loop.check_room(1)  # before the prompt is encoded
        requests = await run_sync(prepare, body)
        return Answer(
            engine_loop,
            requests,
            events(len(requests)),
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            arrived=arrived,
            seconds=limits.max_seconds,
            metrics=metrics,
        )

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=refused | streamed)
    async def chat_completions(body: ChatRequest) -> Response:
        """Complete a conversation."""
        tools = bool(body.tools) and body.tool_choice != "none"
        return await answer(
            body, served.chat, lambda count: ChatEvents(served.name, served.llm.tokenizer, count, count, tools=tools)
        )

    @app.post("/v1/completions", response_model=TextCompletion, responses=refused | streamed)
    async def completions(body: CompletionRequest) -> Response:
        """Complete texts."""
        return await answer(
            body, served.complete, lambda count: TextEvents(served.name, served.llm.tokenizer, count, body.n or 1)
        )

    @app.get("/v1/models", response_model_exclude_none=True)
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(object="list", data=[served.describe()])

    @app.get("/v1/models/{name:path}", response_model_exclude_none=True, responses=refused)
    async def model(name: str) -> ModelReply:
        """The model of this name."""
        served.check_name(name)
        return served.describe()

    @app.post("/tokenize", responses=refused)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Token ids of a text or a conversation."""
        ids = await run_sync(served.tokenize, body)
        return Tokens(tokens=ids, count=len(ids), max_model_len=served.llm.engine.backend.context_length)


def _add_operators_routes(app: FastAPI, served: ServedModel, engine_loop: EngineLoop, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine runs."""
        engine_loop.check_alive()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether there is room for a request."""
        engine_loop.check_room(1)
        return {"status": "ready", "model": served.name}

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """What Prometheus reads."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> list[str]:
    """Routes for the files of the page; their paths."""
    paths = []
    for file in (resources.files(__package__) / "page").iterdir():
        kind = _CONTENT_TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            paths.append("/" if file.name == "index.html" else f"/page/{file.name}")
            app.add_api_route(paths[-1], _file(file.read_bytes(), kind), include_in_schema=False)
    return paths


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)

    return file


async def _tell(_: Request, error: Exception) -> JSONResponse:
    return errors.response(error)


class _Logged:
    """Counts requests, and writes a line for each to the log: never what is in it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count_request(path, status)
            log.info("%s %s %s %.3f s", scope["method"], path, status or "left", time.perf_counter() - started)


_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # proxies are to pass each event on
}


class Answer(Response):
    """The completions of one HTTP request.

    Args:
        engine_loop: completes them.
        requests: for the engine.
        events: makes events of their chunks.
        stream: whether events are sent as they come.
        include_usage: whether the stream ends with an event that has the usage.
        arrived: when the request came, by `time.perf_counter`.
        seconds: how long it may take.
        metrics: what is counted.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        requests: Sequence[EngineRequest],
        events: Events,
        *,
        stream: bool,
        include_usage: bool,
        arrived: float,
        seconds: float,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._engine_loop, self._requests, self._events = engine_loop, requests, events
        self._stream, self._include_usage = stream, include_usage
        self._arrived, self._seconds, self._metrics = arrived, seconds, metrics
        self._started = self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Complete, and send what comes; raises, if nothing was sent yet, what a client is told instead."""
        left = self._seconds - (time.perf_counter() - self._arrived)
        with anyio.move_on_after(left) as limit, self._engine_loop.submit(self._requests, self._arrived) as job:
            leaving = asyncio.ensure_future(self._wait_for_disconnect(receive, limit))
            try:
                if self._stream:
                    await self._send_events(job, send)
                else:
                    events = [self._events.of(chunk) async for chunk in job]
                    await _json(self._events.fold(events))(scope, receive, send)
            finally:
                leaving.cancel()
        if limit.cancelled_caught and self._disconnected:
            self._metrics.count_disconnect()
        elif limit.cancelled_caught:
            await self._time_out(send)

    async def _wait_for_disconnect(self, receive: Receive, limit: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        limit.cancel()

    async def _send_events(self, job: Job, send: Send) -> None:
        """Send events as they come. The first decides whether it is a stream or an error."""
        try:
            async for event in self._encoded(job):
                if not self._started:
                    headers = [(name.encode(), value.encode()) for name, value in _EVENT_HEADERS.items()]
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not self._started:
                raise
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encoded(self, job: Job) -> AsyncIterator[bytes]:
        async for chunk in job:
            event = self._events.of(chunk)
            if self._include_usage:
                event.usage = None  # as OpenAI's streams have it, until the last event
            yield _event(event)
        if self._include_usage:
            yield _event(self._events.usage_event())
        yield b"data: [DONE]\n\n"

    async def _time_out(self, send: Send) -> None:
        """Tell a client that still reads."""
        error = ApiError(504, f"the request took more than {self._seconds:g} seconds", code="timeout")
        if not self._started:
            raise error
        with suppress(Exception), anyio.move_on_after(1):
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": False})

    def _error_event(self, error: Exception) -> bytes:
        """The event that ends a stream; the log of requests has its first status, 200."""
        told = to_api_error(error)
        self._metrics.count_error(told.status_code)
        return _event(body(told))


def _json(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")


def _event(event: BaseModel) -> bytes:
    return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"
