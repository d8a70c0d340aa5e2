"""The policy for a budget: the best of the candidates by forecast are replayed, and the best of those is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..policy import DepthPolicy
from ..replay import Scores
from .budget import Budget
from .loss_table import LossTable
from .statistics import over_steps

ATTEMPTS = 4  # candidates replayed for a quality budget
FINALISTS = 3  # candidates replayed for a speed

# What a policy costs on the search prompts.
Replayed = Callable[[DepthPolicy], Scores]


def fit_quality(
    budget: Budget, candidates: Sequence[DepthPolicy], table: LossTable, max_tokens: int, replay: Replayed
) -> DepthPolicy:
    """The policy of least mean depth whose replayed loss keeps the budget, intervals included; else the nearest to it.

    Time plays no part: it falls with mean depth, and a quality budget gives the same policy on every machine.

    Args:
        budget: the limits on quality.
        candidates: policies to choose from.
        table: forecasts their losses.
        max_tokens: length of answer to plan for.
        replay: measures the loss of a policy on the search prompts.
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


def fit_speed(candidates: Sequence[DepthPolicy], table: LossTable, replay: Replayed) -> DepthPolicy:
    """Of policies that are equally fast, the one of the lowest replayed KL over all steps."""
    best = sorted(candidates, key=lambda policy: table.predict(policy).all_steps.kl)[:FINALISTS]
    return min(best, key=lambda policy: float(replay(policy).kl.mean()))
