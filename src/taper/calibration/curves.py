"""Candidate policies: every curve, start and span along one order of layers; for a quality, or for a speed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import RequestError
from ..policy import DepthPolicy
from ..schedule import Schedule
from .cost import CostModel

_STARTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # where the fall may begin, and how long it may last, in answers
_FALLING = ("linear", "power")
_SPANS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


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
    skip_order: Sequence[int], searched: int, num_hidden_layers: int, max_tokens: int, speedup: float, cost: CostModel
) -> list[DepthPolicy]:
    """As `curves`, each falling as late or as slowly as a predicted speedup lets it.

    Raises:
        RequestError: none is that fast.
    """

    def most_steps(stretched: Callable[[int], DepthPolicy]) -> int:
        """The largest number at which the policy still is that fast; 0 if it never is."""
        steps = range(1, 8 * max_tokens + 1)
        return bisect_left(steps, True, key=lambda n: cost.speedup(stretched(n), max_tokens) < speedup)

    policies = []
    for min_depth in range(num_hidden_layers - 1, num_hidden_layers - searched - 1, -1):
        facts = (num_hidden_layers, min_depth, skip_order)
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
