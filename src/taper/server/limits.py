"""What the server lets in: options of `taper serve`, and the checks that come before a request is read."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ModelError, RequestError, TaperError, number, printable, shown, whole_number
from .protocol import ErrorFields, ErrorReply

PUBLIC_PATHS = ("/", "/health", "/ready")  # and the files of the page: they hold no secrets and show no data


@dataclass(frozen=True)
class Limits:
    """Where the server listens, who may use it, and how much.

    Args:
        host: an address or name to listen on; other machines reach it unless it is a loopback address.
        port: 0 takes a free one.
        api_key: what clients must send as a bearer token; "" for none.
        insecure: listen for other machines without a key.
        cors_origins: web pages of these origins may use the server; none by default.
        max_waiting: outputs that may wait while others run.
        max_n: outputs of one request.
        max_body_bytes: of a request.
        max_seconds: of a request, from its arrival to its last token; and how long a shutdown waits for those running.
        log_prompts: write prompts and outputs to the log.

    Raises:
        RequestError: a value out of its range, or other machines would reach a server without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    insecure: bool = False
    cors_origins: Sequence[str] = ()
    max_waiting: int = 64
    max_n: int = 8
    max_body_bytes: int = 4 << 20
    max_seconds: float = 600.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        whole_number("port", self.port, 0, 65535)
        whole_number("max_waiting", self.max_waiting, 0)
        whole_number("max_n", self.max_n, 1, 128)
        whole_number("max_body_bytes", self.max_body_bytes, 1024)
        number("max_seconds", self.max_seconds, 0, 86400, above=True)
        if not self.is_local and not (self.api_key or self.insecure):
            raise RequestError(
                f"other machines reach {self.host}, and there is no API key",
                "give --api-key, or --insecure if everyone there may use it",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Lets a request through to the app, or answers it: by its key, its host and its size.

    Without a key, requests for names that are not this machine's are rejected: a web page whose own name was made to
    point here could otherwise use the server with its visitors' browsers (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, limits: Limits, public_paths: Sequence[str]) -> None:
        self._app, self._limits, self._public = app, limits, frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await response(error)(scope, receive, send)
            return
        await self._app(scope, self._measured(receive), send)

    def _check(self, scope: Scope) -> None:
        headers, limits = Headers(scope=scope), self._limits
        if limits.api_key:
            sent = headers.get("authorization", "").encode()
            right = hmac.compare_digest(sent, f"Bearer {limits.api_key}".encode())
            if not right and scope["path"] not in self._public:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif limits.is_local and not is_loopback(_without_port(headers.get("host", ""))):
            raise ApiError(403, "this server answers to names of this machine only", code="wrong_host")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > limits.max_body_bytes:
            raise self._too_large()

    def _measured(self, receive: Receive) -> Receive:
        """The messages of a request, until its body is too large."""
        received = 0

        async def measured() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.max_body_bytes:
                raise self._too_large()
            return message

        return measured

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.max_body_bytes} bytes", code="body_too_large")


def _without_port(host: str) -> str:
    """The name or address of a Host header: "[::1]:8000" is ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


RETRY_AFTER = 1  # seconds; a place in the queue is free again after a step or two
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_PARAM = 100  # characters


class ApiError(HTTPException):
    """A request that is refused, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def queue_full() -> ApiError:
    """The error when more requests wait than the server lets."""
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(429, "too many requests are waiting; try again later", code="queue_full", headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; of a bug of ours, only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, TaperError) and not isinstance(error, ModelError):
        return ApiError(400, str(error))
    if isinstance(error, ModelError):
        return ApiError(500, str(error), code="model_error")
    # The exception goes on to the web server, which then closes the connection.
    headers = {"Connection": "close"}
    return ApiError(500, "the server failed; its log says why", code="internal_error", headers=headers)


def body(error: ApiError) -> ErrorReply:
    """An error as OpenAI's JSON."""
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    message = printable(str(error.detail))
    return ErrorReply(error=ErrorFields(message=message, type=kind, param=error.param, code=error.code))


def response(error: Exception) -> JSONResponse:
    """An error as a response."""
    refused = to_api_error(error)
    return JSONResponse(body(refused).model_dump(), refused.status_code, refused.headers)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body: where, what and what was given."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason} (at character {first['loc'][1]})", code="invalid_json")
    if isinstance(error.body, bytes) or error.body is None:
        return ApiError(400, "send the request as JSON, with Content-Type: application/json", code="no_json")
    # Of a value that may be of several types, what is wrong with the type that it has.
    same_field = [problem for problem in problems if problem["loc"][:2] == first["loc"][:2]]
    worst = next((problem for problem in same_field if not problem["type"].endswith("_type")), first)
    param = _param(worst["loc"][1:], error.body)
    if worst["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_field")
    if worst["type"] == "missing":
        return ApiError(400, f"field {param!r} is missing", param=param, code="missing_field")
    message = worst["msg"][0].lower() + worst["msg"][1:]
    given = shown(worst["input"])
    return ApiError(
        400, f"{param or 'the body'}: {message} (given: {given})", param=param or None, code="invalid_value"
    )


def _param(place: Sequence[int | str], value: Any) -> str:
    """A place in a body, as names and indices; pydantic puts names of its own types in between."""
    names: list[str] = []
    for position, part in enumerate(place):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_there or (isinstance(value, dict) and position == len(place) - 1):
            names.append(str(part))
            value = value.get(part) if isinstance(value, dict) else value[int(part)]
    return printable(".".join(names))[:_MAX_PARAM]
