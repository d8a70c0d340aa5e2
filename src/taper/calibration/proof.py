"""What a policy answers by itself, since replay follows the full model's answers; and figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..replay import Reference, Scores
from .statistics import Estimate, by_answer, ratio_estimate

_GRAM = 4


def free_running(
    own: Sequence[Reference], own_nll: Scores, full: Sequence[Reference], full_nll: Scores
) -> dict[str, dict[str, Estimate]]:
    """A policy's own answers beside those of full depth to the same prompts, judged by the full model.

    Returns:
        "nll" (nats a token under the full model), "length" (tokens) and "repetition" (share of a text's 4-grams
        that stood in it before), each for "policy" and "full".
    """
    found: dict[str, dict[str, Estimate]] = {"nll": {}, "length": {}, "repetition": {}}
    for name, references, scores in (("policy", own, own_nll), ("full", full, full_nll)):
        ones = np.ones(len(references))
        lengths = np.array([len(reference.answer_ids) for reference in references], float)
        repeats = np.array([_repeated(reference.answer_ids) for reference in references])
        found["nll"][name] = ratio_estimate(by_answer(scores, scores.nll_full), lengths)
        found["length"][name] = ratio_estimate(lengths, ones)
        found["repetition"][name] = ratio_estimate(repeats, ones)
    return found


def _repeated(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def plain(found: Any) -> Any:
    """Estimates as JSON: [value, low, high], to six digits."""
    if isinstance(found, Estimate):
        return [float(f"{x:.6g}") for x in (found.value, found.low, found.high)]
    return {name: plain(value) for name, value in found.items()}
