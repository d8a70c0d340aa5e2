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
_MIN_TEMPERATURE, _LOWEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).min)
_FEW = 1024  # weights that take no time to sort or to sum up one by one
_NEGLIGIBLE = 1e-4  # probability of all tokens that nobody misses together
_FEW_CHOSEN, _FEW_SHARE = 64, 0.01  # up to this top_k, or from this min_p on, only probable tokens are chosen


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
        min_tokens: neither these nor `stop_token_ids` come before so many tokens; for texts without a schema or tools.
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
    min_tokens: int = 0
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
            "min_tokens": whole_number("min_tokens", self.min_tokens, 0),
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
        changes = self.has_penalties or self.logit_bias or self.min_tokens
        return self.temperature == 0 and self.logprobs is None and not changes

    def reach(self, vocab_size: int) -> float:
        """How far below the highest logit tokens matter; infinite if each may come, or log-probabilities are wanted.

        All tokens further below have less than `_NEGLIGIBLE` of the probability: as a rule if top_k or min_p leaves out
        all improbable ones, where the answer is 0, else for certain.
        """
        if self.logprobs is not None or self.temperature > 1 or self.raises_logits:
            return math.inf
        filtered = 0 < self.top_k <= _FEW_CHOSEN or (self.min_p >= _FEW_SHARE and self.top_p == 1)
        return 0.0 if filtered else self.temperature * math.log(vocab_size / _NEGLIGIBLE)

    @property
    def raises_logits(self) -> bool:
        """Whether bias or penalties may make a token more probable than the model does."""
        is_reward = self.repetition_penalty < 1 or self.presence_penalty < 0 or self.frequency_penalty < 0
        return is_reward or any(value > 0 for value in (self.logit_bias or {}).values())

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) of one step, the model's own: before penalties and temperature."""

    logprob: float
    top: dict[int, float]  # the most probable token ids, the first one first


class TokenCounts:
    """The different tokens of a prompt and its completion so far, for the penalties."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._places, np.int64)
        self._counts: np.ndarray = np.zeros(len(self._ids), np.int64)

    @property
    def ids(self) -> np.ndarray:
        """Token ids, each once: int64 [n]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of `ids` occurs in the completion: int64 [n]."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count a token of the completion."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (
                np.append(array, np.zeros(place + 64, np.int64)) for array in (self._ids, self._counts)
            )
        self._ids[place] = token_id
        self._counts[place] += 1


def sample(logits: np.ndarray, params: SamplingParams, rng: np.random.Generator, ids: np.ndarray | None = None) -> int:
    """The next token; `NOT_A_NUMBER` if the largest logit is not a finite number.

    `logits`, float32 [vocab_size], after `adjust`, are overwritten: after a step of a model nothing is in the
    processor's caches, and a copy would take as long as all that is computed here. `rng` draws one number if the
    temperature is above 0. With `ids`, ascending int64 [n], there are logits of these tokens only, float32 [n].
    """
    argmax = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[argmax]):
        return NOT_A_NUMBER
    if params.temperature == 0:
        place = argmax
    else:
        places, weights = token_weights(logits, params)
        drawn = _draw(weights, rng.random())
        place = drawn if places is None else int(places[drawn])
    return place if ids is None else int(ids[place])


def adjust(
    logits: np.ndarray, params: SamplingParams, counts: TokenCounts | None, ids: np.ndarray | None = None
) -> None:
    """Apply bias and penalties to logits, in place: of all tokens, or of `ids` only, as in `sample`.

    `counts` has the tokens before, if there are penalties.
    """
    if params.logit_bias:
        tokens, places = _places(np.array(list(params.logit_bias), np.int64), ids)
        logits[places] += np.array(list(params.logit_bias.values()), np.float32)[tokens]
    if params.has_penalties and counts is not None:
        seen, places = _places(counts.ids, ids)
        logits[places] = _penalised(logits[places], params, counts.counts[seen])


def _places(tokens: np.ndarray, ids: np.ndarray | None) -> tuple[np.ndarray | slice, np.ndarray]:
    """Which of some tokens are among ascending `ids`, and where; without `ids`, all of them are where they are."""
    if ids is None:
        return slice(None), tokens
    places = ids.searchsorted(tokens)
    np.minimum(places, len(ids) - 1, out=places)
    found = (ids[places] == tokens).nonzero()[0]
    return found, places[found]


def token_weights(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    """The tokens that may come next, and weights proportional to their probabilities.

    Of equally probable tokens, top_k and top_p keep those with lower ids. Nothing is sorted, as that would take longer
    than a step of a small model: a threshold for each filter comes from a partition.

    Args:
        logits: float32 [vocab_size], the largest of them finite; overwritten.
        params: the temperature, above 0, and the filters.

    Returns:
        Token ids in ascending order, int64 [n], None for the whole vocabulary; and their weights, float32 [n], the
        largest of them 1.
    """
    ids = None
    if 0 < params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore"):  # to -inf, whose weight is 0
        logits -= logits.max()
        if params.temperature != 1:
            logits /= max(params.temperature, _MIN_TEMPERATURE)
    weights: np.ndarray = np.exp(logits, out=logits)
    if params.top_p < 1:
        nucleus = _nucleus(weights, params.top_p)
        ids, weights = nucleus if ids is None else ids[nucleus], weights[nucleus]
    if params.min_p > 0:
        probable = (weights >= params.min_p).nonzero()[0]
        ids, weights = probable if ids is None else ids[probable], weights[probable]
    return ids, weights


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, -inf excluded; of equal ones, the first. Ascending: int64 [n]."""
    columns, bound, indices, few = max(_FEW, 4 * count), _LOWEST, None, values
    if rows := len(values) // columns:
        # `count` columns hold a value from the bound on, so smaller values need no partition.
        maxima = values[: rows * columns].reshape(rows, columns).max(0)
        maxima.partition(columns - count)
        indices = (values >= max(bound, maxima[columns - count])).nonzero()[0]
        few = values[indices]
    place = max(len(few) - count, 0)
    least = max(bound, np.partition(few, place)[place])
    largest = _at_least(few, least, count).nonzero()[0]
    return largest if indices is None else indices[largest]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the fewest of the largest weights that reach the share `top_p` of their sum, ascending: int64 [n]."""
    total, size = np.add.reduce(weights, dtype=np.float64), 0
    missing, indices, few = top_p * total, None, weights
    if len(weights) > _FEW:
        # All weights below this one together are less than half of what may be left out.
        indices = (weights > (1 - top_p) * total / 2 / len(weights)).nonzero()[0]
        few = weights[indices]
    values = few
    while len(values) > _FEW:  # halve the values among which the sum reaches the share
        middle = len(values) // 2
        values = np.partition(values, middle)
        upper = values[middle:].sum(dtype=np.float64)
        if upper >= missing:
            values = values[middle:]
        else:
            missing, size, values = missing - upper, size + len(values) - middle, values[:middle]
    values = np.sort(values)[::-1]
    last = min(int(values.cumsum(dtype=np.float64).searchsorted(missing)), len(values) - 1)
    nucleus = _at_least(few, values[last], size + last + 1).nonzero()[0]
    return nucleus if indices is None else indices[nucleus]


def _at_least(values: np.ndarray, least: float, count: int) -> np.ndarray:
    """Which values are at least `least`; of those equal to it, only the first, so that there are `count`: bool [n]."""
    kept: np.ndarray = values >= least
    if (excess := np.count_nonzero(kept) - count) > 0:
        kept[(values == least).nonzero()[0][-excess:]] = False
    return kept


def _draw(weights: np.ndarray, share: float) -> int:
    """The index at which the cumulative sum of the weights passes `share`, from [0, 1), of their sum."""
    if len(weights) <= _FEW:
        sums = weights.cumsum(dtype=np.float64)
        return _passed(sums, share * sums[-1])
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _FEW)).cumsum(dtype=np.float64)
    point = share * sums[-1]
    block = _passed(sums, point)
    before = sums[block - 1] if block else 0.0
    first = block * _FEW
    return first + _passed(weights[first : first + _FEW].cumsum(dtype=np.float64), point - before)


def _passed(sums: np.ndarray, point: float) -> int:
    """The first place whose sum is above a point, or the last one that adds to the sums."""
    return int(sums.searchsorted(min(point, math.nextafter(sums[-1], 0)), side="right"))


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise a RequestError if a model does not have all of these ids."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {vocab_size}")


def token_logprobs(logits: np.ndarray, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the `top` most probable ones, from logits float32 [vocab_size]."""
    highest = float(logits.max())
    total = highest + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    ids = _largest(logits, min(top, len(logits))) if top else np.empty(0, np.int64)
    best = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return TokenLogprobs(float(logits[token_id]) - total, {i: float(logits[i]) - total for i in best})


def _penalised(values: np.ndarray, params: SamplingParams, counted: np.ndarray) -> np.ndarray:
    """Logits float32 [n] of tokens that came before, with the penalties; `counted`: how often in the completion."""
    if params.repetition_penalty != 1:
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        values -= params.presence_penalty * (counted > 0) + params.frequency_penalty * counted
    return values
