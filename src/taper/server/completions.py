"""How completions reach their client: chunks become OpenAI's events, and events are streamed or folded into JSON."""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine import Request
from ..llm import Chunk, Output
from ..models.tokenizer import Tokenizer
from .engine_loop import EngineLoop, Job
from .metrics import Metrics
from .protocol import ApiError, CompletionFields, to_api_error
from .tool_calls import ToolCallParser, join_calls

Json = dict[str, Any]

_OF_TOKENS = ("depth", "seconds")  # statistics of a token, which events have, not replies
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]


class CompletionResponse(Response):
    """The completions of one HTTP request. They end when the client leaves.

    Args:
        engine_loop: completes the requests.
        body: says whether to stream, and whether with the usage.
        events: turns chunks into events.
        prepare: makes the engine's requests.
        max_seconds: how long it may take from now on.
        metrics: counts clients that leave, and streams that fail.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        body: CompletionFields,
        events: Events,
        prepare: Callable[[], Awaitable[list[Request]]],
        max_seconds: float,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._engine_loop, self._events, self._prepare = engine_loop, events, prepare
        self._stream = bool(body.stream)
        self._include_usage, self._in_turn = body.includes_usage, body.compares
        self._arrived, self._max_seconds, self._metrics = time.perf_counter(), max_seconds, metrics
        self._started = self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Complete the requests and send the reply. Raises only while nothing was sent."""
        left = self._max_seconds - (time.perf_counter() - self._arrived)
        with anyio.move_on_after(left) as deadline:
            watch = asyncio.ensure_future(self._watch_for_disconnect(receive, deadline))
            try:
                requests = await self._prepare()
                with self._engine_loop.submit(requests, self._arrived, self._in_turn) as job:
                    if self._stream:
                        await self._send_stream(job, send)
                    else:
                        reply = self._events.fold(
                            [self._events.event(chunk) async for chunks in job for chunk in chunks]
                        )
                        await Response(_json_bytes(reply), media_type="application/json")(scope, receive, send)
            finally:
                watch.cancel()
        if deadline.cancelled_caught and self._disconnected:
            self._metrics.count_disconnect()
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
        try:
            async for chunks in job:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                body = b"".join(map(self._encoded, chunks))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            await self._fail(error, send)
        else:
            usage = _server_sent(self._events.usage_event()) if self._include_usage else b""
            await send({"type": "http.response.body", "body": usage + b"data: [DONE]\n\n", "more_body": False})

    def _encoded(self, chunk: Chunk) -> bytes:
        event = self._events.event(chunk)
        if self._include_usage:
            event["usage"] = None  # as in OpenAI's streams, until the last event
        return _server_sent(event)

    async def _fail(self, error: Exception, send: Send) -> None:
        """Raise an error as the reply, or end a stream with it. That began with status 200, so it is counted here."""
        if not self._started:
            raise error
        reply = to_api_error(error)
        self._metrics.count_error(reply.status_code)
        await send({"type": "http.response.body", "body": _server_sent(reply.reply().model_dump()), "more_body": False})


def _json_bytes(reply: Json) -> bytes:
    return to_json(reply, inf_nan_mode="null")


def _server_sent(event: Json) -> bytes:
    return b"data: " + _json_bytes(event) + b"\n\n"


class Events(ABC):
    """Turns the chunks of one request into events, and all its events into the JSON reply.

    Args:
        model: the name that clients know.
        tokenizer: the model's.
        n: outputs of each prompt.
    """

    id_prefix: str
    event_object: str
    reply_object: str

    def __init__(self, model: str, tokenizer: Tokenizer, n: int) -> None:
        self._tokenizer, self._n = tokenizer, n
        self._shared = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._outputs: dict[int, Output] = {}  # those that have finished, by index
        self._num_chunks = Counter[int]()

    def event(self, chunk: Chunk) -> Json:
        """The event of a chunk."""
        if chunk.output is not None:
            self._outputs[chunk.index] = chunk.output
        self._num_chunks[chunk.index] += 1
        choice = {"index": chunk.index, **self._part(chunk), "taper": self._stats(chunk)}
        return self._shared | {"object": self.event_object, "choices": [choice]}

    def usage_event(self) -> Json:
        """The event with the usage, once all outputs have finished."""
        return self._shared | {"object": self.event_object, "choices": [], "usage": self._usage()}

    def fold(self, events: Iterable[Json]) -> Json:
        """The reply that all events of the request add up to."""
        parts: dict[int, list[Json]] = {index: [] for index in sorted(self._outputs)}
        for event in events:
            (choice,) = event["choices"]
            parts[choice["index"]].append(choice)
        choices = []
        for index, choice_parts in parts.items():
            last = choice_parts[-1]
            stats = {name: value for name, value in last["taper"].items() if name not in _OF_TOKENS}
            joined = self._join(choice_parts)
            choices.append({"index": index, **joined, "finish_reason": last["finish_reason"], "taper": stats})
        return self._shared | {"object": self.reply_object, "choices": choices, "usage": self._usage()}

    @abstractmethod
    def _part(self, chunk: Chunk) -> Json:
        """The text of a chunk with its log-probabilities, and the finish reason, null before the last chunk."""

    @abstractmethod
    def _join(self, parts: Sequence[Json]) -> Json:
        """The text and the log-probabilities of one output's events."""

    def _usage(self) -> Json:
        prompts = [output for index, output in self._outputs.items() if index % self._n == 0]  # each counts once
        prompt_tokens = sum(output.prompt_tokens for output in prompts)
        completion_tokens = sum(output.completion_tokens for output in self._outputs.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
        }

    def _stats(self, chunk: Chunk) -> Json:
        """The depth of a chunk's token, unless that is a stop token; in the last chunk, the output's statistics too."""
        output, stats = chunk.output, Json()
        if output is None or self._num_chunks[chunk.index] == output.completion_tokens:
            stats |= {"depth": chunk.depth, "seconds": chunk.seconds}
        if output is not None:
            stats |= {
                "policy": output.policy.label,
                "num_hidden_layers": output.policy.num_hidden_layers,
                "mean_depth": output.mean_depth,
                "depths": output.depths,
                "ttft_s": output.ttft_s,
                "tokens_per_second": output.tokens_per_second,
            }
        return stats


class ChatEvents(Events):
    """Events of a chat completion; if the request has tools, calls are taken out of the text."""

    id_prefix, event_object, reply_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, model: str, tokenizer: Tokenizer, n: int, tools: bool, goes_on: bool = False) -> None:
        super().__init__(model, tokenizer, n)
        self._tools = tools
        self._texts = defaultdict[int, _TokenTexts](lambda: _TokenTexts(tokenizer, goes_on))
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(ToolCallParser)  # by index

    def _part(self, chunk: Chunk) -> Json:
        delta: Json = {"role": "assistant"} if self._num_chunks[chunk.index] == 1 else {}
        delta["content"], finish_reason = chunk.text, _finish_reason(chunk)
        if self._tools:
            parser = self._parsers[chunk.index]
            delta["content"], calls = parser.push(chunk.text, last=chunk.output is not None)
            if calls:
                delta["tool_calls"] = calls
            if parser.num_calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        part: Json = {"delta": delta, "finish_reason": finish_reason}
        if chunk.logprobs is not None:
            begins = not self._texts[chunk.index].has_begun
            top = [self._logprob(*pair, begins) for pair in chunk.logprobs.top.items()]
            token = self._logprob(chunk.token_id, chunk.logprobs.logprob, begins) | {"top_logprobs": top}
            self._texts[chunk.index].add(chunk.token_id)
            part["logprobs"] = {"content": [token], "refusal": None}
        return part

    def _join(self, parts: Sequence[Json]) -> Json:
        content = "".join(part["delta"]["content"] for part in parts)
        calls = join_calls(call for part in parts for call in part["delta"].get("tool_calls", []))
        logprobs = [token for part in parts if "logprobs" in part for token in part["logprobs"]["content"]]
        message: Json = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": {"content": logprobs, "refusal": None} if logprobs else None}

    def _logprob(self, token_id: int, logprob: float, begins: bool) -> Json:
        own = self._tokenizer.token_bytes(token_id, begins)
        return {"token": token_name(own), "logprob": logprob, "bytes": list(own)}


class TextEvents(Events):
    """Events of a text completion."""

    id_prefix, event_object, reply_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, n: int) -> None:
        super().__init__(model, tokenizer, n)
        self._texts = defaultdict[int, _TokenTexts](lambda: _TokenTexts(tokenizer, goes_on=True))  # by index

    def _part(self, chunk: Chunk) -> Json:
        part: Json = {"text": chunk.text, "logprobs": None, "finish_reason": _finish_reason(chunk)}
        if chunk.logprobs is not None:
            texts, top = self._texts[chunk.index], chunk.logprobs.top
            names = texts.names([chunk.token_id, *(token_id for token_id in top if token_id != chunk.token_id)])
            offset = texts.num_characters if chunk.output is None else min(texts.num_characters, len(chunk.output.text))
            texts.add(chunk.token_id)
            part["logprobs"] = {
                "tokens": [names[chunk.token_id]],
                "token_logprobs": [chunk.logprobs.logprob],
                "top_logprobs": [{names[token_id]: value for token_id, value in top.items()}],
                "text_offset": [offset],
            }
        return part

    def _join(self, parts: Sequence[Json]) -> Json:
        logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        joined = {name: [item for one in logprobs for item in one[name]] for name in logprobs[0]} if logprobs else None
        text = "".join(part["text"] for part in parts)
        if joined is not None:  # a stop string may have taken the text of the last tokens
            joined["text_offset"] = [min(offset, len(text)) for offset in joined["text_offset"]]
        return {"text": text, "logprobs": joined}


class _TokenTexts:
    """The tokens of an output as its log-probabilities show them: their names, and where they are in its text.

    Args:
        tokenizer: the model's.
        goes_on: whether the text goes on from that of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, goes_on: bool) -> None:
        self._tokenizer, self.has_begun = tokenizer, goes_on
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0  # that are complete

    def add(self, token_id: int) -> None:
        """Take note of a token; control tokens are no part of the text."""
        if token_id not in self._tokenizer.special_tokens:
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id, begins=not self.has_begun))
            self.num_characters += len(text)
            self.has_begun = True

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A name for each of the tokens that could come next; of two with the same text, the later one is its bytes."""
        names: dict[int, str] = {}
        for token_id in token_ids:
            own = self._tokenizer.token_bytes(token_id, begins=not self.has_begun)
            different = (token_name(own), _escaped(own), f"token_id:{token_id}")
            names[token_id] = next(name for name in different if name not in names.values())
        return names


def token_name(own: bytes) -> str:
    """The text of a token's bytes or, if they are no text, the bytes as OpenAI writes them."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return _escaped(own)


def _escaped(own: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _finish_reason(chunk: Chunk) -> str | None:
    return chunk.output.finish_reason if chunk.output else None
