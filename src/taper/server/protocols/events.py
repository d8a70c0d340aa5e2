"""What turns the chunks of a request into its reply, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pydantic_core import to_json

from ...engine import Request
from ...stream import Chunk, Output
from ..tool_calls import Json
from .errors import ApiError


def json_bytes(reply: Json) -> bytes:
    """A reply as JSON."""
    return to_json(reply, inf_nan_mode="null")


def server_sent(event: Json) -> bytes:
    """An event without a name, as it is sent."""
    return b"data: " + json_bytes(event) + b"\n\n"


def statistics(output: Output) -> Json:
    """What a reply says of an output, as `TaperStats` describes it."""
    return {
        "policy": output.policy.label,
        "num_hidden_layers": output.policy.num_hidden_layers,
        "mean_depth": output.mean_depth,
        "depths": output.depths,
        "ttft_s": output.ttft_s,
        "tokens_per_second": output.tokens_per_second,
        "drafted_tokens": output.drafted_tokens,
        "accepted_tokens": output.accepted_tokens,
    }


class Events(ABC):
    """Turns the chunks of one request into events, and all its events into the JSON reply."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Take note of the engine's requests, before their first chunk comes."""
        self.requests = requests

    @abstractmethod
    def events(self, chunk: Chunk) -> list[Json]:
        """The events of a chunk."""

    @abstractmethod
    def fold(self, events: Iterable[Json]) -> Json:
        """The JSON reply that has the contents of all events of the request."""

    def sent(self, event: Json) -> bytes:
        """An event as it is sent."""
        return server_sent(event)

    def end(self, with_usage: bool) -> bytes:
        """What ends a stream."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that has failed."""
        return server_sent(error.reply().model_dump())
