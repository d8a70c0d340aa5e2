"""Other people's ways to choose layers, as policies of the same mean depth, for comparison on the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    """Loss of an order, every baseline and `more` orders at constant depths (SkipDecode: mean ones), same steps."""
    references = measurements.replay.references
    layers = measurements.replay.engine.backend.config.num_hidden_layers
    max_tokens = max(len(reference.answer_ids) for reference in references)
    influence = measurements.block_influence()
    comparison = Comparison({}, {}, {})
    orders = {MEASURED_ORDER: order, **(more or {})}
    tick = ticks(len(depths) * (len(orders) + 5 + RANDOM_SEEDS) * len(references))
    for depth in depths:
        policies = {name: skipping(layers, other[: layers - depth]) for name, other in orders.items()}
        ours, base = policies[MEASURED_ORDER], None
        policies |= baseline_policies(layers, depth, influence, max_tokens)
        for name, policy in policies.items():
            scores = measurements.scores(policy, tick)
            scores = scores.where(scores.step > 0)
            base = base or scores
            ones = by_answer(scores, np.ones(len(scores.step)))
            parts = [(comparison.kl, scores.kl), (comparison.agreement, scores.agreement)]
            if policy.retained_layers(max_tokens) != ours.retained_layers(max_tokens):
                parts.append((comparison.kl_above_measured_order, scores.kl - base.kl))
            for methods, values in parts:
                methods.setdefault(name, {})[depth] = ratio_estimate(by_answer(scores, values), ones)
    return comparison


def baseline_policies(
    num_hidden_layers: int, depth: int, influence: Sequence[float], max_tokens: int
) -> dict[str, DepthPolicy]:
    """Policies by the name of their method, each of mean depth `depth` over answers of `max_tokens` tokens.

    `depth` is from 2 to L - 1; `influence` is the block influence of each layer, [L].
    """
    layers = num_hidden_layers
    orders: dict[str, Sequence[int]] = {
        "middle first (our reading of D3)": _extended(middle_first_order(layers), layers),
        "early exit": range(layers - 1, 0, -1),
        "ShortGPT": np.argsort(np.asarray(influence), kind="stable").tolist(),
        "Unified (evenly spread)": _evenly_spread(layers, depth),
    }
    for seed in range(RANDOM_SEEDS):
        orders[f"random order {seed + 1}"] = (1 + np.random.default_rng(seed).permutation(layers - 2)).tolist()
    policies = {name: DepthPolicy.static(layers, depth, order) for name, order in orders.items()}
    return policies | {"SkipDecode": _skipdecode(layers, depth, max_tokens)}


def _extended(order: Sequence[int], layers: int) -> list[int]:
    """An order that reaches any depth: its core layers at its end, from the last one down."""
    return [*order, *(layer for layer in range(layers - 1, 0, -1) if layer not in order)]


def _evenly_spread(layers: int, depth: int) -> list[int]:
    """The layers that are not among `depth` evenly spread ones, first and last included (arXiv 2404.06954)."""
    retained = set(np.round(np.linspace(0, layers - 1, depth)).astype(int).tolist())
    return [layer for layer in range(layers) if layer not in retained]


def _skipdecode(layers: int, depth: int, max_tokens: int) -> DepthPolicy:
    """SkipDecode's linear decay down to L - 2 * (L - depth) layers, over the span whose mean depth is closest."""
    min_depth = max(2, layers - 2 * (layers - depth))
    policies = (DepthPolicy.skipdecode(layers, min_depth, span) for span in range(1, 4 * max_tokens))
    return min(policies, key=lambda policy: abs(policy.mean_depth(max_tokens) - depth))
