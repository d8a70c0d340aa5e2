"""Anthropic's messages as Taper speaks them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag, model_validator
from pydantic_core import from_json

from ...errors import RequestError
from ...models.tokenizer import Tokenizer
from ...stream import Output
from ..neighbours import without_nothing
from ..tool_calls import Json
from .blocks import Block, BlockEvents, ChatBody
from .bodies import MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_TOOLS, Note, Strict, TaperStats, by_type, text_of
from .errors import ApiError
from .events import statistics
from .openai import ChatRequest, StopText

_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
}
# What Taper lacks, and the values with which it asks for nothing.
_KEEP_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NOTHING: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}, _KEEP_THOUGHTS),
    "diagnostics": ({}, {"previous_message_id": None}),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}

# Requests


class TextBlock(Strict):
    """A text. `cache_control` and `citations` have no effect: prompts always share the computation of a prefix."""

    type: Literal["text"]
    text: str
    cache_control: Note = None
    citations: list[Any] | None = None


Texts = str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class ThinkingBlock(Strict):
    """A thought of the model, sent back. `signature` has no effect: nothing is signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Strict):
    """A call of the model, sent back. `cache_control` and `caller` have no effect."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Note = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Strict):
    """What a call gave. `cache_control` has no effect, and nor has `is_error`: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: Note = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    by_type(TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock),
]


class Message(Strict):
    """A message. Thoughts and calls are of the assistant, and what calls gave comes from the user."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class MessagesTool(Strict):
    """A tool that the model may call. The fields from `cache_control` on have no effect."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Note = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class MessagesToolChoice(Strict):
    """Whether the model may call a tool, or must."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether to think first; "adaptive" leaves it to the chat template. No effect with a model without thoughts.

    `budget_tokens` is a hint that has no effect: a thought ends where the model ends it.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class SchemaOutput(Strict):
    """JSON that keeps a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What the output is. `effort` is a hint that has no effect."""

    format: SchemaOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(ChatBody):
    """POST /v1/messages/count_tokens: what makes the prompt of a message."""

    chat_names = _NAMES
    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # No effect: there are no accounts, and prompts always share the computation of a prefix.
    cache_control: Note = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        return without_nothing(data, _NOTHING) if isinstance(data, dict) else data

    def _chat_kind(self) -> type[ChatRequest]:
        return _ThinkingChat if self.thinking and self.thinking.type == "enabled" else ChatRequest

    def _chat_fields(self) -> Json:
        if self.thinking and self.taper and self.taper.think is not None:
            message = "thinking and taper.think are two names of one switch"
            raise RequestError(message, "give one of the two", "thinking")
        messages: list[Json] = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        for number, one in enumerate(self.messages):
            messages += _chat_messages(one, f"messages.{number}.content")
        choice, format_ = self.tool_choice, self.output_config and self.output_config.format
        schema, last = format_ and {"name": "", "schema": format_.schema_}, messages[-1]
        return {
            "model": self.model,
            "messages": messages,
            # As with Anthropic, the output goes on with a last message of the assistant's.
            "continue_final_message": last["role"] == "assistant" and last.keys() == {"role", "content"},
            "tools": [_chat_tool(tool) for tool in self.tools or []],
            "tool_choice": choice and _chat_choice(choice),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": "none" if self.thinking and self.thinking.type == "disabled" else None,
        }


class _ThinkingChat(ChatRequest):
    thinks_if_it_can = True


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. `metadata` and `service_tier` have no effect."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Note = None
    service_tier: str | None = None

    def _chat_fields(self) -> Json:
        sampling = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"})
        return super()._chat_fields() | sampling | {"stop": self.stop_sequences}


def _chat_messages(message: Message, path: str) -> list[Json]:
    """A message as those of a chat: there, what a call gave is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    messages, own, is_models = list[Json](), Json(), message.role == "assistant"
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock) and message.role == "user":
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)})
            own = {}
            continue
        if not own:
            own = {"role": message.role, "content": ""}
            messages.append(own)
        if isinstance(block, TextBlock):
            own["content"] += block.text
        elif isinstance(block, ThinkingBlock) and is_models:
            own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock) and is_models:
            call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            own.setdefault("tool_calls", []).append(call)
        else:
            rule = "thinking and tool_use are the assistant's, and tool_result is the user's"
            raise RequestError(
                f"a {block.type} block in a message of role {message.role}; {rule}", param=f"{path}.{number}"
            )
    return messages or [{"role": message.role, "content": ""}]


def _chat_tool(tool: MessagesTool) -> Json:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _chat_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    return {"type": "function", "function": {"name": choice.name or ""}}


# Replies, as the OpenAPI document describes them


class ReplyBlock(BaseModel):
    """A thought, a text or a call of the model: what the others have is left out."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: str | None = None
    signature: str | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesUsage(BaseModel):
    """Tokens of the prompt that were computed and that an earlier prompt begins with too, and of the output."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    """The reply of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    taper: TaperStats


class MessageEvents(BlockEvents):
    """Events of a message: its blocks one after the other, then why it ends, its usage and Taper's statistics."""

    def __init__(self, model: str, tokenizer: Tokenizer, body: MessagesRequest) -> None:
        super().__init__(tokenizer, body.chat)
        self._stops = body.stop_sequences or []
        self._shared = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def fold(self, events: Iterable[Json]) -> Json:
        *_, last, _ = events
        content = [_content(block) for block in self.blocks]
        return self._shared | {"content": content, **last["delta"], "usage": last["usage"], "taper": last["taper"]}

    def started(self) -> list[Json]:
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._shared | nothing | {"usage": _usage(len(self.requests[0].prompt_ids), 0, 0)}
        return [{"type": "message_start", "message": message}]

    def opened(self, block: Block) -> list[Json]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block)}]

    def grown(self, block: Block, text: str) -> Json:
        kind, name = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block, is_cut: bool) -> list[Json]:
        return [{"type": "content_block_stop", "index": block.index}]

    def ended(self, output: Output, last_id: int) -> list[Json]:
        stop, reason = self._stop_sequence(output, last_id), "end_turn"
        if output.finish_reason == "length":
            reason = "max_tokens"
        elif self.is_call:
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        delta = {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
        usage = _usage(output.prompt_tokens, output.cached_tokens, output.completion_tokens)
        end: Json = {"type": "message_delta", "delta": delta, "usage": usage, "taper": statistics(output)}
        return [end, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> bytes:
        return self.sent(error.messages_reply().model_dump())

    def _stop_sequence(self, output: Output, last_id: int) -> str | None:
        """The text that ended the output, or the name of the control token that did."""
        cut = self._tokenizer.decode(output.token_ids)[len(output.text) :]
        name = self._tokenizer.special_tokens.get(last_id)
        return next((stop for stop in self._stops if stop and (cut.startswith(stop) or stop == name)), None)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _content(block: Block) -> Json:
    """A block as it is now. A call that was cut has the arguments that came; what is no JSON object is none."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments: Any = None
    with suppress(ValueError):
        arguments = from_json(block.text, allow_partial=True)
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
