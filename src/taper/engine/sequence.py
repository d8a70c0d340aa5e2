"""A request on its way through the engine: what it asks for, the tokens that came, and the state between two tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import REUSE, RequestError
from ..policy import DepthPolicy
from ..sampling import NOT_A_NUMBER, SamplingParams, TokenCounts, TokenLogprobs, adjust
from .drafting import Draft, Drafting, NgramDrafter, Record

Tokens = list[int] | tuple[int, ...]


class TokenFilter(Protocol):
    """Says which tokens may come next in one completion, such as those that keep it valid JSON."""

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits float32 [vocab_size], with -inf for tokens that may not come next; itself if all may."""
        ...

    def accept(self, token_id: int) -> None:
        """Note the token that was chosen."""
        ...

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first one on, may come next one after the other."""
        ...


def takes_filled(policy: DepthPolicy, reuse: str) -> bool:
    """Whether a request with this policy and kind of reuse fills keys and values, and may see those that others did."""
    return reuse == "filled" and policy.tapers


@dataclass(frozen=True)
class Request:
    """A prompt and how to complete it.

    `eos_token_ids` are the model's own; `params` may add to them. `token_filter` makes the filter of its completion.
    `reuse`, one of `REUSE`, says what it may take from earlier requests: "filled" also keys and values of layers that
    they skipped, if its own policy skips layers; "exact" only what full depth computed. `text_goes_on` is for whoever
    decodes the completion: its text goes on from that of the prompt. `prompt_logprobs`: report log-probabilities of the
    prompt's tokens and of so many most probable ones; then the whole prompt is computed.

    Raises:
        RequestError: `min_tokens` and a filter exclude each other.
    """

    prompt_ids: Tokens
    params: SamplingParams
    policy: DepthPolicy
    eos_token_ids: frozenset[int] = frozenset()
    token_filter: Callable[[], TokenFilter] | None = None
    reuse: str = REUSE[0]
    text_goes_on: bool = False
    drafting: Drafting | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.params.min_tokens and self.token_filter is not None:
            message = "min_tokens does not go with a schema or tools, which say where an output may end"
            raise RequestError(message, "leave out one of the two", param="min_tokens")

    @cached_property
    def takes_filled(self) -> bool:
        """Whether it fills keys and values of skipped layers, and may see those that others filled."""
        return takes_filled(self.policy, self.reuse)

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits after each token of the prompt are needed, so that none is taken from elsewhere."""
        return self.prompt_logprobs is not None

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the argmax of the model's own logits is all that is asked for."""
        return self.params.is_greedy and self.token_filter is None and not self.scores_prompt

    def reach(self, vocab_size: int) -> float:
        """As `SamplingParams.reach`; infinite if the prompt's log-probabilities are asked for."""
        return math.inf if self.scores_prompt else self.params.reach(vocab_size)


class StepOutput(NamedTuple):
    """One token of a sequence, the stop token included.

    `token_id` is -1, with `finish_reason` "error", if the model's output was not a number or its filter allowed none.
    """

    sequence_id: int
    token_id: int
    depth: int
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    is_drafted: bool = False  # whether it was proposed, and came true


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine, which alone changes it."""

    id: int
    request: Request
    depth: int  # layers of the forward that predicts the next token: set by the policy, after each token
    outputs: list[StepOutput] = field(default_factory=list)  # the completion: each token once, in order
    slot: int | None = None  # of the key-value cache; None while it waits and once it has finished
    num_computed_tokens: int = 0  # leading tokens with keys and values in every layer, computed or filled
    num_exact_tokens: int = 0  # those of them for which every layer ran, on exact tokens before
    num_cached_tokens: int = 0  # prompt tokens that were not computed for this sequence
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position, where they are asked for
    is_held: bool = False  # its caller uses its slot (`Engine.forward`): it advances only when it is asked for
    num_drafted: int = 0  # tokens that were proposed and verified
    drafter: NgramDrafter | None = field(init=False)
    drafts: Record = field(default_factory=Record)  # how often copied tokens came true
    predictions: Record = field(default_factory=Record)  # how often predicted ones did
    rng: np.random.Generator = field(init=False)
    token_filter: TokenFilter | None = field(init=False)
    counts: TokenCounts | None = field(init=False)  # for the penalties, where there are any

    def __post_init__(self) -> None:
        drafting = self.request.drafting
        copies = drafting is not None and drafting.kind != "policy"
        self.drafter = NgramDrafter(drafting.min_match) if drafting is not None and copies else None
        self._begin()

    def _begin(self) -> None:
        """Set the state that sampling keeps from token to token to what it is before the first one."""
        self.rng = np.random.default_rng(self.request.params.seed)
        self.token_filter = self.request.token_filter and self.request.token_filter()
        self.counts = TokenCounts(self.request.prompt_ids) if self.request.params.has_penalties else None

    def accept(self, token_id: int) -> None:
        """Note a token of the completion, for the sampling of the next one."""
        if self.token_filter is not None:
            self.token_filter.accept(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def step(self) -> int:
        """Index of the next token of the completion."""
        return len(self.outputs)

    @property
    def banned_ids(self) -> list[int]:
        """Tokens that may not come yet: those that would end the completion too early."""
        params = self.request.params
        return [*self.request.eos_token_ids, *params.stop_token_ids] if self.step < params.min_tokens else []

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` changes anything."""
        params = self.request.params
        return bool(params.has_penalties or params.logit_bias or self.step < params.min_tokens)

    def adjust(self, logits: np.ndarray, ids: np.ndarray | None = None) -> None:
        """Bias, penalties, and the ban of what may not come yet, as `sampling.adjust`: in place."""
        adjust(logits, self.request.params, self.counts, ids)
        if banned := self.banned_ids:
            logits[banned if ids is None else np.isin(ids, banned)] = -np.inf

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.request.prompt_ids) + len(self.outputs)

    @property
    def completion_ids(self) -> list[int]:
        """The completion as token ids, a stop token included."""
        return [output.token_id for output in self.outputs if output.token_id != NOT_A_NUMBER]

    def leading(self, count: int) -> list[int]:
        """The first `count` tokens of prompt and completion."""
        missing = max(0, count - len(self.request.prompt_ids))
        return [*self.request.prompt_ids[:count], *(output.token_id for output in self.outputs[:missing])]

    def tokens_from(self, first: int) -> list[int]:
        """Those of prompt and completion from an index on."""
        prompt = self.request.prompt_ids
        return [*prompt[first:], *(output.token_id for output in self.outputs[max(0, first - len(prompt)) :])]

    def depths_from(self, first: int, count: int) -> list[int]:
        """The depths of the forwards that read so many tokens from an index on, the prompt's at that of its end."""
        step = first + 1 - len(self.request.prompt_ids)
        return [self.request.policy.depth(max(0, step + place)) for place in range(count)]

    def count_computed(self, position: int, depths: list[int], num_hidden_layers: int) -> None:
        """Count tokens of a forward, from a position on, whose keys and values may be used again."""
        exact = position + depths.count(num_hidden_layers)  # the first ones
        computed = position + len(depths) if self.request.takes_filled else exact
        if position <= self.num_exact_tokens:
            self.num_exact_tokens = max(self.num_exact_tokens, exact)
        if position <= self.num_computed_tokens:
            self.num_computed_tokens = max(self.num_computed_tokens, computed)

    def propose(self, most: int) -> Draft | None:
        """Tokens that might come next, at most so many, as they followed the same tokens before."""
        if self.drafter is None:
            return None
        draft = self.drafter.propose(self.tokens_from(self.drafter.num_tokens), most)
        if draft is not None and self.token_filter is not None:
            draft = draft._replace(token_ids=draft.token_ids[: self.token_filter.num_allowed(draft.token_ids)])
        return draft if draft is not None and draft.token_ids else None

    def is_proposed(self, before: list[int], token_id: int, probability: float) -> bool:
        """Whether a token that is predicted with this probability, after proposed ones, is to be proposed too."""
        assert self.request.drafting is not None
        if not probability >= self.request.drafting.min_probability:  # or not a number
            return False
        return self.token_filter is None or self.token_filter.num_allowed([*before, token_id]) > len(before)

    def recover(self) -> None:
        """Return to the last committed token, after an interrupt while a token was being committed."""
        self.depth = self.request.policy.depth(self.step)
        self._begin()
        self.rng.random(self.step)  # `sample` draws one number a token
        for token_id in self.completion_ids:
            self.accept(token_id)
