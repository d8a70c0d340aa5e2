"""What clients get: OpenAI's replies, with Taper's own figures under `taper` in each choice.

Fields that are not set are left out.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

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
