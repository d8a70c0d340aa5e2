"""What turns the chunks of a request into its reply, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from pydantic_core import to_json

from ...stream import Chunk
from ..tool_calls import Json


def json_bytes(reply: Json) -> bytes:
    """A reply as JSON."""
    return to_json(reply, inf_nan_mode="null")


def server_sent(event: Json) -> bytes:
    """An event as it is sent."""
    return b"data: " + json_bytes(event) + b"\n\n"


class Events(ABC):
    """Turns the chunks of one request into events, and all its events into the JSON reply."""

    @abstractmethod
    def event(self, chunk: Chunk) -> Json:
        """The event of a chunk."""

    @abstractmethod
    def fold(self, events: Iterable[Json]) -> Json:
        """The JSON reply that has the contents of all events of the request."""

    def end(self, with_usage: bool) -> bytes:
        """What ends a stream."""
        return b""
