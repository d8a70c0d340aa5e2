"""A response that runs with its request: an event stream, or the JSON reply that the same events add up to.

It ends with the client: who leaves, or takes longer than allowed, leaves nothing behind in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import anyio
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..sequence import Request
from .chunks import Events
from .engine_loop import EngineLoop, Job
from .errors import ApiError, body, to_api_error
from .metrics import Metrics

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
        requests: Sequence[Request],
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
