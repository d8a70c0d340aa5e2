"""What the server lets in: where it listens, who may use it, how much they may send and how long they may take.

`Limits` are the options of `taper serve`. The socket and the gate enforce them before the app has read a body;
`EngineLoop` limits how many requests wait, and `CompletionResponse` how long one takes.
"""

from __future__ import annotations

import atexit
import hmac
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import anyio
from starlette import types
from starlette.datastructures import Headers

from ..errors import RequestError, number, shown, whole_number
from .protocols.errors import ApiError, queue_full

BODY_SECONDS = 30  # for a whole body to arrive
MAX_BODIES = 64  # of the largest size; as many bytes may be in memory for all requests together
_HANDED_OVER = 3  # the first file descriptor that systemd hands over to a service


@dataclass(frozen=True)
class Limits:
    """Where the server listens, who may use it, and how much.

    Args:
        host: an address or name to listen on; other machines reach it unless it is a loopback address.
        port: 0 takes a free one.
        root_path: under which a proxy serves all of it, such as "/taper"; the API's document says so. "" for none.
        api_key: what clients must send as a bearer token, or as `x-api-key`; "" for none.
        insecure: listen for other machines without a key.
        cors_origins: web pages of these origins may use the server; none by default.
        max_waiting: outputs that may wait while others run.
        max_n: outputs of one request.
        max_body_bytes: of a request.
        max_seconds: of a request, from its arrival to its last token; and how long a shutdown waits for those running.
        keep_alive_seconds: how long a connection without a request stays open; longer than clients keep theirs, or
            one of them sends a request just when it is closed.
        log_prompts: write the bodies of requests, prompts included, to the log.

    Raises:
        RequestError: a value out of its range, or other machines would reach a server without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""
    api_key: str = ""
    insecure: bool = False
    cors_origins: Sequence[str] = ()
    max_waiting: int = 64
    max_n: int = 8
    max_body_bytes: int = 4 << 20
    max_seconds: float = 600.0
    keep_alive_seconds: int = 65
    log_prompts: bool = False

    def __post_init__(self) -> None:
        whole_number("port", self.port, 0, 65535)
        whole_number("max_waiting", self.max_waiting, 0)
        whole_number("max_n", self.max_n, 1, 128)
        whole_number("max_body_bytes", self.max_body_bytes, 1024)
        number("max_seconds", self.max_seconds, 0, 86400, above=True)
        whole_number("keep_alive_seconds", self.keep_alive_seconds, 1, 86400)
        if "/" in self.host or not self.host.strip():
            raise RequestError(f"host is {shown(self.host)}; it must be a name or an address", "such as 127.0.0.1")
        if not re.fullmatch(r"(/[\w.~-]+)*", self.root_path, re.ASCII):
            rule = "it must begin with a slash and not end with one"
            raise RequestError(f"root_path is {shown(self.root_path)}; {rule}", "such as /taper")
        object.__setattr__(self, "cors_origins", tuple(map(_origin, self.cors_origins)))
        if not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip() == self.api_key):
            raise RequestError("the API key has characters that clients cannot send", "use visible ASCII characters")
        if not self.is_local and not (self.api_key or self.insecure):
            raise RequestError(
                f"other machines reach {self.host}, and there is no API key",
                "give --api-key, or --insecure if everyone there may use it",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return _is_loopback(self.host)


def _origin(url: str) -> str:
    """An origin as browsers send it: scheme, host and port, without the slash that a copied address ends with.

    Raises:
        RequestError: it is none.
    """
    origin = re.fullmatch(r"(\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+?)/?", url.strip(), re.I)
    if origin is None:
        rule = "an origin is a scheme, a host and perhaps a port, such as http://localhost:3000"
        raise RequestError(f"cors_origin is {shown(url)}; {rule}", "leave out the rest")
    scheme, _, rest = origin[1].lower().partition("://")
    return origin[1].lower().removesuffix({"http": ":80", "https": ":443"}.get(scheme, " ")) if rest else scheme


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    host = host.lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(limits: Limits) -> socket.socket:
    """A socket at the host and port, or the one that systemd or `start_again` has handed over.

    Raises:
        RequestError: the address is taken, not this machine's, or not an address.
    """
    if os.environ.pop("LISTEN_PID", "") == str(os.getpid()):
        return _handed_over(limits)
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    # asyncio sends small parts of a reply at once only on sockets that name TCP; others wait for acknowledgements.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":  # where SO_REUSEADDR would share a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((limits.host, limits.port))
        listener.listen()  # two that share a port may both bind it, but only one may listen
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise RequestError(f"cannot listen on {limits.host} port {limits.port}: {reason}", "choose another") from None
    return listener


def _handed_over(limits: Limits) -> socket.socket:
    hint = "give the unit one ListenStream= with an address and a port"
    if (count := os.environ.get("LISTEN_FDS", "")) != "1":
        raise RequestError(f"{shown(count)} sockets were handed over; it must be one", hint)
    try:
        listener = socket.socket(proto=socket.IPPROTO_TCP, fileno=_HANDED_OVER)
        listener.set_inheritable(False)
        listener.listen(socket.SOMAXCONN)  # which it may do already; no fewer may wait then
    except OSError as error:
        raise RequestError(f"cannot listen on the socket that was handed over: {error.strerror}", hint) from None
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise RequestError("the socket that was handed over is not for TCP", hint)
    address = listener.getsockname()[0]
    if limits.is_local and not _is_loopback(address):
        rule = f"the socket that was handed over listens on {address}, and host is {limits.host}"
        raise RequestError(rule, f"give --host {address}")
    return listener


def start_again(listener: socket.socket) -> NoReturn:
    """Replace this process by a new one with the same command line; clients wait at the socket, which it takes over."""
    atexit._run_exitfuncs()  # ends the processes that check templates and schemas
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a driver's thread may block them all
    os.dup2(listener.fileno(), _HANDED_OVER)
    os.set_inheritable(_HANDED_OVER, True)  # dup2 does nothing if it is that one already
    environment = os.environ | {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Gate:
    """Passes a request on to the app, or rejects it for its key, its host, its size, or a body that is slow to arrive.

    Args:
        app: the application behind it.
        limits: the key, and the size of a body.
        public_paths: paths that need no key.

    Without a key, requests for names that are not this machine's are rejected: a web page whose own name was made to
    point here could otherwise use the server with its visitors' browsers (DNS rebinding).
    """

    def __init__(self, app: types.ASGIApp, limits: Limits, public_paths: Sequence[str]) -> None:
        self._app, self._limits, self._public_paths = app, limits, frozenset(public_paths)
        self._held_bytes = 0  # bodies of all requests

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        num_bytes, max_bytes, is_arriving = 0, self._limits.max_body_bytes, True
        deadline = time.monotonic() + BODY_SECONDS

        async def measured() -> types.Message:
            nonlocal num_bytes, is_arriving
            try:
                with anyio.fail_after(deadline - time.monotonic() if is_arriving else None):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not arrive within {BODY_SECONDS:g} seconds"
                raise ApiError(408, reason, code="slow_body", headers={"Connection": "close"}) from None
            is_arriving = message.get("more_body", False)
            part = len(message.get("body", b""))
            num_bytes, self._held_bytes = num_bytes + part, self._held_bytes + part
            if num_bytes > max_bytes:
                raise self._too_large()
            if part and self._held_bytes > MAX_BODIES * max_bytes:
                raise queue_full()
            return message

        try:
            await self._app(scope, measured, send)
        finally:
            self._held_bytes -= num_bytes

    def _check(self, scope: types.Scope) -> None:
        headers, limits = Headers(scope=scope), self._limits
        if limits.api_key:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            sent = [bearer.strip()] if scheme.lower() == "bearer" else []
            sent.append(headers.get("x-api-key", ""))  # of Anthropic's clients
            is_right = any(hmac.compare_digest(key.encode(), limits.api_key.encode()) for key in sent)
            if not is_right and scope["path"] not in self._public_paths:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif limits.is_local and not _is_loopback(_named_host(headers.get("host", ""))):
            raise ApiError(403, "this server answers to names of this machine only", code="wrong_host")
        if scope["path"].endswith("\n"):  # routes end in $, which matches before it
            raise ApiError(404, "the path ends in a line break", code="no_route")
        if "content-length" in headers and "transfer-encoding" in headers:  # proxies may disagree on where it ends
            raise ApiError(
                400,
                "a request has Content-Length or Transfer-Encoding, not both",
                code="two_lengths",
                headers={"Connection": "close"},
            )
        if (coding := headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
            message = f"the body is compressed ({coding}); send it as it is"
            raise ApiError(415, message, code="compressed_body", headers={"Accept-Encoding": "identity"})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.max_body_bytes} bytes", code="body_too_large")


def _named_host(header: str) -> str:
    """The name or address of a Host header, "[::1]:8000" is ::1; "" if it is no such header."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::[0-9]*)?", header, re.I)
    return (match[1] or match[2]) if match else ""
