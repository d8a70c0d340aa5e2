"""Whether a gate pays: fewer layers than the chosen policy runs, but only after tokens that the model was sure of.

Candidates are forecast from constant depths that were replayed for the curve, with the probabilities of full depth.
The best that is as fast as the chosen policy is replayed, and judged beside it on held-out outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from ...policy import DepthPolicy, Gate, Schedule
from .clock import CostModel
from .long_outputs import BOUNDS
from .progress import SILENT, Progress
from .replay import Scores
from .search import CLEARLY, LayerOrder, PolicyScore, loss_by_depth
from .statistics import MIN_OUTPUTS, Losses, over_steps, paired_ratios
from .store import Measurements
from .summary import Budget, GateComparison, GateEffect, GateRange

THRESHOLDS = (0.9, 0.97, 0.99)
ATTEMPTS = 2  # candidates that are replayed
SPARE = 1.005  # how much faster a candidate is on search outputs, since others may have fewer sure tokens


def find_gate(
    ungated: DepthPolicy,
    order: LayerOrder,
    measurements: Measurements,
    cost: CostModel,
    score: PolicyScore,
    progress: Progress,
) -> tuple[DepthPolicy, Losses] | None:
    """The gated policy to compare with one without gates, and what it costs on the search prompts.

    None if none is as fast and promises less loss without solving clearly fewer problems.
    """
    own = measurements.scores(ungated, SILENT)
    least = speedup(cost, ungated, own) * SPARE
    forecasts = Forecasts(loss_by_depth(order, measurements, Progress()), len(order.importance))
    gated = min(candidates(ungated, order, forecasts, cost), key=forecasts.kl, default=None)
    if gated is None or forecasts.kl(gated) >= forecasts.kl(ungated):
        return None
    stage = progress.stage("gates", ATTEMPTS * len(measurements))
    for depth in range(gated.min_depth, gated.min_depth - ATTEMPTS, -1):
        if depth < _least_depth(order):
            break
        gated = with_gate(gated, gated.schedule.gates[0].threshold, depth)
        scores = measurements.scores(gated, stage)
        if speedup(cost, gated, scores) >= least:
            is_better = scores.kl.mean() < own.kl.mean() and score(gated) <= score(ungated) + CLEARLY
            return (gated, over_steps(scores)) if is_better else None
    return None


def candidates(ungated: DepthPolicy, order: LayerOrder, forecasts: Forecasts, cost: CostModel) -> Iterator[DepthPolicy]:
    """For each threshold, with the policy's curve and without one, the deepest gate that is as fast by forecast."""
    layers = len(order.importance)
    flat = replace(ungated, schedule=Schedule(layers, "constant", ungated.min_depth))
    least = cost.speedup(ungated, forecasts.mean_depth(ungated)) * SPARE
    for policy, threshold in product((ungated, flat), THRESHOLDS):
        for depth in range(layers - 1, _least_depth(order) - 1, -1):
            gated = with_gate(policy, threshold, depth)
            if cost.speedup(gated, forecasts.mean_depth(gated)) >= least:
                yield gated
                break


def with_gate(policy: DepthPolicy, threshold: float, depth: int) -> DepthPolicy:
    """The policy with its curve down to a depth, and only after tokens of such a probability."""
    return replace(policy, schedule=replace(policy.schedule, min_depth=depth, gates=(Gate(threshold, depth),)))


def _least_depth(order: LayerOrder) -> int:
    return len(order.importance) - len(order.searched)


class Forecasts:
    """What policies cost, from constant depths that were replayed on the same outputs."""

    def __init__(self, measured: Mapping[int, Scores], num_hidden_layers: int) -> None:
        depths = sorted(measured)
        self._scores = measured[depths[0]]
        # The token before step 0 is the prompt's, but step 0 runs every layer whatever its probability.
        self._before = np.exp(-np.append(0.0, self._scores.nll_full[:-1]))
        known = np.stack([*(measured[depth].kl for depth in depths), np.zeros(len(self._before))])
        parts = [
            np.interp(range(num_hidden_layers + 1), [*depths, num_hidden_layers], one) for one in np.eye(len(known))
        ]
        self._kl = np.stack(parts, -1) @ known  # [L + 1, steps]

    def mean_depth(self, policy: DepthPolicy) -> float:
        """The mean depth over steps from 1 on."""
        return float(self._depths(policy)[self._scores.step > 0].mean())

    def kl(self, policy: DepthPolicy) -> float:
        """Mean KL, nats."""
        return float(self._kl[self._depths(policy), np.arange(len(self._before))].mean())

    def _depths(self, policy: DepthPolicy) -> np.ndarray:
        steps = zip(self._scores.step.tolist(), self._before.tolist(), strict=True)
        return np.array([policy.depth(step, probability) for step, probability in steps])


def speedup(cost: CostModel, policy: DepthPolicy, scores: Scores) -> float:
    """The predicted speed of a policy at the depths that it ran."""
    return cost.speedup(policy, mean_depth(scores))


def mean_depth(scores: Scores) -> float:
    """The mean depth over steps from 1 on."""
    return float(scores.depth[scores.step > 0].mean())


def compare(
    gated: DepthPolicy, scores: Scores, ungated: DepthPolicy, own: Scores, cost: CostModel, budget: Budget
) -> GateComparison:
    """A gated policy beside one without gates, from the scores of both on the same held-out outputs.

    The gate is taken if it is as fast, its KL is lower with 95 % confidence, neither its KL nor its agreement is as
    surely worse in a range of steps, and it keeps the budget if the other policy does.
    """

    def effect(part: np.ndarray, with_gate: np.ndarray, without: np.ndarray) -> GateEffect:
        """Of one metric, over some steps; whole outputs are resampled."""
        count, *sums = (np.bincount(scores.reference, part * loss) for loss in (1.0, with_gate, without))
        found = paired_ratios(sums[0], count, sums[1], count)
        return GateEffect(found.policy, found.full, found.difference)

    def effects(first: int, end: int) -> GateRange | None:
        part = (scores.step >= max(1, first)) & (scores.step < end)
        if len(np.unique(scores.reference[part])) < MIN_OUTPUTS:
            return None
        disagreement = effect(part, 1 - scores.agreement, 1 - own.agreement)
        return GateRange(first, end, effect(part, scores.kl, own.kl), disagreement)

    longest = int(scores.step.max()) + 1
    bounds = [*(bound for bound in BOUNDS if bound < longest), longest]
    whole, *parts = (effects(first, end) for first, end in [(0, longest), *pairwise(bounds)])
    ranges = [part for part in parts if part is not None]
    speeds = speedup(cost, gated, scores), speedup(cost, ungated, own)
    keeps, needed = (budget.is_met(over_steps(one).tapered_steps) for one in (scores, own))
    is_worse = any(one.difference.low > 0 for part in ranges for one in (part.kl, part.disagreement))
    is_better = whole is not None and whole.kl.difference.high < 0 and not is_worse
    taken = is_better and speeds[0] >= speeds[1] and (keeps or not needed)
    (gate,), depths = gated.schedule.gates, (mean_depth(scores), mean_depth(own))
    return GateComparison(gate, gated.schedule.curve, taken, depths, speeds, whole, ranges)
