"""Means over the steps of several answers, with the uncertainty that comes from which prompts were asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .replay import Reference, Scores

RESAMPLES = 10_000
LEVEL = 0.95
MIN_STEPS = 30  # fewer tapered steps than this say nothing
_GRAM = 4


class Estimate(NamedTuple):
    """A figure and its 95 % interval; where nothing else is said, a bootstrap's percentiles."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Loss:
    """What a policy costs over some steps, as plain numbers: a forecast, or one end of measured intervals."""

    kl: float  # mean KL(full || policy), nats
    agreement: float  # share of steps whose likeliest token is that of full depth, 0 to 1
    nll_increase: float  # rise of the NLL of full depth's own answers, per cent


@dataclass(frozen=True)
class LossEstimate:
    """What a policy costs over some steps, as measured; the figures of `Loss` with their intervals."""

    kl: Estimate
    agreement: Estimate
    nll_increase: Estimate

    @property
    def value(self) -> Loss:
        """The estimates themselves."""
        return Loss(self.kl.value, self.agreement.value, self.nll_increase.value)

    @property
    def worst(self) -> Loss:
        """The bad end of each interval."""
        return Loss(self.kl.high, self.agreement.low, self.nll_increase.high)


@dataclass(frozen=True)
class Losses:
    """What a policy costs over all steps, and over the tapered ones, which skip layers."""

    all_steps: LossEstimate = field(metadata={"json": "all steps"})
    # None: fewer than `MIN_STEPS` of them.
    tapered_steps: LossEstimate | None = field(default=None, metadata={"json": "tapered steps"})


@dataclass(frozen=True)
class LossByStep:
    """Loss at each step: how many answers have that step, mean KL in nats, agreement; each [steps]."""

    answers: list[int]
    kl: list[float]
    agreement: list[float]


@dataclass(frozen=True)
class PolicyAndFull:
    """One figure of a policy's own answers, and of those of full depth."""

    policy: Estimate
    full: Estimate


@dataclass(frozen=True)
class FreeRunning:
    """A policy's own answers beside those of full depth to the same prompts; replay only follows the latter."""

    nll: PolicyAndFull  # of the answers at full depth, nats a token
    length: PolicyAndFull  # tokens of an answer
    repetition: PolicyAndFull  # share of an answer's 4-grams that occurred in it before, 0 to 1


@dataclass(frozen=True)
class SolvedProblems(PolicyAndFull):
    """Shares of problems with known answers that are solved, 0 to 1, each alone."""

    difference: Estimate  # policy less full depth, paired
    problems: int  # how many


def ratio_estimate(numerator: np.ndarray, denominator: np.ndarray, seed: int = 0) -> Estimate:
    """sum(numerator) / sum(denominator) to six digits; answers are resampled. Both: sums within each, [answers]."""
    draws = np.random.default_rng(seed).integers(0, len(numerator), (RESAMPLES, len(numerator)))
    below = denominator[draws].sum(-1)
    ratios = numerator[draws].sum(-1)[below > 0] / below[below > 0]
    ends = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(*(float(f"{x:.6g}") for x in (numerator.sum() / denominator.sum(), *ends)))


def over_steps(scores: Scores) -> Losses:
    """What a policy costs, by its scores."""
    tapered = scores.where(scores.depth < scores.depth.max())
    return Losses(_loss(scores), _loss(tapered) if len(tapered.step) >= MIN_STEPS else None)


def _loss(scores: Scores) -> LossEstimate:
    def mean(values: np.ndarray, weights: np.ndarray) -> Estimate:
        return ratio_estimate(by_answer(scores, values), by_answer(scores, weights))

    ones = np.ones(len(scores.step))
    nll_increase = mean(100 * (scores.nll - scores.nll_full), scores.nll_full)
    return LossEstimate(mean(scores.kl, ones), mean(scores.agreement, ones), nll_increase)


def loss_by_step(scores: Scores) -> LossByStep:
    """What a policy costs along the answer."""
    count = np.bincount(scores.step)
    kl, agreement = (np.bincount(scores.step, weights=part) / count for part in (scores.kl, scores.agreement))
    return LossByStep(count.tolist(), kl.tolist(), agreement.tolist())


def by_answer(scores: Scores, values: np.ndarray) -> np.ndarray:
    """Sums within each answer: [answers]."""
    _, index = np.unique(scores.reference, return_inverse=True)
    return np.bincount(index, weights=values)


def free_running(
    own: Sequence[Reference], own_scores: Scores, full: Sequence[Reference], full_scores: Scores
) -> FreeRunning:
    """Compare a policy's own answers with those of full depth; the scores hold the full model's NLL of either."""
    policy, whole = _figures(own, own_scores), _figures(full, full_scores)
    return FreeRunning(*map(PolicyAndFull, policy, whole))


def _figures(references: Sequence[Reference], scores: Scores) -> tuple[Estimate, Estimate, Estimate]:
    """NLL, length and repetition."""
    ones = np.ones(len(references))
    lengths = np.array([len(reference.answer_ids) for reference in references], float)
    repeats = np.array([repeated(reference.answer_ids) for reference in references])
    nll = ratio_estimate(by_answer(scores, scores.nll_full), lengths)
    return nll, ratio_estimate(lengths, ones), ratio_estimate(repeats, ones)


def repeated(ids: Sequence[int]) -> float:
    """Share of the 4-grams of an answer that occurred in it before, 0 to 1."""
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
