"""The methods that are compared: policies of the same mean depth over the same answers, for one engine.

All are ordinary nested policies. Where a method's own text leaves something open, its name says "our reading".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..calibration.baselines import baseline_policies, closest_policy, mean_depth, random_orders
from ..calibration.summary import MEASURED_ORDER
from ..errors import RequestError, number, shown, whole_number
from ..policy import DepthPolicy, middle_first_order

FULL = "full depth"
_STEPS = 1_000_000  # alphas tried lie this fine


def methods(
    num_hidden_layers: int,
    depth: float,
    lengths: Sequence[int],
    measured_order: Sequence[int],
    influence: Sequence[float],
    tell: Callable[[str], None],
) -> dict[str, DepthPolicy]:
    """Every method's policy by its name: full depth, and the others at mean depth `depth`.

    The mean is over all tokens after the first of answers of these lengths; `mean_depth` gives the real one. D3 gets
    there by its alpha, for the measured order, the middle first and random orders alike, and SkipDecode and HSD by
    their span. The methods of constant depth run the nearest whole number of layers. A method that cannot come within
    half a layer, such as an order of too few layers, is left out.

    Args:
        num_hidden_layers: layers of the model, L.
        depth: from 2 to L - 1.
        lengths: of answers at full depth, in tokens.
        measured_order: flex layers in the order in which calibration skips them.
        influence: block influence of each layer, [L].
        tell: told of each method that is left out, in a line.

    Raises:
        RequestError: a number is out of range, or no answer has two tokens.
        PolicyError: the order names a layer twice or one that the model does not have.
    """
    layers = whole_number("num_hidden_layers", num_hidden_layers, 3)
    depth = number("depth", depth, 2, layers - 1)
    lengths = [whole_number("a length", length, 1) for length in lengths]
    if max(lengths, default=0) < 2:
        raise RequestError("no answer has two tokens, so no method can skip a layer", "choose a task with longer ones")
    if len(influence) != layers:
        raise RequestError(f"influence has {len(influence)} numbers; it must have one for each of {layers} layers")
    orders: dict[str, Sequence[int]] = {
        MEASURED_ORDER: measured_order,
        "middle first (our reading)": middle_first_order(layers),
        **random_orders(layers),
    }
    policies = {
        f"D3, {name}": closest_policy(partial(_d3, layers, order), _STEPS, depth, lengths)
        for name, order in orders.items()
    } | baseline_policies(layers, depth, influence, lengths)
    near = {FULL: DepthPolicy.full(layers)}
    for name, policy in policies.items():
        real = mean_depth(policy, lengths)
        if abs(real - depth) > 0.5:
            tell(f"{name} is left out at mean depth {depth:g}: {real:.2f} is the closest that it comes")
        else:
            near[name] = policy
    return near


def chosen(policies: Mapping[str, DepthPolicy], words: Sequence[str]) -> list[str]:
    """The names of full depth and of the methods whose names contain one of some words; of all, if there is no word.

    Raises:
        RequestError: no name contains a word.
    """
    for word in words:
        if not any(word.lower() in name.lower() for name in policies):
            raise RequestError(f"there is no method {shown(word)}", f"there are {'; '.join(policies)}")
    return [n for n in policies if n == FULL or not words or any(word.lower() in n.lower() for word in words)]


def _d3(layers: int, order: Sequence[int], alpha_steps: int) -> DepthPolicy:
    return DepthPolicy.d3(layers, alpha_steps / _STEPS, skip_order=order)
