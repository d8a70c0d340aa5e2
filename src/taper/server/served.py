"""The model that is served: turns requests of clients into the engine's. Runs in any thread; computes no tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine import Request, TokenFilter
from ..errors import REUSE, RequestError, one_of, whole_number
from ..llm import LLM
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from . import protocol
from .completions import check_tools
from .grammars import Grammars

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
        reuse: what requests that do not say it take from earlier ones, one of `REUSE`.
    """

    name: str
    llm: LLM
    policies: dict[str, DepthPolicy]
    default_policy: str
    max_n: int
    reuse: str = REUSE[0]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.llm.tokenizer, self.llm.config.vocab_size)

    def chat(self, body: protocol.ChatRequest, token_filter: Callable[[], TokenFilter] | None) -> list[Request]:
        """The engine's requests for a chat completion: `n` times the same prompt.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt, an option or the policy is wrong.
        """
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = _sampling_params(
            body,
            max_tokens=self.llm.engine.backend.context_length if max_tokens is None else max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        if body.usable_tools:
            check_tools(self.llm.tokenizer)
        tools = [tool.model_dump(exclude_none=True) for tool in body.usable_tools]
        messages = [message.for_template() for message in body.messages]
        prompt = self.llm.encode(messages, tools=tools, think=body.taper.think)
        return self._requests(body, [prompt], params, token_filter)

    def complete(self, body: protocol.CompletionRequest) -> list[Request]:
        """The engine's requests for a text completion: each prompt `n` times; raises what `chat` raises."""
        prompts: Any = body.prompt
        if isinstance(prompts, str) or all(isinstance(item, int) for item in prompts):
            prompts = [prompts]
        whole_number("prompts times n", len(prompts) * (body.n or 1), 1, self.max_n)  # before any is encoded
        encoded = [self.llm.encode(prompt, raw=True) if isinstance(prompt, str) else prompt for prompt in prompts]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._requests(body, encoded, _sampling_params(body, max_tokens, body.logprobs))

    def tokenize(self, body: protocol.TokenizeRequest) -> list[int]:
        """Token ids of a text or a conversation.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt is wrong.
        """
        if body.model is not None:
            self.check_name(body.model)
        if body.messages is not None:
            return self.llm.encode([message.for_template() for message in body.messages])
        return self.llm.encode(body.prompt or "", raw=True)

    def check_name(self, name: str) -> None:
        """Check that a request names this model.

        Raises:
            ApiError: it names another one.
        """
        if name != self.name:
            message = f"there is no model {name!r}; this server has {self.name!r}"
            raise protocol.ApiError(404, message, param="model", code="model_not_found")

    def describe(self) -> protocol.ModelReply:
        """The model as /v1/models lists it."""
        llm = self.llm
        info = protocol.ModelInfo(
            num_hidden_layers=llm.config.num_hidden_layers,
            context_length=llm.engine.backend.context_length,
            chat=bool(llm.tokenizer.chat_template),
            policies={name: self._describe_policy(name) for name in self.policies},
        )
        return protocol.ModelReply(id=self.name, object="model", created=self.created, owned_by="taper", taper=info)

    def _describe_policy(self, name: str) -> protocol.PolicyInfo:
        policy = self.policies[name]
        info = protocol.PolicyInfo(min_depth=policy.min_depth, default=name == self.default_policy)
        provenance = policy.provenance
        try:
            measured = {
                "speedup": [float(value) for value in provenance["speedup"]["measured"]],
                "agreement": [float(value) for value in provenance["held_out"]["all steps"]["agreement"]],
                "mean_depth": float(provenance["mean_depth"]),
                "measured_tokens": int(provenance["answer_tokens"]),
            }
        except (KeyError, TypeError, ValueError):  # a user's own policy may have any provenance
            return info
        return info.model_copy(update=measured)

    def _requests(
        self,
        body: protocol.CompletionFields,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        token_filter: Callable[[], TokenFilter] | None = None,
    ) -> list[Request]:
        self.check_name(body.model)
        n = whole_number("n", 1 if body.n is None else body.n, 1, self.max_n)
        policy, eos_token_ids = self._policy(body.taper), self.llm.tokenizer.eos_token_ids
        rest = eos_token_ids, token_filter, body.taper.reuse or self.reuse
        requests = []
        for prompt in prompts:
            self.llm.engine.check_prompt(prompt)
            for choice in range(n):  # the same seed would give the same text n times
                seed = None if params.seed is None else params.seed + choice
                requests.append(Request(prompt, replace(params, seed=seed), policy, *rest))
        return requests

    def _policy(self, fields: protocol.TaperFields) -> DepthPolicy:
        if fields.mode == "full":
            if fields.policy not in (None, "full"):
                raise RequestError("mode full runs every layer; it takes no policy", "leave out one of the two")
            return self.policies["full"]
        if fields.policy is not None:
            return self.policies[one_of("policy", fields.policy, self.policies)]
        if fields.mode == "taper" and self.default_policy == "full":
            raise RequestError("this server runs every layer by default", "name a policy; /v1/models lists them")
        return self.policies[self.default_policy]


def _sampling_params(body: protocol.CompletionFields, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """How to sample, with the defaults that OpenAI documents."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()},
        seed=body.seed,
        stop=body.stop or (),
        logprobs=logprobs,
        **body.taper.model_dump(exclude={"policy", "mode", "think", "reuse"}),
    )
