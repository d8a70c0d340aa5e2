"""Published methods of skipping layers, as policies of the same mean depth over the same outputs, for one engine.

All are ordinary nested policies. If a paper leaves a detail open, the name of the method says "our reading".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..calibration.summary import MEASURED_ORDER
from ..errors import RequestError, number
from ..policy import DepthPolicy, middle_first_order

FULL = "full depth"
RANDOM_SEEDS = 3
_ALPHA_STEPS = 1_000_000  # the resolution of the alphas that are tried


def methods(
    num_hidden_layers: int,
    depth: float,
    lengths: Sequence[int],
    measured_order: Sequence[int],
    influence: Sequence[float],
    log: Callable[[str], None],
) -> dict[str, DepthPolicy]:
    """The policy of every method by its name: full depth, and the others at mean depth `depth`.

    The mean is over all tokens after the first of outputs of these lengths; `mean_depth` gives the actual one. D3
    reaches it by its alpha, with the measured order, the middle first and random orders alike; SkipDecode and HSD reach
    it by their span. The methods of constant depth run the nearest whole number of layers. A method that cannot come
    within half a layer, such as an order of too few layers, is left out.

    Args:
        num_hidden_layers: layers of the model, L.
        depth: from 2 to L - 1.
        lengths: of outputs at full depth, in tokens.
        measured_order: flex layers in the order in which calibration skips them.
        influence: block influence of each layer, [L].
        log: called with one line for each method that is left out.

    Raises:
        RequestError: the depth is out of range, or no output has two tokens.
        PolicyError: the order names a layer twice or one that the model does not have.
    """
    depth = number("depth", depth, 2, num_hidden_layers - 1)
    if max(lengths, default=0) < 2:
        raise RequestError("no output has two tokens, so no method can skip a layer", "choose a task with longer ones")
    orders = {
        MEASURED_ORDER: measured_order,
        "middle first (our reading)": middle_first_order(num_hidden_layers),
        **random_orders(num_hidden_layers),
    }
    policies = {f"D3, {name}": closest_d3(num_hidden_layers, order, depth, lengths) for name, order in orders.items()}
    policies |= baseline_policies(num_hidden_layers, depth, influence, lengths)
    close = {FULL: DepthPolicy.full(num_hidden_layers)}
    for name, policy in policies.items():
        actual = mean_depth(policy, lengths)
        if abs(actual - depth) > 0.5:
            log(f"{name} is left out at mean depth {depth:g}: {actual:.2f} is the closest that it comes")
        else:
            close[name] = policy
    return close


def baseline_policies(
    num_hidden_layers: int, depth: float, influence: Sequence[float], lengths: Sequence[int]
) -> dict[str, DepthPolicy]:
    """The methods other than D3 by name, each as close to mean depth `depth` over outputs of these lengths as possible.

    Early exit, ShortGPT (arXiv 2403.03853) and Unified Layer Skipping (arXiv 2404.06954) run the same layers at every
    step, so a whole number of them. SkipDecode decays linearly. So does HSD (arXiv 2403.14919), which skips layers "in
    a hierarchical manner based on the current sequence length": spread evenly, level by level, is our reading of that.

    The arguments are those of `methods`; one length is at least 2.
    """
    layers, whole = num_hidden_layers, round(depth)
    evenly_spread = set(np.round(np.linspace(0, layers - 1, whole)).astype(int).tolist())
    orders: dict[str, Sequence[int]] = {
        "early exit": range(layers - 1, 0, -1),
        "ShortGPT": np.argsort(np.asarray(influence), kind="stable").tolist(),
        "Unified (evenly spread)": [layer for layer in range(layers) if layer not in evenly_spread],
    }
    policies = {name: DepthPolicy.static(layers, whole, order) for name, order in orders.items()}
    min_depth = max(2, round(layers - 2 * (layers - depth)))
    decaying = closest_policy(
        lambda span: DepthPolicy.skipdecode(layers, min_depth, span), 4 * max(lengths), depth, lengths
    )
    by_level = replace(decaying, skip_order=_level_by_level(layers))
    return {**policies, "SkipDecode": decaying, "HSD (our reading)": by_level}


def random_orders(num_hidden_layers: int) -> dict[str, list[int]]:
    """Orders of all layers but the first and the last, by name."""
    inner = num_hidden_layers - 2
    seeds = range(RANDOM_SEEDS)
    return {f"random order {i + 1}": (1 + np.random.default_rng(i).permutation(inner)).tolist() for i in seeds}


def mean_depth(policy: DepthPolicy, lengths: Sequence[int]) -> float:
    """Mean depth over all steps from 1 on of outputs of these lengths in tokens, one of at least 2."""
    at_least = np.bincount(lengths)[::-1].cumsum()[::-1]  # outputs of at least n tokens, by n
    return float(np.average([policy.depth(step) for step in range(1, max(lengths))], weights=at_least[2:]))


def closest_d3(
    num_hidden_layers: int, skip_order: Sequence[int], depth: float, lengths: Sequence[int], start: int = 0
) -> DepthPolicy:
    """D3 with the alpha whose mean depth over outputs of these lengths is closest to `depth`."""

    def d3(alpha_steps: int) -> DepthPolicy:
        return DepthPolicy.d3(num_hidden_layers, alpha_steps / _ALPHA_STEPS, start, skip_order=skip_order)

    return closest_policy(d3, _ALPHA_STEPS, depth, lengths)


def closest_policy(
    policy_of: Callable[[int], DepthPolicy], largest: int, depth: float, lengths: Sequence[int]
) -> DepthPolicy:
    """The policy whose mean depth is closest to `depth`, among policy_of(1) to policy_of(largest).

    Their depth must grow with the argument.
    """
    arguments = range(1, largest + 1)
    above = bisect_left(arguments, depth, key=lambda argument: mean_depth(policy_of(argument), lengths))
    close = [policy_of(argument) for argument in arguments[max(0, above - 1) : above + 1]]
    return min(close, key=lambda policy: abs(mean_depth(policy, lengths) - depth))


def _level_by_level(layers: int) -> tuple[int, ...]:
    """All layers but the first and last: every second one, then every second of the rest, and so on.

    Each level is spread evenly: its layers are sorted by their binary digits read backwards, in descending order.
    """
    digits = layers.bit_length()
    return tuple(sorted(range(1, layers - 1), key=lambda layer: f"{layer:0{digits}b}"[::-1], reverse=True))
