"""What the engine works on: requests, the sequences they become, what is scheduled of them, and what comes out."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .policy import DepthPolicy
from .sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Request:
    """A prompt and how to complete it. `eos_token_ids` are the model's own; `params` may add to them."""

    prompt_ids: tuple[int, ...] | list[int]
    params: SamplingParams
    policy: DepthPolicy
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine, which alone changes it."""

    id: int
    request: Request
    token_ids: list[int]  # the prompt, then the completion
    depth: int  # layers of the forward that predicts the next token: set by the schedule, after each token
    rng: np.random.Generator
    slot: int | None = None  # of the key-value cache; None while it waits and once it has finished
    num_complete_tokens: int = 0  # leading tokens whose keys and values every layer has
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    thread: int = field(default_factory=threading.get_ident)

    @property
    def step(self) -> int:
        """Index of the next token of the completion."""
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class StepOutput:
    """One token of a sequence, the stop token included.

    `token_id` is -1, with `finish_reason` "error", if the model's output was not a number.
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
