"""How completions reach the client: as a stream of events, or folded into one JSON reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine import Request
from .engine_loop import EngineLoop, Job
from .protocols.errors import ApiError, to_api_error
from .protocols.events import Events, json_bytes
from .protocols.openai import CompletionFields
from .tool_calls import Json

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]


class CompletionResponse(Response):
    """The completions of one HTTP request. They end when the client leaves.

    Args:
        engine_loop: completes the requests.
        body: says whether to stream, and whether to send the usage too.
        events: turns chunks into events.
        prepare: makes the engine's requests.
        max_seconds: how long the reply may take from now on.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        body: CompletionFields,
        events: Events,
        prepare: Callable[[], Awaitable[list[Request]]],
        max_seconds: float,
    ) -> None:
        super().__init__()
        self._engine_loop, self._body, self._events, self._prepare = engine_loop, body, events, prepare
        self._arrived, self._max_seconds = time.perf_counter(), max_seconds
        self._started = self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Complete the requests and send the reply. Raises errors only as long as nothing was sent."""
        left = self._max_seconds - (time.perf_counter() - self._arrived)
        with anyio.move_on_after(left) as deadline:
            watch = asyncio.ensure_future(self._watch_for_disconnect(receive, deadline))
            try:
                requests = await self._prepare()
                self._events.begin(requests)
                whole = not self._body.stream
                with self._engine_loop.submit(requests, self._arrived, self._body.compares, whole) as job:
                    if self._body.stream:
                        await self._send_stream(job, send)
                    else:
                        events = [one async for chunks in job for chunk in chunks for one in self._events.events(chunk)]
                        content = json_bytes(self._events.fold(events))
                        await Response(content, media_type="application/json")(scope, receive, send)
            finally:
                watch.cancel()
        if deadline.cancelled_caught and self._disconnected:
            self._engine_loop.metrics.count_disconnect()
        elif deadline.cancelled_caught:
            with anyio.move_on_after(1):  # the client may have stopped reading
                message = f"the request took more than {self._max_seconds:g} seconds"
                await self._fail(ApiError(504, message, code="timeout"), send)

    async def _watch_for_disconnect(self, receive: Receive, completing: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        completing.cancel()

    async def _send_stream(self, job: Job, send: Send) -> None:
        """Send events as they come."""
        # As in OpenAI's streams, only the last event has the usage; in the others it is null.
        no_usage: Json = {"usage": None} if self._body.includes_usage else {}
        try:
            async for chunks in job:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                events = [event for chunk in chunks for event in self._events.events(chunk)]
                body = b"".join(self._events.sent(event | no_usage) for event in events)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            await self._fail(error, send)
        else:
            end = self._events.end(self._body.includes_usage)
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _fail(self, error: Exception, send: Send) -> None:
        """Raise an error as the reply, or end a stream with it: its status was 200, so the error is counted here."""
        if not self._started:
            raise error
        reply = to_api_error(error)
        self._engine_loop.metrics.count_error(reply.status_code)
        await send({"type": "http.response.body", "body": self._events.failure(reply), "more_body": False})
