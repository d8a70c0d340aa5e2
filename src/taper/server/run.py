"""Runs the server with uvicorn, until a signal ends it: what has been accepted is answered first."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from contextlib import suppress

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import RequestError
from .app import create_app
from .limits import Limits
from .served import ServedModel

MAX_CONNECTIONS = 1 << 14
REQUEST_SECONDS = 30  # for a whole request to arrive
STALLED_SECONDS = 60  # without reading anything that was sent


class _Connection(H11Protocol):
    """uvicorn's connection, but it ends if a request does not arrive, or its answer is not read, in time."""

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _watch(self) -> None:
        """Wait for the rest of a request; one that has arrived has its own time."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._arriving = self._arriving or self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        elif self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None


def listen(limits: Limits) -> socket.socket:
    """A socket at the host and port.

    Raises:
        RequestError: the address is taken, not this machine's, or not an address.
    """
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    # asyncio sends small parts of a reply at once on sockets that name TCP only; others wait for acknowledgements.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((limits.host, limits.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise RequestError(f"cannot listen on {limits.host} port {limits.port}: {reason}", "choose another") from None
    return listener


def serve(served: ServedModel, limits: Limits, listener: socket.socket) -> None:
    """Serve a model on a socket until SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("taper.server").setLevel(logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # each connection is a file
        wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    uvicorn.Server(config(served, limits)).run(sockets=[listener])


def config(served: ServedModel, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs the server."""
    return uvicorn.Config(
        create_app(served, limits),
        http=_Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.max_seconds) + 1,
        h11_max_incomplete_event_size=1 << 16,
    )
