"""Replies that are lists of blocks, as Responses and Anthropic's messages have them: thoughts, texts and tool calls."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import model_validator

from ...errors import RequestError
from ...models.channels import THINK, THINK_END
from ...models.tokenizer import Tokenizer
from ...stream import Chunk, Output
from ..tool_calls import Json, ToolCallParser
from .bodies import Strict, TaperFields, validated
from .errors import fields_named
from .events import Events, server_sent
from .openai import ChatRequest


class ChatBody(Strict):
    """A request of a protocol that has blocks, which is turned into one for a chat completion."""

    chat_names: ClassVar[Mapping[str, str]]  # how the protocol names a chat's fields, where it does otherwise
    taper: TaperFields | None = None
    _chat: ChatRequest | None = None

    @model_validator(mode="after")
    def _make_chat(self) -> ChatBody:
        if self._chat is None:  # a body that is handed on is checked again
            with fields_named(self.chat_names):
                self._chat = validated(self._chat_kind(), self._chat_fields() | {"taper": self.taper})
                if self._chat.compares:
                    message = "mode compare gives two outputs, and this reply has one"
                    raise RequestError(message, "use /v1/chat/completions", "taper.mode")
        return self

    @property
    def chat(self) -> ChatRequest:
        """The same request for a chat completion."""
        assert self._chat is not None
        return self._chat

    def _chat_kind(self) -> type[ChatRequest]:
        return ChatRequest

    @abstractmethod
    def _chat_fields(self) -> Json:
        """The fields of the chat. Raises RequestError if others contradict each other."""


@dataclass
class Block:
    """A part of an output as it grows. The text of a call is its arguments, in JSON; it has an id and a name."""

    kind: Literal["thought", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockEvents(Events):
    """Events of a reply that is a list of blocks, one after the other.

    Args:
        tokenizer: the model's.
        chat: the request.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatRequest) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        tools = list(chat.callable_tools)
        self._calls = ToolCallParser(tools) if tools else None
        self._thoughts: ThoughtParser | None = None
        self._has_begun = False
        self.blocks: list[Block] = []
        self.num_thought_tokens = 0

    def events(self, chunk: Chunk) -> list[Json]:
        events = []
        if not self._has_begun:
            self._has_begun, self._thoughts = True, self._begin_thoughts()
            events = self.started()
        for kind, text, call in self._pieces(chunk):
            if call or not self.blocks or self.blocks[-1].kind != kind:
                events += self.closed(self.blocks[-1], is_cut=False) if self.blocks else []
                self.blocks.append(Block(kind, len(self.blocks), *call))
                events += self.opened(self.blocks[-1])
            if text:
                self.blocks[-1].text += text
                events.append(self.grown(self.blocks[-1], text))
        if chunk.output is not None:
            is_cut = chunk.output.finish_reason == "length"
            events += self.closed(self.blocks[-1], is_cut) if self.blocks else []
            events += self.ended(chunk.output, chunk.token_id)
        return events

    def sent(self, event: Json) -> bytes:
        return f"event: {event['type']}\n".encode() + server_sent(event)

    @abstractmethod
    def started(self) -> list[Json]:
        """The events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> list[Json]:
        """The events that begin a block, which has no text yet."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Json:
        """The event that adds this text to a block."""

    @abstractmethod
    def closed(self, block: Block, is_cut: bool) -> list[Json]:
        """The events that end a block, which may lack its end."""

    @abstractmethod
    def ended(self, output: Output, last_id: int) -> list[Json]:
        """The events after the last block; `last_id` is the last token, which may be no part of the output."""

    @property
    def is_call(self) -> bool:
        """Whether the output ends with tool calls that are whole."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_cut

    def _begin_thoughts(self) -> ThoughtParser | None:
        if not self._tokenizer.thinks or self._chat.json_schema is not None or self._chat.requires_call:
            return None  # where JSON or a call is required, nothing else comes
        return ThoughtParser(self._tokenizer.ends_in_thought(self.requests[0].prompt_ids))

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[Literal["thought", "text", "call"], str, Sequence[str]]]:
        """What a chunk adds: kind, text, and of a call that begins its id and name."""
        text, is_last, calls = chunk.text, chunk.output is not None, list[Json]()
        if self._thoughts is not None:
            was_inside = self._thoughts.is_inside
            thought, text = self._thoughts.push(text, is_last)
            self.num_thought_tokens += was_inside or self._thoughts.is_inside
            if thought:
                yield "thought", thought, ()
        if self._calls is not None:
            text, calls = self._calls.push(text, is_last)
        for call in calls:
            if "id" not in call:
                yield "call", call["function"]["arguments"], ()
        if text:
            yield "text", text, ()
        for call in calls:
            if "id" in call:
                yield "call", call["function"]["arguments"], (call["id"], call["function"]["name"])


class ThoughtParser:
    """Separates the thought that an output begins with from the rest, without the tags and the space around it.

    Args:
        is_inside: whether the prompt ends with the beginning of a thought.
    """

    def __init__(self, is_inside: bool) -> None:
        self.is_inside, self._may_begin = is_inside, not is_inside
        self._held = ""  # text that may be a tag, or space beside one
        self._is_beginning = is_inside  # of the thought, or of the text after it

    def push(self, text: str, is_last: bool) -> tuple[str, str]:
        """What the next piece of text adds to the thought and to the rest."""
        self._held, thought = self._held + text, ""
        if self._may_begin:
            start = self._held.lstrip()
            if not is_last and len(start) < len(THINK) and THINK.startswith(start):
                return "", ""
            self._may_begin = False
            if start.startswith(THINK):
                self.is_inside = self._is_beginning = True
                self._held = start[len(THINK) :]
        if self.is_inside:
            inside, end, rest = self._held.partition(THINK_END)
            inside = self._after_space(inside)
            overlap = max(size for size in range(len(THINK_END)) if inside.endswith(THINK_END[:size]))
            thought = inside[: len(inside) - (0 if end or is_last else overlap)].rstrip()
            self.is_inside, self._is_beginning = not end, bool(end) or (self._is_beginning and not thought)
            self._held = rest if end else inside[len(thought) :]
            if self.is_inside:
                return thought, ""
        rest, self._held = self._after_space(self._held), ""
        self._is_beginning = self._is_beginning and not rest
        return thought, rest

    def _after_space(self, text: str) -> str:
        return text.lstrip() if self._is_beginning else text
