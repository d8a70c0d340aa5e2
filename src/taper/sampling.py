"""From logits to a token: `SamplingParams` says how, `sample` does it. Knows numpy arrays only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import RequestError, as_tuple, flag, number, shown, whole_number

MAX_LOGPROBS = 20
NOT_A_NUMBER = -1  # instead of a token id


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a completion are chosen, and when it ends. Temperature 0, the default, is greedy.

    The bias and the penalties come first, then temperature, top_k, top_p and min_p, in this order.

    Args:
        max_tokens: most tokens of a completion, from 1.
        temperature: 0 for greedy, else divides the logits.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens that have at least this fraction of the highest probability, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and completion, in
            [0.01, 100].
        presence_penalty: subtracted from the logits of tokens in the completion, in [-2, 2].
        frequency_penalty: subtracted from them once for each time they occur, in [-2, 2].
        logit_bias: added to the logits of these token ids, each in [-100, 100]; None for none.
        seed: makes sampling repeatable.
        stop: a text or texts that end the completion, and are not part of it; None for none.
        stop_token_ids: ids that end the completion, besides the model's own; None for none.
        ignore_eos: go on past the model's own stop ids.
        logprobs: report log-probabilities of the chosen token and of this many most probable ones, 0 to 20.

    Raises:
        RequestError: a value out of its range.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", () if self.stop is None else self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop is {shown(self.stop)}; it must be texts that are not empty")
        stop_token_ids = as_tuple("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias is {shown(bias)}; it must be numbers by token id")
        checked: dict[str, Any] = {
            "stop": stop,
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "max_tokens": whole_number("max_tokens", self.max_tokens, 1),
            "temperature": number("temperature", self.temperature, 0, 100),
            "top_k": whole_number("top_k", self.top_k, 0),
            "top_p": number("top_p", self.top_p, 0, 1, above=True),
            "min_p": number("min_p", self.min_p, 0, 1),
            "repetition_penalty": number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": {
                whole_number("a token id of logit_bias", i, 0): number("a value of logit_bias", value, -100, 100)
                for i, value in bias.items()
            },
            "seed": None if self.seed is None else whole_number("seed", self.seed, 0),
            "stop_token_ids": tuple(whole_number("a stop token id", i, 0) for i in stop_token_ids),
            "logprobs": None if self.logprobs is None else whole_number("logprobs", self.logprobs, 0, MAX_LOGPROBS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax of the model's own logits is all that is asked for."""
        return self.temperature == 0 and self.logprobs is None and not (self.has_penalties or self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) of one step, the model's own: before penalties and temperature."""

    logprob: float
    top: dict[int, float]  # the most probable token ids, the first one first


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    rng: np.random.Generator,
) -> int:
    """The next token, from logits float32 [vocab_size]; `NOT_A_NUMBER` if the largest is not a finite number.

    The tokens before are for the penalties, `rng` is for temperatures above 0.
    """
    if params.logit_bias:
        logits = logits.copy()
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    logits = _penalise(logits, params, prompt_ids, completion_ids)
    argmax = int(logits.argmax())  # the first NaN, if there is one
    if not np.isfinite(logits[argmax]):
        return NOT_A_NUMBER
    if params.temperature == 0:
        return argmax
    ids: np.ndarray = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        ids = np.argpartition(logits, -params.top_k)[-params.top_k :]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    scaled = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # to -inf, whose probability is 0
        scaled = (scaled - scaled[0]) / params.temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        keep = int(np.searchsorted(probabilities.cumsum(), params.top_p)) + 1
        probabilities = probabilities[:keep]
    probabilities = probabilities[probabilities >= params.min_p * probabilities[0]]
    cumulative = probabilities.cumsum()
    draw = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(ids[min(draw, len(probabilities) - 1)])


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that a model has these ids.

    Raises:
        RequestError: it has not.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {vocab_size}")


def token_logprobs(logits: np.ndarray, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the `top` most probable ones, from logits float32 [vocab_size]."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    best = np.argsort(-scores, kind="stable")[:top].tolist()
    return TokenLogprobs(float(scores[token_id]), {i: float(scores[i]) for i in best})


def _penalise(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], completion_ids: Sequence[int]
) -> np.ndarray:
    if not params.has_penalties:
        return logits
    logits = logits.copy()
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate([prompt_ids, completion_ids]).astype(np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if completion_ids:
        used, counts = np.unique(np.asarray(completion_ids, dtype=np.int64), return_counts=True)
        logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    return logits
