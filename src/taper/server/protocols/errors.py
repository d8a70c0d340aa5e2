"""Errors as clients see them, in the form of each protocol and with its names of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ...errors import ModelError, TaperError, printable


class ErrorFields(BaseModel):
    """The mistake, and the field that has it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The reply to a request that is rejected or has failed."""

    error: ErrorFields


class MessagesErrorReply(BaseModel):
    """The same, as Anthropic's clients read it."""

    type: Literal["error"]
    error: dict[Literal["type", "message"], str]


_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_MESSAGES_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class ApiError(HTTPException):
    """A request that is rejected or has failed, with its HTTP status."""

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

    def reply(self) -> ErrorReply:
        """The error as OpenAI's JSON."""
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status_code < 500 else "server_error"
        type_, message = types.get(self.status_code, default), printable(str(self.detail))
        return ErrorReply(error=ErrorFields(message=message, type=type_, param=self.param, code=self.code))

    def messages_reply(self) -> MessagesErrorReply:
        """The error as Anthropic's JSON."""
        default = "invalid_request_error" if self.status_code < 500 else "api_error"
        type_, message = _MESSAGES_TYPES.get(self.status_code, default), printable(str(self.detail))
        return MessagesErrorReply(type="error", error={"type": type_, "message": message})

    def response(self, path: str) -> JSONResponse:
        """The error as a response, in the form of the protocol that has a path."""
        reply = self.messages_reply() if f"{path}/".startswith(f"{_MESSAGES_PATH}/") else self.reply()
        return JSONResponse(reply.model_dump(), self.status_code, self.headers)


def queue_full() -> ApiError:
    """The error for a request that finds the queue full. There may be room again after a step or two."""
    message, headers = "too many requests are waiting; try again later", {"Retry-After": "1"}
    return ApiError(429, message, code="queue_full", headers=headers)


def device_lost() -> ApiError:
    """The error for requests that wait or come before the server starts again, which it does after a second."""
    message, headers = "the device was lost; the server starts again", {"Retry-After": "2"}
    return ApiError(503, message, code="device_lost", headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """An error as clients see it. Of a bug in the server they learn only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return ApiError(400, "send the request as JSON, with Content-Type: application/json", code="no_json")
    if isinstance(error, ModelError):
        return ApiError(500, str(error), code="model_error")
    if isinstance(error, TaperError):
        return ApiError(400, str(error), param=error.param or None)
    # The web server raises the exception again, and then closes the connection.
    headers = {"Connection": "close"}
    return ApiError(500, "the server failed; its log says why", code="internal_error", headers=headers)


@contextmanager
def errors_at(param: str, fields: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make the errors of a block name the body's field that they are about, in their text too.

    Args:
        param: the field of errors that name no parameter.
        fields: the field of each parameter that has another name in the body.
    """
    try:
        yield
    except ModelError:
        raise
    except TaperError as error:
        name = (fields or {}).get(error.param, error.param or param)
        message = error.message
        if error.param and message.startswith(f"{error.param} is "):
            message = name + message.removeprefix(error.param)
        raise type(error)(message, error.hint, name) from None


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Make the errors of a block name the fields of a chat as another protocol does, which has these names for them.

    In texts, only names with an underscore are replaced: others are words too.
    """
    try:
        yield
    except ModelError:
        raise
    except TaperError as error:
        message, hint = error.message, error.hint
        for name in sorted((name for name in names if "_" in name), key=len, reverse=True):
            message, hint = (re.sub(rf"\b{re.escape(name)}\b", names[name], text) for text in (message, hint))
        raise type(error)(message, hint, names.get(error.param, error.param)) from None
