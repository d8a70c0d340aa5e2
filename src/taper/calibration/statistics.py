"""Means over the steps of several answers, with the uncertainty that comes from which prompts were asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..replay import Scores

RESAMPLES = 10_000
LEVEL = 0.95
LEAST_STEPS = 30  # fewer tapered steps than this prove nothing


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap confidence interval (percentiles; whole answers are resampled)."""

    value: float
    low: float
    high: float


def ratio_estimate(numerator: np.ndarray, denominator: np.ndarray, seed: int = 0) -> Estimate:
    """sum(numerator) / sum(denominator), resampled by answer; both are sums within each answer: [answers]."""
    draws = np.random.default_rng(seed).integers(0, len(numerator), (RESAMPLES, len(numerator)))
    below = denominator[draws].sum(-1)
    ratios = numerator[draws].sum(-1)[below > 0] / below[below > 0]
    value = float(numerator.sum() / denominator.sum())
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))


def over_steps(scores: Scores) -> dict[str, dict[str, Estimate]]:
    """What a policy costs over "all steps" and, where there are enough, over "tapered steps".

    Each holds "kl" (nats), "agreement" (a fraction) and "nll_increase" (of the answers' NLL, per cent).
    """
    found = {"all steps": _estimates(scores)}
    tapered = scores.where(scores.depth < scores.depth.max())
    if len(tapered.step) >= LEAST_STEPS:
        found["tapered steps"] = _estimates(tapered)
    return found


def _estimates(scores: Scores) -> dict[str, Estimate]:
    ones = np.ones(len(scores.step))
    pairs = {
        "kl": (scores.kl, ones),
        "agreement": (scores.agreement, ones),
        "nll_increase": (100 * (scores.nll - scores.nll_full), scores.nll_full),
    }
    sums = {name: [by_answer(scores, part) for part in pair] for name, pair in pairs.items()}
    return {name: ratio_estimate(above, below) for name, (above, below) in sums.items()}


def by_answer(scores: Scores, values: np.ndarray) -> np.ndarray:
    """Sums within each answer: [answers]."""
    _, index = np.unique(scores.reference, return_inverse=True)
    return np.bincount(index, weights=values)
