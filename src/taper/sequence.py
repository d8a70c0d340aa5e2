"""What the engine works on: requests, the sequences they become, what is scheduled of them, and what comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from .policy import DepthPolicy
from .sampling import SamplingParams, TokenLogprobs


class TokenFilter(Protocol):
    """Says which tokens may come next in one completion, such as those that keep it valid JSON."""

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits float32 [vocab_size], with -inf for the tokens that may not come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Take note of the token that came."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and how to complete it.

    `eos_token_ids` are the model's own; `params` may add to them. `token_filter` makes the filter of its completion.
    """

    prompt_ids: tuple[int, ...] | list[int]
    params: SamplingParams
    policy: DepthPolicy
    eos_token_ids: frozenset[int] = frozenset()
    token_filter: Callable[[], TokenFilter] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token of the model's own logits is all that is asked for."""
        return self.params.is_greedy and self.token_filter is None


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine, which alone changes it."""

    id: int
    request: Request
    token_ids: list[int]  # the prompt, then the completion
    depth: int  # layers of the forward that predicts the next token: set by the schedule, after each token
    slot: int | None = None  # of the key-value cache; None while it waits and once it has finished
    num_complete_tokens: int = 0  # leading tokens whose keys and values every layer has
    num_cached_tokens: int = 0  # of the prompt, that were not computed for this sequence
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    thread: int = field(default_factory=threading.get_ident)
    rng: np.random.Generator = field(init=False)
    token_filter: TokenFilter | None = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.request.params.seed)
        self.token_filter = self.request.token_filter and self.request.token_filter()

    @property
    def step(self) -> int:
        """Index of the next token of the completion."""
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class StepOutput:
    """One token of a sequence, the stop token included.

    `token_id` is -1, with `finish_reason` "error", if the model's output was not a number or its filter let none pass.
    """

    sequence_id: int
    token_id: int
    depth: int
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None


class Scheduled(NamedTuple):
    """Tokens of one sequence in a forward."""

    sequence: Sequence
    token_ids: list[int]
    position: int  # of the first
    depths: list[int]  # of each, never rising
    num_outputs: int  # of how many last ones the prediction is wanted
