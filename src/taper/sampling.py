"""From logits to a token: `SamplingParams` says how, `sample` does it. Knows numpy arrays only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen and when it ends. Temperature 0, the default, is greedy.

    Penalties come first, then temperature, top_k, top_p and min_p, each on what the one before left.

    Args:
        max_tokens: most tokens of an answer, from 1.
        temperature: 0 for greedy, else divides the logits.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer; above 0.
        presence_penalty: taken from the logits of tokens in the answer, in [-2, 2].
        frequency_penalty: taken from them once for each time they occur, in [-2, 2].
        seed: makes sampling repeatable.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: go on past the model's own stop ids.
        logprobs: report log-probabilities of the chosen token and of this many likeliest ones, 0 to 20.

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
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        rules = [
            ("max_tokens", _whole(self.max_tokens, 1), "a whole number from 1"),
            ("temperature", _within(self.temperature, 0, 100), "from 0 to 100"),
            ("top_k", _whole(self.top_k, 0), "a whole number from 0 (0: all)"),
            ("top_p", _within(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
            ("min_p", _within(self.min_p, 0, 1), "in [0, 1]"),
            ("repetition_penalty", _within(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", _within(self.presence_penalty, -2, 2), "in [-2, 2]"),
            ("frequency_penalty", _within(self.frequency_penalty, -2, 2), "in [-2, 2]"),
            ("seed", self.seed is None or _whole(self.seed, 0), "a whole number from 0"),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "texts that are not empty"),
            ("stop_token_ids", all(_whole(i, 0) for i in self.stop_token_ids), "token ids"),
            (
                "logprobs",
                self.logprobs is None or (_whole(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS),
                f"a whole number from 0 to {MAX_LOGPROBS}",
            ),
        ]
        for name, ok, rule in rules:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {rule}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) of one step, the model's own: before penalties and temperature."""

    logprob: float
    top: dict[int, float]  # likeliest token ids, best first


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    rng: np.random.Generator,
) -> int:
    """Choose the next token.

    Args:
        logits: float32 [vocab_size]; left unchanged.
        params: how to choose.
        prompt_ids: the prompt, for the repetition penalty.
        answer_ids: the answer so far, for all penalties.
        rng: randomness, used when the temperature is above 0.
    """
    logits = _penalise(logits, params, prompt_ids, answer_ids)
    if params.temperature == 0:
        return int(logits.argmax())
    ids: np.ndarray = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        ids = np.argpartition(logits, -params.top_k)[-params.top_k :]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    scaled = logits[ids].astype(np.float64)
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


def token_logprobs(logits: np.ndarray, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of a chosen token and of the `top` likeliest ones, from logits float32 [vocab_size]."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    best = np.argsort(-scores, kind="stable")[:top].tolist()
    return TokenLogprobs(float(scores[token_id]), {i: float(scores[i]) for i in best})


def _penalise(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> np.ndarray:
    repeats = params.repetition_penalty != 1
    if not repeats and params.presence_penalty == 0 and params.frequency_penalty == 0:
        return logits
    logits = logits.copy()
    if repeats:
        seen = np.unique(np.concatenate([prompt_ids, answer_ids]).astype(np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if answer_ids:
        used, counts = np.unique(np.asarray(answer_ids, dtype=np.int64), return_counts=True)
        logits[used] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
