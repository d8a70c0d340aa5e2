"""OpenAI's Responses as Taper speaks them, stateless: nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag, model_validator

from ...errors import RequestError, shown
from ...models.tokenizer import Tokenizer
from ...stream import Output
from ..neighbours import without_nothing
from ..tool_calls import Json
from .blocks import Block, BlockEvents, ChatBody
from .bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Metadata, Note, Strict, TaperStats, by_type, text_of
from .errors import ApiError
from .events import statistics
from .openai import PlainFormat, StreamOptions, read_arguments

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
# What Taper lacks, and the values with which it asks for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {"context_management": ([],), "top_logprobs": (0,)}
_NOTHING |= dict.fromkeys(("access_programs", "background_options", "image", "moderation", "personality", "prompt"), ())
_STATELESS = "leave it out, and send the whole conversation as input"
_KEPT = {
    "store": ("this server keeps no responses", _STATELESS),
    "previous_response_id": ("this server keeps no responses", _STATELESS),
    "conversation": ("this server keeps no conversations", _STATELESS),
    "background": ("this server keeps no responses to fetch later", "leave it out, and set stream to follow it"),
}
_REPEATED = {"instructions", "max_output_tokens", "temperature", "top_p", "user"}  # fields of a request, in its reply
_TEXT_EVENTS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}

# Requests


class InputPart(Strict):
    """A part of a message, or of a thought. The fields from `annotations` on have no effect."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Note = None


Parts = Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class Item(Strict):
    """What items of the input have in common, and has no effect."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A message. `phase` has no effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    phase: str | None = None


class InputCall(Item):
    """A call of the model, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class InputReasoning(Item):
    """A thought of the model, sent back: its `content`. The other fields have no effect; nothing is ever encrypted."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputCallOutput, Tag("InputCallOutput")]
    | Annotated[InputReasoning, Tag("InputReasoning")],
    by_type(InputMessage, InputCall, InputCallOutput, InputReasoning, default="message"),
]


class FunctionTool(Strict):
    """A function that the model may call; `parameters` is a JSON schema, and `strict` as in a chat."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class FlatSchema(Strict):
    """JSON that keeps a schema. Every output keeps it; `strict` changes nothing."""

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    """What the text is."""

    format: Annotated[PlainFormat | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """How to think. Thoughts are sent whole, so the kinds of summaries have no effect."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class InputTokensRequest(ChatBody):
    """POST /v1/responses/input_tokens: what makes the prompt of a response."""

    chat_names = _NAMES
    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(default=[])
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (rule, hint) in _KEPT.items():
            if data.get(name):
                raise RequestError(f"{name} is {shown(data[name])}; {rule}", hint, name)
        return without_nothing(data, _NOTHING | dict.fromkeys(_KEPT, (False, "")))

    @property
    def format(self) -> PlainFormat | FlatSchema:
        """What the text is."""
        return (self.text and self.text.format) or PlainFormat(type="text")

    def _chat_fields(self) -> Json:
        format_ = self.format.model_dump(by_alias=True, exclude_none=True)
        if isinstance(self.format, FlatSchema):
            format_ = {"type": format_.pop("type"), "json_schema": format_}
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "model": self.model or "",
            "messages": self._messages(),
            "response_format": format_,
            "tools": [_chat_tool(tool) for tool in self.tools or []],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }

    def _messages(self) -> list[Json]:
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for number, item in enumerate(items):
            if isinstance(item, InputCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            elif isinstance(item, InputReasoning):
                messages.append({"role": "assistant", "reasoning_content": text_of(item.content)})
            elif isinstance(item, InputCall):
                arguments = read_arguments(item.arguments, f"input.{number}.arguments")
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.role == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}:
                messages[-1]["content"] = text_of(item.content)
            else:
                messages.append({"role": item.role, "content": text_of(item.content)})
        if not messages:
            raise RequestError("there is neither input nor instructions", "give a text or messages", "input")
        return messages


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses. The fields from `include` on have no effect.

    There are no accounts, tiers, stored data or tools of the server's own, nothing is encrypted or padded, and prompts
    always share the computation of a prefix.
    """

    model: str
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: int | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Note = None

    def _chat_fields(self) -> Json:
        limit = {"max_completion_tokens": self.max_output_tokens}
        return super()._chat_fields() | limit | self.model_dump(include={"temperature", "top_p", "stream"})


def _chat_tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


# Replies, as the OpenAPI document describes them


class TextOutput(BaseModel):
    """The text of a message, or of a thought."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[None] | None = None
    logprobs: list[None] | None = None


class OutputItem(BaseModel):
    """A message, a thought or a function call of the model: what a thought or a call has not is left out."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[TextOutput] | None = None
    summary: list[None] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(BaseModel):
    """Tokens of the input, those among them that an earlier one begins with too, and of the output and its thoughts."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseReply(BaseModel):
    """The reply of /v1/responses; the last event of a stream has it too. It repeats the request's settings."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    error: None
    store: Literal[False]
    taper: TaperStats


class InputTokens(BaseModel):
    """The reply of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvents(BlockEvents):
    """Events of a response. Each has the number of its place; the last has the reply as a whole."""

    def __init__(self, model: str, tokenizer: Tokenizer, body: ResponsesRequest) -> None:
        super().__init__(tokenizer, body.chat)
        self._num_sent = 0
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        given, choice = body.model_dump(include=_REPEATED), body.tool_choice
        self._shared: Json = given | {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "metadata": body.metadata or {},
            "tools": [{"parameters": None, "strict": False, **tool} for tool in tools],
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "truncation": "disabled",
            "store": False,
        }

    def fold(self, events: Iterable[Json]) -> Json:
        reply: Json = list(events)[-1]["response"]
        return reply

    def started(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def opened(self, block: Block) -> list[Json]:
        item = _item(block, "in_progress") | ({} if block.kind == "call" else {"content": []})
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            events.append(self._part_event("response.content_part.added", block, part=_part(block)))
        return events

    def grown(self, block: Block, text: str) -> Json:
        return self._part_event(f"response.{_TEXT_EVENTS[block.kind]}.delta", block, delta=text)

    def closed(self, block: Block, is_cut: bool) -> list[Json]:
        name = "arguments" if block.kind == "call" else "text"
        events = [self._part_event(f"response.{_TEXT_EVENTS[block.kind]}.done", block, **{name: block.text})]
        if block.kind != "call":
            events.append(self._part_event("response.content_part.done", block, part=_part(block)))
        item = _item(block, "incomplete" if is_cut else "completed")
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def ended(self, output: Output, last_id: int) -> list[Json]:
        status = "incomplete" if output.finish_reason == "length" else "completed"
        items = [_item(block, "completed") for block in self.blocks]
        if items:
            items[-1]["status"] = status
        usage = {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": output.prompt_tokens + output.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        more = {"usage": usage, "incomplete_details": details, "taper": statistics(output)}
        return [self._event(f"response.{status}", response=self._response(status, items) | more)]

    def failure(self, error: ApiError) -> bytes:
        message = error.reply().error.message
        items = [_item(block, "incomplete") for block in self.blocks]
        failed = self._response("failed", items) | {"error": {"code": "server_error", "message": message}}
        return self.sent(self._event("response.failed", response=failed))

    def _response(self, status: str, items: list[Json]) -> Json:
        nothing = dict.fromkeys(("usage", "incomplete_details", "error"))
        return self._shared | {"status": status, "output": items, **nothing}

    def _event(self, name: str, **fields: Any) -> Json:
        self._num_sent += 1
        return {"type": name, "sequence_number": self._num_sent - 1, **fields}

    def _part_event(self, name: str, block: Block, **fields: Any) -> Json:
        """An event of a part of an item, of which there is one; a call has none."""
        place: Json = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text" and "part" not in fields:
            fields["logprobs"] = []
        return self._event(name, **place, **fields)


def _item_id(block: Block) -> str:
    return {"thought": "rs_", "text": "msg_", "call": "fc_"}[block.kind] + block.id


def _item(block: Block, status: str) -> Json:
    """A block as an item of the output."""
    item: Json = {"id": _item_id(block), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return item | {"type": "function_call", **call}
    own = {"type": "message", "role": "assistant"} if block.kind == "text" else {"type": "reasoning", "summary": []}
    return item | own | {"content": [_part(block)]}


def _part(block: Block) -> Json:
    """The one part of a message or a thought."""
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
