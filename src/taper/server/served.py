"""The model that is served: from a client's request to the engine's. Runs in any thread; computes no tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..engine import Request, TokenFilter
from ..errors import RequestError, one_of, whole_number
from ..llm import LLM
from ..models.tokenizer import Tokenizer, texts_of
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from .completions import check_tools
from .limits import ApiError
from .protocol import (
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    JsonSchema,
    Message,
    ModelInfo,
    ModelReply,
    PlainText,
    PolicyInfo,
    TaperOptions,
    TokenizeRequest,
)

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents


@dataclass
class ServedModel:
    """A model under a name, and the policies that requests may choose by name.

    Args:
        name: what clients call the model.
        llm: the model.
        policies: by name; "full" runs every layer.
        default_policy: the name of the one for requests that choose none.
        max_n: completions of a request, all prompts together.
    """

    name: str
    llm: LLM
    policies: dict[str, DepthPolicy]
    default_policy: str
    max_n: int
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.llm.tokenizer, self.llm.config.vocab_size)

    def check_name(self, name: str) -> None:
        """Reject the name of another model."""
        if name != self.name:
            message = f"there is no model {name!r}; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def chat(self, body: ChatRequest) -> list[Request]:
        """The engine's requests for a chat completion: `n` times the same prompt.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt, an option or the policy is wrong.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs goes with logprobs", "set logprobs to true")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise RequestError("max_tokens and max_completion_tokens are two names of one limit", "give one of the two")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = self.llm.engine.backend.context_length
        params = _sampling(body, most if max_tokens is None else max_tokens, logprobs)
        tools = []
        if body.tools and body.tool_choice != "none":
            check_tools(self.llm.tokenizer)
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        messages = [_message(message) for message in body.messages]
        prompt = self.llm.encode(messages, tools=tools, think=body.taper.think)
        return self._requests(body, [prompt], params, self._token_filter(body))

    def complete(self, body: CompletionRequest) -> list[Request]:
        """The engine's requests for a text completion: each prompt `n` times; raises what `chat` raises."""
        if body.taper.think is not None:
            raise RequestError("taper.think goes with chats, not with texts", "leave it out")
        prompts = _prompts(body.prompt)
        whole_number("prompts times n", len(prompts) * (body.n or 1), 1, self.max_n)  # before any is encoded
        encoded = [self.llm.encode(prompt, raw=True) if isinstance(prompt, str) else prompt for prompt in prompts]
        params = _sampling(
            body, DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, body.logprobs
        )
        return self._requests(body, encoded, params, None)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a text or a conversation.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt is wrong.
        """
        if body.model is not None:
            self.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give prompt or messages, one of the two")
        if body.messages is not None:
            return self.llm.encode([_message(message) for message in body.messages])
        return self.llm.encode(body.prompt or "", raw=True)

    def describe(self) -> ModelReply:
        """The model as /v1/models lists it."""
        llm = self.llm
        info = ModelInfo(
            num_hidden_layers=llm.config.num_hidden_layers,
            context_length=llm.engine.backend.context_length,
            chat=bool(llm.tokenizer.chat_template),
            policies={name: self._describe_policy(name) for name in self.policies},
        )
        return ModelReply(id=self.name, object="model", created=self.created, owned_by="taper", taper=info)

    def _describe_policy(self, name: str) -> PolicyInfo:
        policy = self.policies[name]
        info = PolicyInfo(min_depth=policy.min_depth, default=name == self.default_policy)
        provenance = policy.provenance
        try:
            info.speedup = [float(value) for value in provenance["speedup"]["measured"]]
            info.agreement = [float(value) for value in provenance["held_out"]["all steps"]["agreement"]]
            info.mean_depth, info.measured_tokens = float(provenance["mean_depth"]), int(provenance["answer_tokens"])
        except (KeyError, TypeError, ValueError):  # a policy of the user's own may say anything
            info.speedup = info.agreement = info.mean_depth = info.measured_tokens = None
        return info

    def _requests(
        self,
        body: CompletionOptions,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        token_filter: Callable[[], TokenFilter] | None,
    ) -> list[Request]:
        self.check_name(body.model)
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options goes with stream", "set stream to true, or leave it out")
        n = whole_number("n", 1 if body.n is None else body.n, 1, self.max_n)
        policy, ends = self._policy(body.taper), self.llm.tokenizer.eos_token_ids
        requests = []
        for prompt in prompts:
            self.llm.engine.check_prompt(prompt)
            for choice in range(n):  # the same seed would give the same text n times
                seed = None if params.seed is None else params.seed + choice
                requests.append(Request(prompt, replace(params, seed=seed), policy, ends, token_filter))
        return requests

    def _policy(self, options: TaperOptions) -> DepthPolicy:
        if options.mode == "full":
            if options.policy not in (None, "full"):
                raise RequestError("mode full runs every layer; it takes no policy", "leave out one of the two")
            return self.policies["full"]
        if options.policy is not None:
            return self.policies[one_of("policy", options.policy, self.policies)]
        if options.mode == "taper" and self.default_policy == "full":
            raise RequestError("this server runs every layer by default", "name a policy; /v1/models lists them")
        return self.policies[self.default_policy]

    def _token_filter(self, body: ChatRequest) -> Callable[[], TokenFilter] | None:
        wanted = body.response_format
        if wanted is None or isinstance(wanted, PlainText):
            return None
        if body.tools and body.tool_choice != "none":
            raise RequestError("tools and response_format exclude each other", "leave out one of the two")
        if body.taper.ignore_eos:
            raise RequestError("with ignore_eos, JSON would never end", "leave out ignore_eos or response_format")
        schema: dict[str, Any] = {"type": "object"}
        if isinstance(wanted, JsonSchema):
            schema = wanted.json_schema.schema_
            texts_of([schema])  # rejects what is nested too deep
        return self._grammars.json(schema)


def _sampling(body: CompletionOptions, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """How to sample, with the defaults that OpenAI documents."""
    ours = body.taper
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_token_ids(body.logit_bias or {}),
        seed=body.seed,
        stop=body.stop or (),
        logprobs=logprobs,
        top_k=ours.top_k,
        min_p=ours.min_p,
        repetition_penalty=ours.repetition_penalty,
        stop_token_ids=ours.stop_token_ids,
        ignore_eos=ours.ignore_eos,
    )


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    """A bias by token ids, which are text in JSON."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"{key!r} in logit_bias is not a token id")
    return {int(key): value for key, value in bias.items()}


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each text or token ids, as a list."""
    is_one = isinstance(prompt, str) or all(isinstance(item, int) for item in prompt)
    return [prompt] if is_one else prompt


def _message(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: content is text, arguments of calls are objects."""
    content = message.content or ""
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content if isinstance(content, str) else "".join(part.text for part in content),
    }
    fields |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in fields["tool_calls"]:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError("the arguments of a tool call are not a JSON object", "send back what the model called")
    return arguments


MAX_SCHEMA = 1 << 16  # characters
# JSON without spaces: a small model that may write spaces may write nothing else.
_COMPACT: Any = {"whitespace_flexible": False}


class Grammars:
    """Makes filters for a model's tokens. The vocabulary is read once, when it is first needed: half a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    def json(self, schema: dict[str, Any]) -> Callable[[], JsonFilter]:
        """What makes a filter for each completion that is to be JSON of a schema.

        Raises:
            RequestError: the schema is damaged, too large, or has a keyword that is not supported.
        """
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            raise RequestError(f"the schema has {len(text)} characters; at most {MAX_SCHEMA} are read")
        if not self._tokenizer.eos_token_ids:
            raise RequestError("this model has no token that ends an output, so JSON would never end")
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
        matcher = LLMatcher(self._read_vocabulary(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the schema cannot be kept: {matcher.get_error()}")
        return lambda: JsonFilter(matcher.deep_copy(), self._vocab_size)

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                ends = sorted(self._tokenizer.eos_token_ids)
                self._vocabulary = LLTokenizer(self._tokenizer.fast.to_str(), self._vocab_size, ends)
            return self._vocabulary


class JsonFilter:
    """Lets tokens pass that continue JSON of a schema, and the model's own stop tokens where it may end."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """Logits float32 [vocab_size], -inf where a token would break the schema; everywhere if it is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        if self._matcher.is_error():
            allowed = np.zeros_like(allowed)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token_id: int) -> None:
        """Take note of the token that came."""
        self._matcher.consume_token(token_id)
