"""The curve for a budget: how deep, how soon, given an order of layers and what skipping them costs by step.

A table of the loss at a few constant depths predicts that of any curve; the best predicted ones are then replayed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from ..errors import RequestError
from ..policy import DepthPolicy
from ..replay import Scores
from .cost import CostModel
from .statistics import Estimate, over_steps

ATTEMPTS = 4  # curves replayed for a quality budget
FINALISTS = 3  # curves replayed for a speed
_PLACES = 4  # parts of an answer whose loss is told apart
_STARTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # where the fall may begin, and how long it may last, in answers
_SPANS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)

# What a curve costs on the search prompts.
Replayed = Callable[[DepthPolicy], Scores]


@dataclass(frozen=True)
class Budget:
    """What a policy must keep to, over tapered steps; or the speed to reach at the best quality.

    Args:
        max_kl: mean KL(full || policy), nats, above 0.
        min_agreement: share of steps whose likeliest token is that of full depth, in (0, 1].
        max_nll_increase: rise of the NLL of full depth's own answers, per cent, above 0.
        speedup: predicted time per token at full depth over that of the policy, above 1.

    Raises:
        RequestError: a number out of its range, none at all, or speed and quality both.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    max_nll_increase: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        rules: list[tuple[str, Callable[[float], bool], str]] = [
            ("max_kl", lambda x: x > 0, "above 0"),
            ("min_agreement", lambda x: 0 < x <= 1, "in (0, 1]"),
            ("max_nll_increase", lambda x: x > 0, "above 0 per cent"),
            ("speedup", lambda x: 1 < x <= 100, "above 1 (1.2: a fifth faster) and at most 100"),
        ]
        for name, holds, rule in rules:
            value = getattr(self, name)
            if value is not None and not holds(value):  # NaN holds nothing
                raise RequestError(f"{name} is {value}; it must be {rule}")
        if self.speedup is not None and len(self.given) > 1:
            raise RequestError(
                "a speed and a quality cannot both be asked for",
                "leave out --speedup, or leave out --max-kl, --min-agreement and --max-nll-increase",
            )
        if not self.given:
            raise RequestError("no budget", "give --max-kl, --min-agreement, --max-nll-increase or --speedup")

    @property
    def given(self) -> dict[str, float]:
        """The limits that were set."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def worst(self, found: dict[str, Estimate] | None, surely: bool = False) -> float:
        """The largest of loss / limit over the quality limits: at most 1 where they are kept, 0 where none is set.

        Args:
            found: what was measured over tapered steps; None where there were too few.
            surely: take the bad end of each interval.
        """
        if found is None:
            return 0.0 if self.speedup is not None else math.inf
        parts = [0.0]
        if self.max_kl is not None:
            parts.append((found["kl"].high if surely else found["kl"].value) / self.max_kl)
        if self.min_agreement is not None:
            agreement = found["agreement"].low if surely else found["agreement"].value
            parts.append((1 - agreement) / max(1 - self.min_agreement, 1e-9))
        if self.max_nll_increase is not None:
            rise = found["nll_increase"].high if surely else found["nll_increase"].value
            parts.append(rise / self.max_nll_increase)
        return max(parts)


class LossTable:
    """Mean loss by depth and place in the answer, between the depths that were measured a straight line."""

    def __init__(self, measured: dict[int, Scores], layers: int, tokens: int) -> None:
        self._layers, self._tokens = layers, tokens
        depths = sorted(measured)
        # [depths + 1, places, (KL, disagreement, NLL rise, NLL at full depth)]
        known = np.stack([self._places(measured[depth]) for depth in depths] + [self._places(measured[depths[0]]) * 0])
        known[-1, :, 3] = known[0, :, 3]
        every = np.arange(layers + 1)
        flat = known.reshape(len(known), -1)
        rows = [np.interp(every, [*depths, layers], column) for column in flat.T]
        self._table = np.stack(rows, -1).reshape(len(every), *known.shape[1:])

    def predict(self, policy: DepthPolicy) -> tuple[dict[str, Estimate], float]:
        """What a policy should cost over its tapered steps, and its KL over all steps."""
        steps = np.arange(1, self._tokens)
        depths = np.array([policy.depth(step) for step in steps.tolist()])
        cost = self._table[depths, self._place(steps)]
        tapered = cost[depths < self._layers]
        kl, disagreement, rise, nll = tapered.sum(0)
        count = max(1, len(tapered))
        values = {"kl": kl / count, "agreement": 1 - disagreement / count, "nll_increase": 100 * rise / max(nll, 1e-9)}
        return {name: Estimate(value, value, value) for name, value in values.items()}, float(cost[:, 0].mean())

    def _place(self, steps: np.ndarray) -> np.ndarray:
        place: np.ndarray = np.minimum(steps * _PLACES // self._tokens, _PLACES - 1)
        return place

    def _places(self, scores: Scores) -> np.ndarray:
        """Means of each place of an answer; a place without steps takes those of all: [places, 4]."""
        losses = np.stack([scores.kl, 1 - scores.agreement, scores.nll - scores.nll_full, scores.nll_full], -1)
        place = self._place(scores.step)
        tapered = scores.step > 0
        means = []
        for which in range(_PLACES):
            chosen = tapered & (place == which)
            means.append(losses[chosen if chosen.any() else tapered].mean(0))
        return np.stack(means)


def shape(curve: str, layers: int, least: int, order: Sequence[int], start: int, span: int) -> DepthPolicy:
    """A curve that falls from `start` on to `least` layers within `span` steps; a constant one at once."""
    numbers: dict[str, float] = {}
    if curve == "linear":
        numbers = {"span": span}
    elif curve == "power":
        numbers = {"alpha": math.floor((least / layers) ** (1 / span) * 1e6) / 1e6}
    return DepthPolicy(layers, curve, least, tuple(order), start=start, **numbers)  # type: ignore[arg-type]


def _constant(layers: int, least: int, order: Sequence[int], start: int) -> DepthPolicy:
    return shape("constant", layers, least, order, start, 0)


def curves(order: Sequence[int], deepest: int, layers: int, tokens: int) -> list[DepthPolicy]:
    """Policies of every curve that skip at most the first `deepest` layers of an order."""
    starts = sorted({round(part * tokens) for part in _STARTS})
    spans = sorted({max(1, round(part * tokens)) for part in _SPANS})
    found = []
    for least in range(layers - 1, layers - deepest - 1, -1):
        for start in starts:
            found.append(shape("constant", layers, least, order, start, 0))
            found += [shape(c, layers, least, order, start, span) for c in ("linear", "power") for span in spans]
    return found


def curves_of_speed(
    order: Sequence[int], deepest: int, layers: int, tokens: int, speedup: float, cost: CostModel
) -> list[DepthPolicy]:
    """As `curves`, each as slow to fall as a predicted speedup lets it.

    Raises:
        RequestError: none is that fast.
    """
    starts = sorted({round(part * tokens) for part in _STARTS})
    found = []
    for least in range(layers - 1, layers - deepest - 1, -1):
        stretches = [partial(_constant, layers, least, order)]
        stretches += [partial(shape, c, layers, least, order, start) for start in starts for c in ("linear", "power")]
        for stretched in stretches:
            slowest = _last(lambda steps: cost.speedup(stretched(steps), tokens) >= speedup, 8 * tokens)  # noqa: B023
            if slowest:
                found.append(stretched(slowest))
    if not found:
        most = cost.speedup(shape("constant", layers, layers - deepest, order, 0, 0), tokens)
        raise RequestError(
            f"no policy of this model is predicted to be {speedup}x as fast over {tokens} tokens",
            f"the most that its flex layers give is {math.floor(most * 100) / 100}x",
        )
    return found


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The last of 1 to `most` for which something holds that holds only up to there; 0 where it never does."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not holds(n))


def fit_quality(
    budget: Budget, every: Sequence[DepthPolicy], table: LossTable, tokens: int, replay: Replayed
) -> DepthPolicy:
    """The policy of least mean depth whose replayed loss keeps the budget, intervals included; else the nearest to it.

    Time plays no part: it falls with mean depth, and a quality budget gives the same policy on every machine.
    """
    depth = [policy.mean_depth(tokens) for policy in every]
    predicted = [budget.worst(table.predict(policy)[0]) for policy in every]
    tried: dict[int, float] = {}
    margin = 1.0  # replayed over predicted
    for _ in range(ATTEMPTS):
        kept = [i for i, found in tried.items() if found <= 1]
        faster = [i for i in range(len(every)) if i not in tried and all(depth[i] < depth[k] for k in kept)]
        promising = [i for i in faster if predicted[i] * margin <= 1]
        if promising:
            chosen = min(promising, key=lambda i: depth[i])
        else:  # the gentlest of all might keep it, where none has
            chosen = min(range(len(every)), key=lambda i: predicted[i])
            if kept or chosen in tried:
                break
        tried[chosen] = budget.worst(over_steps(replay(every[chosen])).get("tapered steps"), surely=True)
        if math.isfinite(tried[chosen]):  # too few tapered steps tell nothing of the table
            # A hair of safety: the next should keep the budget.
            margin = 1.01 * tried[chosen] / max(predicted[chosen], 1e-9)
    kept = [i for i, found in tried.items() if found <= 1]
    return every[min(kept, key=lambda i: depth[i]) if kept else min(tried, key=lambda i: tried[i])]


def fit_speed(every: Sequence[DepthPolicy], table: LossTable, replay: Replayed) -> DepthPolicy:
    """Of policies that are equally fast, the one of the lowest replayed KL over all steps."""
    best = sorted(every, key=lambda policy: table.predict(policy)[1])[:FINALISTS]
    return min(best, key=lambda policy: float(replay(policy).kl.mean()))
