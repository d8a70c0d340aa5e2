"""The policy for a budget: of curves along an order of layers, the best by forecast are replayed.

`curves` and `curves_of_speed` make the candidates, `LossTable` forecasts them, `fit_quality` and `fit_speed` choose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import RequestError
from ..policy import DepthPolicy, Schedule
from .clock import CostModel
from .replay import Scores
from .statistics import Loss, over_steps
from .summary import Budget

ATTEMPTS = 4  # candidates replayed for a quality budget
_STARTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # where the fall may begin, and how long it may last, in answers
_SPANS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
_FALLING = ("linear", "power")
_PLACES = 4  # parts of an answer whose loss is told apart

# What a policy costs on the search prompts.
Replayed = Callable[[DepthPolicy], Scores]


def shape(
    curve: str, num_hidden_layers: int, min_depth: int, skip_order: Sequence[int], start: int, span: int = 0
) -> DepthPolicy:
    """A curve that falls from `start` on to `min_depth` within `span` steps; a constant one falls at once."""
    numbers: dict[str, float] = {}
    if curve == "linear":
        numbers = {"span": span}
    elif curve == "power":
        numbers = {"alpha": math.floor((min_depth / num_hidden_layers) ** (1 / span) * 1e6) / 1e6}
    schedule = Schedule(num_hidden_layers, curve, min_depth, start=start, **numbers)  # type: ignore[arg-type]
    return DepthPolicy(schedule, tuple(skip_order))


def curves(skip_order: Sequence[int], searched: int, num_hidden_layers: int, max_tokens: int) -> list[DepthPolicy]:
    """Policies of every curve that skip at most the first `searched` layers of an order, over `max_tokens` tokens."""
    spans = sorted({max(1, round(part * max_tokens)) for part in _SPANS})
    policies = []
    for min_depth in range(num_hidden_layers - 1, num_hidden_layers - searched - 1, -1):
        for start in _starts(max_tokens):
            falls = [("constant", 0), *((curve, span) for curve in _FALLING for span in spans)]
            policies += [shape(curve, num_hidden_layers, min_depth, skip_order, start, span) for curve, span in falls]
    return policies


def curves_of_speed(
    skip_order: Sequence[int],
    searched: int,
    num_hidden_layers: int,
    max_tokens: int,
    speedup: float,
    cost: CostModel,
) -> list[DepthPolicy]:
    """As `curves`, each falling as late or as slowly as a predicted speedup lets it.

    Raises:
        RequestError: none is that fast.
    """

    def most_steps(stretched: Callable[[int], DepthPolicy]) -> int:
        """The largest number at which the policy still is that fast; 0 if it never is."""
        steps = range(1, 8 * max_tokens + 1)
        return bisect_left(steps, True, key=lambda n: cost.speedup(stretched(n), max_tokens) < speedup)

    policies: list[DepthPolicy] = []
    for skipped in range(1, searched + 1):
        facts = (num_hidden_layers, num_hidden_layers - skipped, skip_order)
        # Functions of a number of steps, the start or the span: the larger it is, the slower is the policy.
        stretches = [partial(shape, "constant", *facts)]
        stretches += [partial(shape, curve, *facts, start) for start in _starts(max_tokens) for curve in _FALLING]
        policies += [stretched(steps) for stretched in stretches if (steps := most_steps(stretched))]
    if not policies:
        lowest = shape("constant", num_hidden_layers, num_hidden_layers - searched, skip_order, 0)
        highest = cost.speedup(lowest, max_tokens)
        raise RequestError(
            f"no policy of this model is predicted to be {speedup}x as fast over {max_tokens} tokens",
            f"the most that its flex layers give is {math.floor(highest * 100) / 100}x",
        )
    return policies


def _starts(max_tokens: int) -> list[int]:
    return sorted({round(part * max_tokens) for part in _STARTS})


class Forecast(NamedTuple):
    """What a policy should cost, with no interval; step 0 left out, as it never skips a layer."""

    all_steps: Loss
    tapered_steps: Loss


class LossTable:
    """Mean loss by depth and place in the answer: of constant depths as measured, in between by a straight line."""

    def __init__(self, measured: dict[int, Scores], num_hidden_layers: int, max_tokens: int) -> None:
        self._layers, self._tokens = num_hidden_layers, max_tokens
        depths = sorted(measured)
        # [depths + 1, places, (KL, disagreement, NLL rise, NLL at full depth)]
        known = np.stack([self._places(measured[depth]) for depth in depths] + [self._places(measured[depths[0]]) * 0])
        known[-1, :, 3] = known[0, :, 3]
        flat = known.reshape(len(known), -1)
        between = [np.interp(range(num_hidden_layers + 1), [*depths, num_hidden_layers], column) for column in flat.T]
        self._table = np.stack(between, -1).reshape(-1, *known.shape[1:])

    def predict(self, policy: DepthPolicy) -> Forecast:
        """What a policy should cost."""
        steps = np.arange(1, self._tokens)
        depths = np.array([policy.depth(step) for step in steps.tolist()])
        losses = self._table[depths, self._place(steps)]
        return Forecast(_mean(losses), _mean(losses[depths < self._layers]))

    def _place(self, steps: np.ndarray) -> np.ndarray:
        place: np.ndarray = np.minimum(steps * _PLACES // self._tokens, _PLACES - 1)
        return place

    def _places(self, scores: Scores) -> np.ndarray:
        """Means of each place of an answer; a place without steps takes those of all: [places, 4]."""
        losses = np.stack([scores.kl, 1 - scores.agreement, scores.nll - scores.nll_full, scores.nll_full], -1)
        places = self._place(scores.step)
        after_first = scores.step > 0
        chosen = (after_first & (places == place) for place in range(_PLACES))
        return np.stack([losses[steps if steps.any() else after_first].mean(0) for steps in chosen])


def fit_quality(
    budget: Budget, candidates: Sequence[DepthPolicy], table: LossTable, max_tokens: int, replay: Replayed
) -> DepthPolicy:
    """The policy of least mean depth whose replayed loss keeps the budget, intervals included; else the nearest to it.

    Time plays no part: it falls with mean depth, and a quality budget gives the same policy on every machine.
    """
    depth = [policy.mean_depth(max_tokens) for policy in candidates]
    forecast = [budget.worst_share(table.predict(policy).tapered_steps) for policy in candidates]
    replayed: dict[int, float] = {}  # the largest share of a limit that each candidate took, at the bad end
    margin = 1.0  # replayed over forecast
    for _ in range(ATTEMPTS):
        kept = [i for i, share in replayed.items() if share <= 1]
        faster = [i for i in range(len(candidates)) if i not in replayed and all(depth[i] < depth[k] for k in kept)]
        promising = [i for i in faster if forecast[i] * margin <= 1]
        if promising:
            chosen = min(promising, key=lambda i: depth[i])
        else:  # the gentlest of all might keep it, where none has
            chosen = min(range(len(candidates)), key=lambda i: forecast[i])
            if kept or chosen in replayed:
                break
        tapered = over_steps(replay(candidates[chosen])).tapered_steps
        if tapered is None:  # too few steps to judge it, or to tell anything of the table
            replayed[chosen] = math.inf
        else:
            replayed[chosen] = budget.worst_share(tapered.worst)
            # A hair of safety: the next should keep the budget.
            margin = 1.01 * replayed[chosen] / max(forecast[chosen], 1e-9)
    kept = [i for i, share in replayed.items() if share <= 1]
    return candidates[min(kept, key=lambda i: depth[i]) if kept else min(replayed, key=lambda i: replayed[i])]


def fit_speed(
    candidates: Sequence[DepthPolicy],
    harmless: int,
    table: LossTable,
    replay: Replayed,
    harm: Callable[[DepthPolicy], float],
) -> DepthPolicy:
    """Of policies that are equally fast, one that skips few layers early or more of them late: what does less `harm`.

    From the fewest layers on that reach the speed, one more is skipped as long as the replayed KL over all steps falls.
    This is compared with stopping at the first `harmless` layers, or at those fewest if they are more.
    """
    path: list[DepthPolicy] = []
    lowest = math.inf
    for min_depth in sorted({policy.min_depth for policy in candidates}, reverse=True):
        equal = (policy for policy in candidates if policy.min_depth == min_depth)
        policy = min(equal, key=lambda policy: table.predict(policy).all_steps.kl)
        kl = float(replay(policy).kl.mean())
        if kl >= lowest:
            break
        path.append(policy)
        lowest = kl
    least = min(path[0].min_depth, path[0].num_hidden_layers - harmless)
    few, many = [policy for policy in path if policy.min_depth >= least][-1], path[-1]
    return few if few == many else min(few, many, key=harm)


def _mean(losses: np.ndarray) -> Loss:
    """The mean over steps, [steps, 4]; no loss where there are none."""
    kl, disagreement, rise, nll = losses.sum(0).tolist()
    count = max(1, len(losses))
    return Loss(kl / count, 1 - disagreement / count, 100 * rise / max(nll, 1e-9))
