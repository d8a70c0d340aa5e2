"""The model that is served: turns requests of clients into the engine's. Works in any thread; computes no tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import product
from typing import Any

from ..engine import Request, TokenFilter, takes_filled
from ..engine.drafting import Drafting
from ..errors import EXACT, REUSE, RequestError, one_of, whole_number
from ..llm import LLM
from ..models.tokenizer import EFFORTS
from ..policy import DepthPolicy
from ..sampling import SamplingParams, check_token_ids
from .protocols import openai
from .protocols.bodies import TaperFields
from .protocols.errors import ApiError, errors_at

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents
NO_LIMIT = -1  # of tokens, as clients of llama.cpp and Ollama say
# Fields of a body that are parameters of sampling, or of chat templates, under the same name.
_SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens", "ignore_eos"}
_SAMPLING_FIELDS |= {"presence_penalty", "frequency_penalty"}
_ENDING_FIELDS = {"add_generation_prompt", "continue_final_message"}
_NO_SAMPLING_FIELDS = {"policy", "mode", "draft", "think", "reuse"}  # of Taper's own fields
# The fields of parameters that have another name in errors than in a body.
_FIELDS = {name: f"taper.{name}" for name in TaperFields.model_fields} | {
    "a token id of logit_bias": "logit_bias",
    "a value of logit_bias": "logit_bias",
    "a stop token id": "taper.stop_token_ids",
}


@dataclass
class ServedModel:
    """A model under a name, and the policies that requests may choose by name.

    Args:
        name: what clients call the model.
        llm: the model.
        policies: by name; "full" runs every layer.
        default_policy: the name of the policy for requests that choose none.
        max_n: completions of a request, all prompts together.
        reuse: what requests take from earlier ones unless they say so themselves, one of `REUSE`.
        draft: how to draft unless a request says so itself; by default in mode exact alone.
        limits: of drafts, see `LLM.resolve_drafting`.
    """

    name: str
    llm: LLM
    policies: dict[str, DepthPolicy]
    default_policy: str
    max_n: int
    reuse: str = REUSE[0]
    draft: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def chat(self, body: openai.ChatRequest, token_filter: Callable[[], TokenFilter] | None) -> list[Request]:
        """The engine's requests for a chat completion: `n` times the same prompt.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt, an option or the policy is wrong.
        """
        self.check_name(body.model)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        fields = {"logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        params = self._sampling_params(
            body,
            fields,
            max_tokens=NO_LIMIT if max_tokens is None else max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        with errors_at("taper.policy", _FIELDS):
            filled = not body.compares and takes_filled(self._policy(body.own), body.own.reuse or self.reuse)
        prompt = self._prompt(self.llm.encode, body, as_generated=filled)
        return self._requests(body, [prompt], params, token_filter, goes_on=bool(body.continue_final_message))

    def count(self, body: openai.ChatRequest) -> int:
        """Tokens of a chat's prompt, even if the context has no room for them. Raises what `chat` raises."""
        if body.model:
            self.check_name(body.model)
        return len(self._prompt(self.llm.tokenize, body))

    def _prompt(self, encode: Callable[..., list[int]], body: openai.ChatRequest, **how: bool) -> list[int]:
        tools = [tool.model_dump(exclude_none=True) for tool in body.usable_tools]
        ending = body.model_dump(include=_ENDING_FIELDS)
        with errors_at("messages", _FIELDS):
            messages, think = _messages(body.messages), self._think(body)
            return encode(messages, tools=tools, think=think, **how, **ending)

    def complete(self, body: openai.CompletionRequest) -> list[Request]:
        """The engine's requests for a text completion: each prompt `n` times. Raises what `chat` raises."""
        self.check_name(body.model)
        prompts, is_one = body.prompts, body.has_one_prompt
        with errors_at("n", {"prompts times n": "prompt" if body.n is None else "n"}):
            whole_number("prompts times n", len(prompts) * (body.n or 1), 1, self.max_n)  # before any is encoded
        encoded = []
        for number, prompt in enumerate(prompts):
            with errors_at("prompt" if is_one else f"prompt.{number}"):
                if body.suffix:
                    with errors_at("suffix"):
                        ids = self.llm.encode_infill(prompt, body.suffix)
                else:
                    ids = self.llm.encode(prompt, raw=True) if isinstance(prompt, str) else prompt
                self.llm.engine.check_prompt(ids)
                encoded.append(ids)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        logprobs = None if body.logprobs is False else body.logprobs
        params = self._sampling_params(body, {}, 1 if body.is_empty else max_tokens, logprobs)
        params = self._ending_infill(params) if body.suffix else params
        requests = self._requests(body, encoded, params, token_filter=None, goes_on=True)
        return [replace(request, prompt_logprobs=logprobs or 0) for request in requests] if body.echo else requests

    def infill(self, body: openai.InfillRequest) -> list[Request]:
        """The engine's request for what is missing between two texts. Raises what `chat` raises."""
        if body.model:
            self.check_name(body.model)
        files = [(file.filename, file.text) for file in body.input_extra]
        with errors_at("input_prefix"):
            prompt = self.llm.encode_infill(body.input_prefix, body.input_suffix, files, body.prompt)
        params = self._sampling_params(body, {}, NO_LIMIT if body.max_tokens is None else body.max_tokens, None)
        return self._requests(body, [prompt], self._ending_infill(params), token_filter=None, goes_on=True)

    def _ending_infill(self, params: SamplingParams) -> SamplingParams:
        return replace(params, stop_token_ids=(*params.stop_token_ids, *self.llm.infill_ends))

    def tokenize(self, body: openai.TokenizeRequest) -> list[int]:
        """Token ids of a text or a conversation.

        Raises:
            ApiError: there is no such model.
            TaperError: the prompt is wrong.
        """
        if body.model is not None:
            self.check_name(body.model)
        if body.messages is not None:
            with errors_at("messages", _FIELDS):
                return self.llm.tokenize(_messages(body.messages), **body.model_dump(include=_ENDING_FIELDS))
        with errors_at("prompt"):
            return self.llm.tokenize(body.prompt or "", raw=True)

    def check_name(self, name: str) -> None:
        """Check that a request names this model.

        Raises:
            ApiError: it names another one.
        """
        if name != self.name:
            message = f"there is no model {name!r}; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def describe(self) -> openai.ModelReply:
        """The model as /v1/models lists it."""
        llm = self.llm
        info = openai.ModelInfo(
            num_hidden_layers=llm.config.num_hidden_layers,
            context_length=llm.engine.backend.context_length,
            head=llm.engine.backend.head,
            chat=bool(llm.tokenizer.chat_template),
            sampling=llm.sampling,
            policies={name: self._describe_policy(name) for name in self.policies},
        )
        return openai.ModelReply(id=self.name, object="model", created=self.created, owned_by="taper", taper=info)

    def props(self) -> openai.Props:
        """What clients of llama-server look at."""
        backend = self.llm.engine.backend
        return openai.Props(
            default_generation_settings=openai.GenerationSettings(
                n_ctx=backend.context_length, params=self.llm.sampling
            ),
            total_slots=backend.num_slots,
            model_alias=self.name,
            chat_template=self.llm.tokenizer.chat_template,
            build_info=f"taper {metadata.version('taper-llm')}",
        )

    def _describe_policy(self, name: str) -> openai.PolicyInfo:
        policy, provenance = self.policies[name], self.policies[name].provenance
        try:
            measured: dict[str, Any] = {
                "speedup": [float(value) for value in provenance["speedup"]["measured"]],
                "agreement": [float(value) for value in provenance["held_out"]["all steps"]["agreement"]],
                "repetition": [float(value) for value in provenance["free_running"]["repetition"]["policy"]],
                "full_repetition": float(provenance["free_running"]["repetition"]["full"][0]),
                "mean_depth": float(provenance["mean_depth"]),
                "measured_tokens": int(provenance["answer_tokens"]),
            }
        except (KeyError, TypeError, ValueError):  # a user's own policy may have any provenance
            measured = {}
        with suppress(KeyError, TypeError, ValueError, IndexError):
            late = [part for part in provenance["long_outputs"]["ranges"] if part["agreement"] is not None][-1]
            agreement = [float(value) for value in late["agreement"]]
            measured |= {"late_agreement": agreement, "late_from": int(late["first"])}
        is_default = name == self.default_policy
        return openai.PolicyInfo(
            min_depth=policy.min_depth, default=is_default, first_skip=policy.first_skip, **measured
        )

    def _requests(
        self,
        body: openai.CompletionFields,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        token_filter: Callable[[], TokenFilter] | None,
        goes_on: bool,
    ) -> list[Request]:
        n = whole_number("n", 1 if body.n is None else body.n, 1, self.max_n)
        with errors_at("taper.policy", _FIELDS):
            policies, drafting = self._policies(body.own), self._drafting(body.own)
        if body.compares and params.seed is None:
            params = replace(params, seed=secrets.randbelow(1 << 32))  # one for both, so that only depth differs
        rest = self.llm.tokenizer.eos_token_ids, token_filter, body.own.reuse or self.reuse, goes_on, drafting
        requests = []
        for prompt, choice, policy in product(prompts, range(n), policies):
            seed = None if params.seed is None else params.seed + choice  # the same would give the same text n times
            requests.append(Request(prompt, replace(params, seed=seed), policy, *rest))
        return requests

    def _think(self, body: openai.ChatRequest) -> bool | str | None:
        """Whether to think first, or how much. With a model that cannot think, `reasoning_effort` has no effect."""
        effort, think = body.reasoning_effort, body.own.think
        if not self.llm.tokenizer.thinks:
            return think
        if effort is None:
            return True if body.thinks_if_it_can else think
        if effort in EFFORTS and self.llm.tokenizer.takes_effort:
            return effort
        if effort != "none" or think:
            message = f"reasoning_effort is {effort}; this model's thoughts can only be on or off"
            raise RequestError(message, "leave it out, and set taper.think", "reasoning_effort")
        return False

    def _policies(self, fields: TaperFields) -> list[DepthPolicy]:
        """The policies of a prompt's outputs: two to compare, else one."""
        policy = self._policy(fields)
        if fields.mode != "compare":
            return [policy]
        if not policy.tapers:
            message = "mode compare shows full depth beside a policy that tapers"
            raise RequestError(message, "name such a policy", "policy")
        return [self.policies["full"], policy]

    def _drafting(self, fields: TaperFields) -> Drafting | None:
        """How to draft; in mode exact, the policy of a request is the one that drafts."""
        if fields.mode == "compare":
            if fields.draft not in (None, "off"):
                message = "mode compare takes a token of each output in turn, so nothing is drafted"
                raise RequestError(message, "leave it out", "draft")
            return None
        policy = self.policies[one_of("policy", fields.policy, self.policies)] if fields.policy else None
        mode = EXACT if fields.mode == EXACT else None
        return self.llm.resolve_drafting(fields.draft or self.draft, mode, policy, **self.limits)

    def _policy(self, fields: TaperFields) -> DepthPolicy:
        if fields.mode == EXACT:
            return self.policies["full"]
        if fields.mode == "full":
            if fields.policy not in (None, "full"):
                message = "mode full runs every layer; it takes no policy"
                raise RequestError(message, "leave out one of the two", "mode")
            return self.policies["full"]
        if fields.policy is not None:
            return self.policies[one_of("policy", fields.policy, self.policies)]
        if fields.mode is not None and self.default_policy == "full":
            if self.llm.shipped_policies():
                return self.llm.resolve_policy(mode="taper")
            message = "this server runs every layer by default"
            raise RequestError(message, "name a policy; /v1/models lists them", "mode")
        return self.policies[self.default_policy]

    def _sampling_params(
        self, body: openai.CompletionFields, fields: dict[str, str], max_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        """How to sample; the model's recommendation where the body has no value. `fields` is as in `errors_at`."""
        beside = body.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
        given = _as_meant(body.own.model_dump(exclude=_NO_SAMPLING_FIELDS, exclude_none=True) | beside)
        if max_tokens == NO_LIMIT:
            max_tokens = self.llm.engine.backend.context_length
        given |= {"max_tokens": max_tokens, "stop": body.stops, "logprobs": logprobs}
        bias = {int(token_id): value for token_id, value in (body.logit_bias or {}).items()}
        with errors_at("logit_bias", _FIELDS | {name: name for name in beside} | fields):
            check_token_ids(bias, self.llm.config.vocab_size)
            return self.llm.sampling_params(**given, logit_bias=bias)


def _as_meant(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters without the values by which clients of other servers say that they are not set.

    These are a `top_k` of -1 and a `seed` below 0. A `top_p` of 0 means the most probable token.
    """
    if given.get("seed", 0) < 0:
        del given["seed"]
    if given.get("top_k") == NO_LIMIT:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "temperature": 0.0}
    return given


def _messages(messages: Sequence[openai.RequestMessage]) -> list[dict[str, Any]]:
    return [message.for_template(f"messages.{number}") for number, message in enumerate(messages)]
