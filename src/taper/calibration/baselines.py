"""Other people's ways to choose layers, as policies of the same mean depth, for comparison on the same data."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..policy import DepthPolicy, middle_first_order
from .measure import Measurements, Tick, skipping
from .statistics import by_answer, ratio_estimate
from .summary import MEASURED_ORDER, Comparison

RANDOM_SEEDS = 3
COMPARED = 48  # first steps of each held-out answer that the methods are compared on


def compare_orders(
    measurements: Measurements,
    order: Sequence[int],
    depths: Sequence[int],
    ticks: Callable[[int], Tick],
    more: Mapping[str, Sequence[int]] | None = None,
) -> Comparison:
    """Loss of an order, every baseline and `more` orders at constant depths (SkipDecode, HSD: mean), same steps."""
    references = measurements.replay.references
    layers = measurements.replay.engine.backend.config.num_hidden_layers
    lengths = [max(len(reference.answer_ids) for reference in references)]
    influence = measurements.block_influence()
    middle_first = [*middle_first_order(layers)]
    middle_first += [layer for layer in range(layers - 1, 0, -1) if layer not in middle_first]  # for any depth
    orders = {MEASURED_ORDER: order, **(more or {}), "middle first (our reading of D3)": middle_first}
    orders |= random_orders(layers)
    policies_at = {
        depth: {name: skipping(layers, other[: layers - depth]) for name, other in orders.items()}
        | baseline_policies(layers, depth, influence, lengths)
        for depth in depths
    }
    comparison = Comparison({}, {}, {})
    tick = ticks(sum(map(len, policies_at.values())) * len(references))
    for depth, policies in policies_at.items():
        ours, base = policies[MEASURED_ORDER], None
        for name, policy in policies.items():
            scores = measurements.scores(policy, tick)
            scores = scores.where(scores.step > 0)
            base = base or scores
            ones = by_answer(scores, np.ones(len(scores.step)))
            parts = [(comparison.kl, scores.kl), (comparison.agreement, scores.agreement)]
            if policy.retained_layers(lengths[0]) != ours.retained_layers(lengths[0]):
                parts.append((comparison.kl_above_measured_order, scores.kl - base.kl))
            for methods, values in parts:
                methods.setdefault(name, {})[depth] = ratio_estimate(by_answer(scores, values), ones)
    return comparison


def baseline_policies(
    num_hidden_layers: int, depth: float, influence: Sequence[float], lengths: Sequence[int]
) -> dict[str, DepthPolicy]:
    """Other methods' policies by name, each as close to mean depth `depth` over answers of these lengths as it comes.

    Early exit, ShortGPT (arXiv 2403.03853) and Unified Layer Skipping (arXiv 2404.06954) run the same layers at every
    step, so a whole number of them. SkipDecode decays linearly. So does HSD (arXiv 2403.14919), which skips layers "in
    a hierarchical manner based on the current sequence length": spread evenly, level by level, is our reading of that.

    Args:
        num_hidden_layers: layers of the model, L.
        depth: from 2 to L - 1.
        influence: block influence of each layer, [L].
        lengths: in tokens; one of at least 2.
    """
    layers, whole = num_hidden_layers, round(depth)
    orders: dict[str, Sequence[int]] = {
        "early exit": range(layers - 1, 0, -1),
        "ShortGPT": np.argsort(np.asarray(influence), kind="stable").tolist(),
        "Unified (evenly spread)": _evenly_spread(layers, whole),
    }
    policies = {name: DepthPolicy.static(layers, whole, order) for name, order in orders.items()}
    min_depth = max(2, round(layers - 2 * (layers - depth)))
    decaying = closest_policy(
        lambda span: DepthPolicy.skipdecode(layers, min_depth, span), 4 * max(lengths), depth, lengths
    )
    return policies | {
        "SkipDecode": decaying,
        "HSD (our reading)": replace(decaying, skip_order=_level_by_level(layers)),
    }


def random_orders(num_hidden_layers: int) -> dict[str, list[int]]:
    """Orders of all layers but the first and the last, by name."""
    inner = num_hidden_layers - 2
    seeds = range(RANDOM_SEEDS)
    return {f"random order {i + 1}": (1 + np.random.default_rng(i).permutation(inner)).tolist() for i in seeds}


def mean_depth(policy: DepthPolicy, lengths: Sequence[int]) -> float:
    """Mean depth over all steps from 1 on of answers of these lengths in tokens, one of at least 2."""
    at_least = np.bincount(lengths)[::-1].cumsum()[::-1]  # answers of at least n tokens, by n
    return float(np.average([policy.depth(step) for step in range(1, max(lengths))], weights=at_least[2:]))


def closest_policy(
    policy_of: Callable[[int], DepthPolicy], largest: int, depth: float, lengths: Sequence[int]
) -> DepthPolicy:
    """Of policy_of(1) to policy_of(largest), which must grow deeper, the one whose mean depth is closest to `depth`."""
    numbers = range(1, largest + 1)
    above = bisect_left(numbers, depth, key=lambda number: mean_depth(policy_of(number), lengths))
    near = [policy_of(number) for number in numbers[max(0, above - 1) : above + 1]]
    return min(near, key=lambda policy: abs(mean_depth(policy, lengths) - depth))


def _evenly_spread(layers: int, depth: int) -> list[int]:
    """The layers that are not among `depth` evenly spread ones, first and last included."""
    retained = set(np.round(np.linspace(0, layers - 1, depth)).astype(int).tolist())
    return [layer for layer in range(layers) if layer not in retained]


def _level_by_level(layers: int) -> tuple[int, ...]:
    """All but the first and last layer: every second one, then every second of the rest, and so on, each level spread.

    These are the layers' numbers in binary, read backwards, from the largest down.
    """
    digits = layers.bit_length()
    return tuple(sorted(range(1, layers - 1), key=lambda layer: f"{layer:0{digits}b}"[::-1], reverse=True))
