"""The curve for a budget or a speed: of power curves along an order of layers, the best by forecast are replayed.

`power_curves` and `power_curves_of_speed` make candidates, `LossTable` forecasts their loss, `fit_quality` and
`fit_speed` choose. Other curves cannot be told from the power law at equal mean depth, so they are not searched.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import RequestError
from ..policy import DepthPolicy
from .clock import CostModel
from .replay import Scores
from .statistics import Loss, over_steps
from .summary import Budget

ATTEMPTS = 4  # candidates that are replayed for a quality budget
_STARTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # where the fall may begin, and how long it may last, in outputs
_SPANS = (1 / 128, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
_PLACES = 4  # parts of an output whose losses are kept apart

Replayed = Callable[[DepthPolicy], Scores]  # what a policy costs on the search prompts
Score = Callable[[DepthPolicy], float]  # by how many standard errors it solves fewer problems


def power_curve(
    num_hidden_layers: int, min_depth: int, skip_order: Sequence[int], start: int, span: int
) -> DepthPolicy:
    """A power curve that falls from `start` on to `min_depth` within `span` steps."""
    alpha = math.floor((min_depth / num_hidden_layers) ** (1 / span) * 1e6) / 1e6
    return DepthPolicy.d3(num_hidden_layers, alpha, start, min_depth, skip_order)


def power_curves(skip_order: Sequence[int], most: int, num_hidden_layers: int, max_tokens: int) -> list[DepthPolicy]:
    """Policies that skip at most the first `most` layers of an order, over outputs of `max_tokens` tokens."""
    spans = sorted({max(1, round(part * max_tokens)) for part in _SPANS})
    return [
        power_curve(num_hidden_layers, min_depth, skip_order, start, span)
        for min_depth in range(num_hidden_layers - 1, num_hidden_layers - most - 1, -1)
        for start in _starts(max_tokens)
        for span in spans
    ]


def power_curves_of_speed(
    skip_order: Sequence[int], most: int, num_hidden_layers: int, max_tokens: int, speedup: float, cost: CostModel
) -> list[DepthPolicy]:
    """As `power_curves`, but each falls as slowly as a predicted speedup lets it.

    Raises:
        RequestError: none is that fast.
    """
    policies: list[DepthPolicy] = []
    spans = range(1, 8 * max_tokens + 1)
    for skipped in range(1, most + 1):
        for start in _starts(max_tokens):

            def policy(span: int, min_depth: int = num_hidden_layers - skipped, start: int = start) -> DepthPolicy:
                return power_curve(num_hidden_layers, min_depth, skip_order, start, span)

            longest = bisect_left(spans, True, key=lambda span: cost.speedup(policy(span), max_tokens) < speedup)
            policies += [policy(longest)] if longest else []
    if not policies:
        lowest = power_curve(num_hidden_layers, num_hidden_layers - most, skip_order, 0, 1)
        highest = cost.speedup(lowest, max_tokens)
        raise RequestError(
            f"no policy of this model is predicted to be {speedup}x as fast over {max_tokens} tokens",
            f"the most that its flex layers give is {math.floor(highest * 100) / 100}x",
        )
    return policies


def _starts(max_tokens: int) -> list[int]:
    return sorted({round(part * max_tokens) for part in _STARTS})


class Forecast(NamedTuple):
    """The expected loss of a policy, with no interval; step 0 is left out, as it never skips a layer."""

    all_steps: Loss
    tapered_steps: Loss


class LossTable:
    """Mean loss by depth and place in the output: measured at constant depths, interpolated between them."""

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
        """The expected loss of a policy."""
        steps = np.arange(1, self._tokens)
        depths = np.array([policy.depth(step) for step in steps.tolist()])
        losses = self._table[depths, self._place(steps)]
        return Forecast(_mean(losses), _mean(losses[depths < self._layers]))

    def _place(self, steps: np.ndarray) -> np.ndarray:
        place: np.ndarray = np.minimum(steps * _PLACES // self._tokens, _PLACES - 1)
        return place

    def _places(self, scores: Scores) -> np.ndarray:
        """Means of each place of an output, [places, 4]; a place without steps takes those of all."""
        losses = np.stack([scores.kl, 1 - scores.agreement, scores.nll - scores.nll_full, scores.nll_full], -1)
        places = self._place(scores.step)
        after_first = scores.step > 0
        chosen = (after_first & (places == place) for place in range(_PLACES))
        return np.stack([losses[steps if steps.any() else after_first].mean(0) for steps in chosen])


def fit_quality(
    budget: Budget, candidates: Sequence[DepthPolicy], table: LossTable, max_tokens: int, replay: Replayed
) -> DepthPolicy:
    """The policy of least mean depth whose replayed loss keeps the budget, intervals included; else the nearest to it.

    Time plays no part: it falls with mean depth, so a quality budget gives the same policy on every machine.
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
        else:  # the gentlest of all might keep the budget if none has so far
            chosen = min(range(len(candidates)), key=lambda i: forecast[i])
            if kept or chosen in replayed:
                break
        tapered = over_steps(replay(candidates[chosen])).tapered_steps
        if tapered is None:  # too few steps to judge the policy, or the table
            replayed[chosen] = math.inf
        else:
            replayed[chosen] = budget.worst_share(tapered.worst)
            # One per cent of safety: the next candidate should keep the budget.
            margin = 1.01 * replayed[chosen] / max(forecast[chosen], 1e-9)
    kept = [i for i, share in replayed.items() if share <= 1]
    return candidates[min(kept, key=lambda i: depth[i]) if kept else min(replayed, key=lambda i: replayed[i])]


def fit_speed(
    candidates: Sequence[DepthPolicy], harmless: int, table: LossTable, replay: Replayed, score: Score
) -> DepthPolicy:
    """Of policies that are equally fast, one that skips few layers early or many of them late: the better `score`.

    From the fewest layers that reach the speed, one more is skipped as long as the replayed KL over all steps falls.
    The end of this path is compared with stopping at the first `harmless` layers, or at those fewest if they are more.
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
    return few if few == many else min(few, many, key=score)


def _mean(losses: np.ndarray) -> Loss:
    """The mean over steps, [steps, 4]; no loss where there are none."""
    kl, disagreement, rise, nll = losses.sum(0).tolist()
    count = max(1, len(losses))
    return Loss(kl / count, 1 - disagreement / count, 100 * rise / max(nll, 1e-9))
