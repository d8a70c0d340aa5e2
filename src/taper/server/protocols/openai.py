"""OpenAI's chat and text completions as Taper speaks them, its models, and what llama-server has beside them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from ...errors import RequestError
from ...models.call_forms import CLOSE
from ..neighbours import as_ours
from .bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    Metadata,
    Note,
    Strict,
    TaperFields,
    TaperStats,
    at_most,
)

MAX_BIASED_TOKENS = 1024
MAX_PROMPTS, MAX_PROMPT_TOKENS = 128, 1 << 20

StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
FinishReason = Literal["stop", "length", "tool_calls"]

# Requests


class StreamOptions(Strict):
    """What an event stream has besides the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: events are not padded


class CompletionFields(Strict):
    """The fields that chat and text completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASED_TOKENS)] = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    taper: TaperFields | None = None
    # No effect: there are no accounts, tiers or stored data, and prompts always share the computation of a prefix.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Note = None

    @model_validator(mode="before")
    @classmethod
    def _as_ours(cls, data: Any) -> Any:
        return as_ours(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_shared_fields(self) -> CompletionFields:
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise RequestError(f"{key!r} in logit_bias is not a token id", param="logit_bias")
        if self.compares and (self.n or 1) > 1:
            raise RequestError("n does not go with taper.mode compare, which gives two choices", "leave it out", "n")
        if self.includes_usage and not self.stream:
            message = "stream_options goes with stream"
            raise RequestError(message, "set stream to true, or leave it out", "stream_options")
        return self

    @property
    def compares(self) -> bool:
        """Whether there are two choices, full depth and tapered, that advance by a token in turn."""
        return self.own.mode == "compare"

    @property
    def ignores_eos(self) -> bool:
        """Whether the model's own stop ids do not end an output."""
        return bool(self.own.ignore_eos if self.ignore_eos is None else self.ignore_eos)

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return 2 if self.compares else self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the last event of a stream has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def own(self) -> TaperFields:
        """Taper's own fields, given or not."""
        return self.taper or TaperFields()

    @property
    def stops(self) -> list[str]:
        """The texts that end an output, without empty ones."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]


class CompletionRequest(CompletionFields):
    """POST /v1/completions: text or token ids, one prompt or several."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    logprobs: int | Literal[False] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no token is asked for: only the prompt, or its count."""
        return self.max_tokens == 0

    @property
    def has_one_prompt(self) -> bool:
        """Whether the prompt is not in a list of several."""
        return isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))

    @property
    def prompts(self) -> list[Any]:
        """The prompts: texts or lists of token ids."""
        return [self.prompt] if self.has_one_prompt else list(self.prompt)

    @model_validator(mode="after")
    def _check_fields(self) -> CompletionRequest:
        if self.is_empty and self.stream:
            raise RequestError("with max_tokens 0 there is nothing to stream", "leave out stream", "max_tokens")
        if self.echo and (self.stream or self.suffix or self.compares):
            raise RequestError("echo goes with neither stream, suffix nor taper.mode compare", "leave it out", "echo")
        if self.suffix and not isinstance(self.prompt, str):
            raise RequestError("suffix goes with one prompt, as text", "send a request for each", "suffix")
        if self.own.think is not None:
            raise RequestError("taper.think goes with chats, not with texts", "leave it out", "taper.think")
        if self.best_of not in (None, self.n or 1):
            raise RequestError(f"best_of is {self.best_of}; all of the n outputs are sent", "leave it out", "best_of")
        return self


class ExtraFile(Strict):
    """Another file, as context of what is filled in."""

    filename: str = ""
    text: str


class InfillRequest(CompletionFields):
    """POST /infill, as llama-server has it: what is missing between two texts, with `prompt` as its beginning.

    The fields from `n_indent` on have no effect.
    """

    model: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field(fail_fast=True, max_length=MAX_PROMPTS, default=[])
    prompt: str = ""
    n_indent: int | None = None
    id_slot: int | None = None
    samplers: list[str] | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    response_fields: list[str] | None = None

    @property
    def includes_usage(self) -> bool:
        """Never: the last event has the figures."""
        return False

    @model_validator(mode="after")
    def _check_fields(self) -> InfillRequest:
        if self.num_choices > 1:
            raise RequestError("infill gives one text", "leave out n and taper.mode compare", "n")
        return self


class TextPart(Strict):
    """A part of a message's content. `cache_control` and `annotations` have no effect."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    annotations: list[Any] | None = None


class FunctionCall(Strict):
    """The function of a tool call; `arguments` is JSON text. Some clients send no arguments, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """A tool call of the model, sent back as part of an earlier turn. `index` comes from streams and has no effect."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None


class RequestMessage(Strict):
    """A message of a conversation.

    Clients that send replies back include the fields from `refusal` on. Of these, the prompt holds `refusal`, where
    there is no content, and `reasoning_content`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    cache_control: dict[str, Any] | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as chat templates take it: content is text, arguments of tool calls are objects.

        `path` says where the message is in the body, for errors.

        Raises:
            RequestError: the arguments of a tool call are not a JSON object.
        """
        content = self.content or self.refusal or ""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }
        message |= self.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        if self.tool_calls:
            message["tool_calls"] = calls = []
            for number, call in enumerate(self.tool_calls):
                arguments = read_arguments(call.function.arguments, f"{path}.tool_calls.{number}.function.arguments")
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call.id or "", "type": "function", "function": function})
        return message


Messages = Annotated[list[RequestMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


def read_arguments(arguments: str | dict[str, Any] | None, path: str) -> dict[str, Any]:
    """The arguments of a tool call in a conversation, from JSON text or an object; none are none.

    Raises:
        RequestError: they are not a JSON object; `path` says where they are in the body.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else None
    if arguments is None:  # the function takes none
        return {}
    if not isinstance(arguments, dict):
        message = "the arguments of a tool call are not a JSON object"
        raise RequestError(message, "send them back as the model wrote them", path)
    return arguments


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema.

    `strict` says that calls must keep it. They do in any case, unless it has a keyword that is not supported.
    """

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # as OpenAI documents


class FunctionName(Strict):
    """Which function to call."""

    name: str


class ToolChoice(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class PlainFormat(Strict):
    """Any text, the default, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Strict):
    """A JSON schema. Every output keeps it; `strict` changes nothing."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default={})
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON that keeps a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # Accepted only with values that ask for nothing.
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["auto", "none"] | None = None
    thinks_if_it_can: ClassVar[bool] = False  # no effect with a model without thoughts

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call in this request."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def requires_call(self) -> bool:
        """Whether the model must call a tool."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def allows_one_call(self) -> bool:
        """Whether the output ends with its first call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolChoice)

    @property
    def has_strict_tools(self) -> bool:
        """Whether calls of a tool have to keep its schema."""
        return any(tool.function.strict for tool in self.usable_tools)

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        """The schemas of the parameters of the tools that the model may call, or must, by name."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None
        functions = [tool.function for tool in self.usable_tools if name in (None, tool.function.name)]
        return {function.name: function.parameters or _NO_PARAMETERS for function in functions}

    @property
    def stops(self) -> list[str]:
        """The texts that end an output: also the end of a call, if the model may make only one."""
        return super().stops + ([CLOSE] if self.usable_tools and self.allows_one_call else [])

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema that outputs must keep; None for any text."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_
        is_text = self.response_format is None or self.response_format.type == "text"
        return None if is_text else {"type": "object"}

    @model_validator(mode="after")
    def _check_fields(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs", "set logprobs to true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_tokens and max_completion_tokens are two names of one limit"
            raise RequestError(message, "give one of the two", "max_tokens")
        if self.requires_call and not self.callable_tools:
            raise RequestError("tool_choice asks for a tool that is not in tools", "add it", "tool_choice")
        if self.requires_call and self.ignores_eos:
            message = "with ignore_eos, a call would never end"
            raise RequestError(message, "leave out ignore_eos or tool_choice", "ignore_eos")
        if self.json_schema is not None and self.usable_tools:
            raise RequestError("tools and response_format exclude each other", "leave out one of the two", "tools")
        if self.json_schema is not None and self.ignores_eos:
            message = "with ignore_eos, JSON would never end"
            raise RequestError(message, "leave out ignore_eos or response_format", "ignore_eos")
        return self


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation by the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give prompt or messages, one of the two", param="prompt")
        return self


# Replies, as the OpenAPI document describes them. `ChoiceEvents` makes the replies of completions.


class PromptTokensDetails(BaseModel):
    """How many tokens of the prompt were not computed again, because an earlier prompt begins with them too."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """A token and its log-probability. A token that is only a part of a character is named by its `bytes`."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The sampled token and its log-probability, and those of the most probable tokens."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Log-probabilities of a text completion: lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ReplyFunction(BaseModel):
    """The function that the model calls; `arguments` is JSON text."""

    name: str
    arguments: str


class ReplyCall(BaseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: ReplyFunction


class ReplyMessage(BaseModel):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ReplyCall] | None = None


class Choice(BaseModel):
    """What the choices of chats and texts have in common."""

    index: int
    finish_reason: FinishReason
    taper: TaperStats


class ChatChoice(Choice):
    """One of the `n` messages."""

    message: ReplyMessage
    logprobs: ChatLogprobs | None


class TextChoice(Choice):
    """One of the texts."""

    text: str
    logprobs: TextLogprobs | None


class Completion(BaseModel):
    """What the replies to chats and texts have in common."""

    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(Completion):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(Completion):
    """The reply of /v1/completions; an event of its stream has the same form."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Infill(BaseModel):
    """The reply of /infill, by llama-server's names; an event of its stream has `content` and `stop` first."""

    content: str
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "limit", "word"]
    timings: dict[str, float]


class PolicyInfo(BaseModel):
    """A policy that requests may name. Lists are an estimate and the ends of its interval.

    `first_skip` is the first step that skips a layer; full depth has none. `repetition` is the part of the four-grams
    of outputs that occurred earlier in the same output; `full_repetition` is the same at full depth. These,
    `agreement`, `speedup` and `mean_depth` are of outputs of up to `measured_tokens` tokens; `late_agreement` is of the
    tokens from `late_from` on in long outputs, most of which run at the least depth.
    """

    min_depth: int
    default: bool
    first_skip: int | None = None
    speedup: list[float] | None = None
    agreement: list[float] | None = None
    repetition: list[float] | None = None
    full_repetition: float | None = None
    mean_depth: float | None = None
    measured_tokens: int | None = None
    late_agreement: list[float] | None = None
    late_from: int | None = None


class ModelInfo(BaseModel):
    """Taper's description of the model; `sampling` holds the parameters of requests that give none.

    `head` says how logits are computed.
    """

    num_hidden_layers: int
    context_length: int
    head: str
    chat: bool
    sampling: dict[str, float]
    policies: dict[str, PolicyInfo]


class ModelReply(BaseModel):
    """The model, as /v1/models lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    taper: ModelInfo


class ModelList(BaseModel):
    """The reply of /v1/models."""

    object: Literal["list"]
    data: list[ModelReply]


class GenerationSettings(BaseModel):
    """What a request gets that sets nothing."""

    n_ctx: int
    params: dict[str, float]


class Props(BaseModel):
    """The reply of /props, by llama-server's names."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    build_info: str


class Tokens(BaseModel):
    """The reply of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
