"""The depth of each step of an output. Knows nothing of layers' names, models or tensors; standard library only.

Depth never rises with the step: one half of nesting, which every key-value cache relies on (the other half is the fixed
skip order of policy.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .checks import number, one_of, shown, whole_number
from .errors import PolicyError

MAX_LAYERS = 4096

# The numbers of each curve besides `min_depth`; any other is rejected.
CURVES = {"power": ("alpha", "start"), "linear": ("start", "span"), "constant": ("start",)}


@dataclass(frozen=True)
class Schedule:
    """The depth of each step.

    With L = `num_hidden_layers`, the forward that predicts the token of step i runs L layers at step 0, and then

    - power, D3 (arXiv 2503.08524): max(min_depth, floor(L * alpha ** max(0, i - start)))
    - linear, SkipDecode (arXiv 2307.02628):
      max(min_depth, floor(L - (L - min_depth) * min(1, max(0, i - start) / span)))
    - constant: min_depth for every i >= max(1, start)

    Args:
        num_hidden_layers: layers of the model, L.
        curve: "power", "linear" or "constant".
        min_depth: the smallest depth, from 1 to L.
        alpha: decay of the power curve, in (0, 1].
        start: the step up to which depth stays at L.
        span: steps over which the linear curve falls.

    Raises:
        PolicyError: a number is out of range, or does not belong to the curve.
    """

    num_hidden_layers: int
    curve: str
    min_depth: int
    alpha: float | None = None
    start: int = 0
    span: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "num_hidden_layers": whole_number("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS, PolicyError),
            "curve": one_of("curve", self.curve, CURVES, PolicyError),
            "start": whole_number("start", self.start, 0, error=PolicyError),
        }
        checked["min_depth"] = whole_number("min_depth", self.min_depth, 1, checked["num_hidden_layers"], PolicyError)
        for key in ("alpha", "span"):
            if (getattr(self, key) is not None) != (key in CURVES[self.curve]):
                needs = "needs" if key in CURVES[self.curve] else "has no"
                raise PolicyError(f"a {self.curve} curve {needs} {key}; got {key} = {shown(getattr(self, key))}")
        if self.alpha is not None:
            checked["alpha"] = number("alpha", self.alpha, 0, 1, PolicyError, above=True)
        if self.span is not None:
            checked["span"] = whole_number("span", self.span, 1, error=PolicyError)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def depth(self, step: int) -> int:
        """Layers run by the forward that predicts the token of `step`; step 0 is the prefill, at full depth."""
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        layers, after = self.num_hidden_layers, max(0, step - self.start)
        if step == 0:
            return layers
        if self.curve == "constant":
            return self.min_depth if step >= self.start else layers
        if self.curve == "linear":
            assert self.span is not None
            fall = (layers - self.min_depth) * min(1.0, after / self.span)
            return max(self.min_depth, math.floor(layers - fall))
        assert self.alpha is not None
        return max(self.min_depth, math.floor(layers * self.alpha**after))

    def mean_depth(self, max_tokens: int) -> float:
        """Mean depth over steps 1 to max_tokens - 1; L if there is no such step."""
        if max_tokens < 2:
            return float(self.num_hidden_layers)
        return sum(self.depth(step) for step in range(1, max_tokens)) / (max_tokens - 1)
