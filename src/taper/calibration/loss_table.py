"""Forecasts of what a curve costs, from what a few constant depths cost at each place of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policy import DepthPolicy
from ..replay import Scores
from .statistics import Loss

_PLACES = 4  # parts of an answer whose loss is told apart


@dataclass(frozen=True)
class Forecast:
    """What a policy should cost, with no interval; step 0 left out, as it never skips a layer."""

    all_steps: Loss
    tapered_steps: Loss


class LossTable:
    """Mean loss by depth and place in the answer; a straight line between the depths that were measured.

    Args:
        measured: scores of constant depths, by depth.
        num_hidden_layers: layers of the model, L.
        max_tokens: length of answer to plan for.
    """

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
        means = []
        for place in range(_PLACES):
            chosen = after_first & (places == place)
            means.append(losses[chosen if chosen.any() else after_first].mean(0))
        return np.stack(means)


def _mean(losses: np.ndarray) -> Loss:
    """The mean over steps, [steps, 4]; no loss where there are none."""
    kl, disagreement, rise, nll = losses.sum(0).tolist()
    count = max(1, len(losses))
    return Loss(kl / count, 1 - disagreement / count, 100 * rise / max(nll, 1e-9))
