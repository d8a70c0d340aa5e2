"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..checks import shown
from ..errors import ModelError, TaperError, printable
from .replies import ErrorFields, ErrorReply

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
