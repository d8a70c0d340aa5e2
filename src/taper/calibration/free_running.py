"""What a policy writes when it runs freely; replay only follows the full model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..replay import Reference, Scores
from .statistics import Estimate, by_answer, ratio_estimate

_GRAM = 4


@dataclass(frozen=True)
class PolicyAndFull:
    """One figure of a policy's own answers, and of those of full depth."""

    policy: Estimate
    full: Estimate


@dataclass(frozen=True)
class FreeRunning:
    """A policy's own answers beside those of full depth to the same prompts.

    Args:
        nll: of the answers at full depth, nats a token.
        length: tokens of an answer.
        repetition: share of an answer's 4-grams that occurred in it before, 0 to 1.
    """

    nll: PolicyAndFull
    length: PolicyAndFull
    repetition: PolicyAndFull


def free_running(
    own: Sequence[Reference], own_scores: Scores, full: Sequence[Reference], full_scores: Scores
) -> FreeRunning:
    """Compare a policy's own answers with those of full depth; the scores hold the full model's NLL of either."""
    policy, whole = _figures(own, own_scores), _figures(full, full_scores)
    return FreeRunning(*(PolicyAndFull(*pair) for pair in zip(policy, whole, strict=True)))


def _figures(references: Sequence[Reference], scores: Scores) -> tuple[Estimate, Estimate, Estimate]:
    """NLL, length and repetition."""
    ones = np.ones(len(references))
    lengths = np.array([len(reference.answer_ids) for reference in references], float)
    repeats = np.array([_repeated(reference.answer_ids) for reference in references])
    nll = ratio_estimate(by_answer(scores, scores.nll_full), lengths)
    return nll, ratio_estimate(lengths, ones), ratio_estimate(repeats, ones)


def _repeated(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
