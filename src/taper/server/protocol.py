"""What clients may send: OpenAI's requests, and Taper's own fields under `taper`. Any other field is rejected.

Ranges of values are checked where they are used, by `SamplingParams` and the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_BIASED_TOKENS = 1024
MAX_TOOLS = 128

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Strict(BaseModel):
    """No unknown field, and no value of another type that could be converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class WithoutEffect(Strict):
    """Fields that OpenAI documents and that change nothing here: there are no accounts, tiers or stored data.

    Prompts that begin alike share their computation in any case.
    """

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class TaperOptions(Strict):
    """Taper's own fields of a request: depth, and what OpenAI's sampling lacks."""

    policy: str | None = None
    mode: Literal["full", "taper"] | None = None
    think: bool | None = None  # of chats
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field(default=[], max_length=MAX_STOPS)
    ignore_eos: bool = False


class StreamOptions(Strict):
    """What else an event stream carries."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # changes nothing here: chunks are not padded


class CompletionOptions(WithoutEffect):
    """What both kinds of requests share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASED_TOKENS)
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    taper: TaperOptions = TaperOptions()


class CompletionRequest(CompletionOptions):
    """POST /v1/completions: text or token ids, one prompt or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a conversation. The last four fields are those that clients send back of a reply, empty here."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class PlainText(Strict):
    """Any text, the default."""

    type: Literal["text"]


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema. It is always kept, `strict` or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default={})
    strict: bool | None = None


class JsonSchema(Strict):
    """JSON that keeps a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatRequest(CompletionOptions):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation by the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)


FinishReason = Literal["stop", "length", "tool_calls"]


class Depths(BaseModel):
    """Taper's figures: `depth` of the token of a chunk; the others come with the last chunk, and in JSON replies."""

    depth: int | None = None
    policy: str | None = None
    num_hidden_layers: int | None = None
    mean_depth: float | None = None
    depths: list[int] | None = None
    ttft_s: float | None = None
    tokens_per_second: float | None = None


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that were not computed again, as an earlier prompt began with them."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LikelyToken(BaseModel):
    """A token and its log-probability; without bytes if it holds only part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LikelyToken):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Log-probabilities of a text completion: lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionReply(BaseModel):
    """A function that the model calls; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """A tool call, whole; `index` is there in chunks."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class Delta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChunkChoice(BaseModel):
    """A choice's part in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    taper: Depths | None = None


class ChatChunk(BaseModel):
    """An event of a chat completion's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """One of `n` messages."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    taper: Depths


class ChatCompletion(BaseModel):
    """The reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One of the texts, or a chunk's part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    taper: Depths | None = None


class TextCompletion(BaseModel):
    """The reply of /v1/completions, and an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class PolicyInfo(BaseModel):
    """A policy that requests may name, and what was measured of it on held-out prompts, each with its interval."""

    min_depth: int
    default: bool
    speedup: list[float] | None = None
    agreement: list[float] | None = None
    mean_depth: float | None = None
    measured_tokens: int | None = None


class ModelInfo(BaseModel):
    """What Taper says of its model."""

    num_hidden_layers: int
    context_length: int
    chat: bool
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


class Tokens(BaseModel):
    """The reply of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class ErrorFields(BaseModel):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The reply to a request that is refused, or that fails."""

    error: ErrorFields
