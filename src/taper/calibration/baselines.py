"""Other people's ways to choose layers, as policies of the same mean depth, for comparison on the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..policy import DepthPolicy, middle_first_order
from .measure import Measurements, Tick, skipping
from .proof import plain
from .statistics import by_answer, ratio_estimate

RANDOM_SEEDS = 3
COMPARED = 48  # first steps of each held-out answer that the methods are compared on


def compare_orders(
    measurements: Measurements,
    order: Sequence[int],
    depths: Sequence[int],
    ticks: Callable[[int], Tick],
    more: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Loss of an order, every baseline and `more` orders at constant depths (SkipDecode: mean ones), on the same steps.

    Returns:
        "kl" and "agreement": method -> depth -> [value, low, high]; "kl_above_measured_order": the same of the
        paired difference, for baselines that retain other layers at that depth.
    """
    references = measurements.replay.references
    layers = measurements.replay.engine.backend.config.num_hidden_layers
    tokens = max(len(reference.answer_ids) for reference in references)
    influence = measurements.block_influence()
    found: dict[str, dict[str, Any]] = {"kl": {}, "agreement": {}, "kl_above_measured_order": {}}
    tick = ticks(len(depths) * (6 + RANDOM_SEEDS + len(more or {})) * len(references))
    for depth in depths:
        ours = skipping(layers, frozenset(order[: layers - depth]))
        policies = {"measured order": ours} | baseline_policies(layers, depth, influence, tokens)
        policies |= {name: skipping(layers, frozenset(other[: layers - depth])) for name, other in (more or {}).items()}
        base = None
        for name, policy in policies.items():
            scores = measurements.scores(policy, tick)
            scores = scores.where(scores.step > 0)
            base = base or scores
            ones = by_answer(scores, np.ones(len(scores.step)))
            parts = {"kl": scores.kl, "agreement": scores.agreement}
            if policy.retained_layers(tokens) != ours.retained_layers(tokens):
                parts["kl_above_measured_order"] = scores.kl - base.kl
            for what, values in parts.items():
                estimate = plain(ratio_estimate(by_answer(scores, values), ones))
                found[what].setdefault(name, {})[str(depth)] = estimate
    return found


def baseline_policies(layers: int, depth: int, influence: Sequence[float], tokens: int) -> dict[str, DepthPolicy]:
    """Policies by the name of their method, each of mean depth `depth` over answers of `tokens` tokens.

    Args:
        layers: layers of the model, L.
        depth: the mean depth, from 2 to L - 1.
        influence: block influence of each layer, [L].
        tokens: length of answer, over which SkipDecode's linear decay has that mean depth.
    """
    orders: dict[str, Sequence[int]] = {
        "middle first (our reading of D3)": _extended(middle_first_order(layers), layers),
        "early exit": range(layers - 1, 0, -1),
        "ShortGPT": np.argsort(np.asarray(influence), kind="stable").tolist(),
        "Unified (evenly spread)": _evenly_spread(layers, depth),
    }
    for seed in range(RANDOM_SEEDS):
        orders[f"random order {seed + 1}"] = (1 + np.random.default_rng(seed).permutation(layers - 2)).tolist()
    policies = {name: DepthPolicy.static(layers, depth, order) for name, order in orders.items()}
    return policies | {"SkipDecode": _skipdecode(layers, depth, tokens)}


def _extended(order: Sequence[int], layers: int) -> list[int]:
    """An order that reaches any depth: its core layers at its end, from the last one down."""
    return [*order, *(layer for layer in range(layers - 1, 0, -1) if layer not in order)]


def _evenly_spread(layers: int, depth: int) -> list[int]:
    """The layers that are not among `depth` evenly spread ones, first and last included (arXiv 2404.06954)."""
    retained = set(np.round(np.linspace(0, layers - 1, depth)).astype(int).tolist())
    return [layer for layer in range(layers) if layer not in retained]


def _skipdecode(layers: int, depth: int, tokens: int) -> DepthPolicy:
    """SkipDecode's linear decay down to L - 2 * (L - depth) layers, over the span whose mean depth is closest."""
    least = max(2, layers - 2 * (layers - depth))
    spans = range(1, 4 * tokens)
    policies = (DepthPolicy.skipdecode(layers, least, span) for span in spans)
    return min(policies, key=lambda policy: abs(policy.mean_depth(tokens) - depth))
