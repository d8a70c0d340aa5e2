"""Depth policies: how many layers run for each token of an output, and which.

A policy is a schedule (the depth of each step) and a skip order (which layers run at a depth): plain data with a
versioned JSON form that every engine reads alike. Knows nothing of models, tensors or sampling; standard library only.

Nesting, on which every key-value cache relies, is guaranteed here: depth never rises with the step, and `skip_order`
is fixed, so the layers retained at a step are a subset of those retained at any earlier step.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

from .adapters import Adapters
from .errors import PolicyError, as_tuple, number, one_of, shown, unique_keys, whole_number

FORMAT_VERSION = 1
MAX_LAYERS = 4096

# The parameters of each curve besides `min_depth`; others are rejected.
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


@dataclass(frozen=True)
class ModelIdentity:
    """The model a policy was made for. `quantization` may differ from the model in use; the rest may not."""

    architecture: str
    hidden_size: int
    vocab_size: int
    quantization: str


@dataclass(frozen=True)
class DepthPolicy:
    """A schedule, and the order in which layers are skipped.

    Args:
        schedule: the depth of each step; its `min_depth` is at least L - len(skip_order).
        skip_order: the flex layers in the order in which they are skipped. All others are core: they always run.
        name: what users call it.
        model: the model it was made for, if that is known.
        provenance: how it was found and what was measured; engines ignore it.
        adapters: stand-ins of layers of `skip_order`; not part of the JSON form (`models.policies` has their files).

    Raises:
        PolicyError: the order names a layer twice or one out of range, or is too short; the name is not printable; an
            adapter belongs to a layer that is never skipped.
    """

    schedule: Schedule
    skip_order: tuple[int, ...] = ()
    name: str = ""
    model: ModelIdentity | None = None
    provenance: dict[str, Any] = field(default_factory=dict, hash=False)
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise PolicyError(f"schedule is {shown(self.schedule)}; it must be a Schedule", "or use DepthPolicy.d3")
        layers = self.num_hidden_layers
        order = as_tuple("skip_order", self.skip_order, PolicyError)
        checked = [whole_number("a layer of skip_order", i, 0, layers - 1, PolicyError) for i in order]
        object.__setattr__(self, "skip_order", tuple(checked))
        if len(set(checked)) < len(checked):
            twice = next(layer for i, layer in enumerate(checked) if layer in checked[:i])
            raise PolicyError(f"skip_order names layer {twice} twice; each layer can be skipped once")
        whole_number("min_depth", self.min_depth, _least_depth(layers, checked), layers, PolicyError)
        if not (isinstance(self.name, str) and self.name.isprintable()):
            raise PolicyError(f"name is {shown(self.name)}; it must be printable text")
        if self.adapters is not None and (core := sorted(set(self.adapters.layers) - set(checked))):
            raise PolicyError(f"there is an adapter of layer {core[0]}, which the policy never skips")

    @classmethod
    def full(cls, num_hidden_layers: int) -> DepthPolicy:
        """Every layer for every token: the model as it is (alpha = 1)."""
        return cls(Schedule(num_hidden_layers, "power", num_hidden_layers, alpha=1.0), name="full")

    @classmethod
    def d3(
        cls,
        num_hidden_layers: int,
        alpha: float,
        start: int = 0,
        min_depth: int | None = None,
        skip_order: Iterable[int] = (),
    ) -> DepthPolicy:
        """Position-aware depth decay (arXiv 2503.08524): floor(L * alpha ** i) layers for token i."""
        order = as_tuple("skip_order", skip_order, PolicyError)
        least = _least_depth(num_hidden_layers, order) if min_depth is None else min_depth
        return cls(Schedule(num_hidden_layers, "power", least, alpha=alpha, start=start), order)

    @classmethod
    def middle_first(
        cls, num_hidden_layers: int, alpha: float, start: int = 0, min_depth: int | None = None
    ) -> DepthPolicy:
        """D3 that always runs head and tail and skips the middle first: our reading of the paper's choice of layers."""
        return cls.d3(num_hidden_layers, alpha, start, min_depth, middle_first_order(num_hidden_layers))

    @classmethod
    def skipdecode(
        cls, num_hidden_layers: int, min_depth: int, span: int, start: int = 0, warmup_layers: int = 1
    ) -> DepthPolicy:
        """SkipDecode (arXiv 2307.02628): linear decay; lower layers are skipped first, after a few warm-up layers."""
        last = _check_layers(num_hidden_layers) - 1
        order = tuple(range(whole_number("warmup_layers", warmup_layers, 0, last, PolicyError), last))
        return cls(Schedule(num_hidden_layers, "linear", min_depth, start=start, span=span), order)

    @classmethod
    def early_exit(cls, num_hidden_layers: int, depth: int) -> DepthPolicy:
        """The first `depth` layers for every token after the first: layers are skipped from the last one down."""
        return cls.static(num_hidden_layers, depth, range(_check_layers(num_hidden_layers) - 1, 0, -1))

    @classmethod
    def static(cls, num_hidden_layers: int, depth: int, skip_order: Iterable[int]) -> DepthPolicy:
        """The same retained layers for every token after the first, as in static pruning."""
        return cls(Schedule(num_hidden_layers, "constant", depth), as_tuple("skip_order", skip_order, PolicyError))

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, L."""
        return self.schedule.num_hidden_layers

    @property
    def min_depth(self) -> int:
        """The smallest depth."""
        return self.schedule.min_depth

    @property
    def tapers(self) -> bool:
        """Whether it skips a layer at some step; otherwise it is full depth."""
        return self.min_depth < self.num_hidden_layers and self.schedule.alpha != 1

    @property
    def first_skip(self) -> int | None:
        """The first step that skips a layer; None at full depth."""
        if not self.tapers:
            return None
        return max(1, self.schedule.start) if self.schedule.curve == "constant" else self.schedule.start + 1

    @property
    def label(self) -> str:
        """What to call it in a line of text: its name, or else its numbers."""
        numbers = (f"{key}={getattr(self.schedule, key)}" for key in (*CURVES[self.schedule.curve], "min_depth"))
        return self.name or " ".join([self.schedule.curve, *numbers])

    @property
    def core_layers(self) -> frozenset[int]:
        """Layers that always run."""
        return frozenset(range(self.num_hidden_layers)) - frozenset(self.skip_order)

    @property
    def adapted_layers(self) -> tuple[int, ...]:
        """The layers from the beginning of `skip_order` on that have adapters."""
        return tuple(takewhile(self.adapters.layers.__contains__, self.skip_order)) if self.adapters else ()

    def depth(self, step: int) -> int:
        """Layers run by the forward that predicts the token of `step`."""
        return self.schedule.depth(step)

    def mean_depth(self, max_tokens: int) -> float:
        """Mean depth over steps 1 to max_tokens - 1; L if there is no step."""
        if max_tokens < 2:
            return float(self.num_hidden_layers)
        return sum(map(self.schedule.depth, range(1, max_tokens))) / (max_tokens - 1)

    def retained_at(self, depth: int) -> tuple[int, ...]:
        """Layers run at a depth, ascending."""
        least = least_depths(self.skip_order, self.num_hidden_layers)
        return tuple(layer for layer, needed in enumerate(least) if depth >= needed)

    def retained_layers(self, step: int) -> tuple[int, ...]:
        """Layers run for the token of `step`, ascending."""
        return self.retained_at(self.depth(step))

    def with_alpha(self, alpha: float) -> DepthPolicy:
        """D3's power curve over this policy's skip order: from its `start` on, and as deep as the order goes.

        Raises:
            PolicyError: alpha is out of range, or there is no layer to skip, so that it would do nothing.
        """
        if not self.skip_order:
            raise PolicyError(f"policy {self.label} skips no layer, so alpha does nothing", "choose another policy")
        decayed = DepthPolicy.d3(self.num_hidden_layers, alpha, self.schedule.start, skip_order=self.skip_order)
        return replace(decayed, model=self.model, adapters=self.adapters)

    def check_model(self, num_hidden_layers: int, model: ModelIdentity | None) -> str:
        """Reject a model that this policy was not made for; return a warning for another quantisation, else "".

        Without `model`, only the number of layers is compared.

        Raises:
            PolicyError: the number of layers, architecture, hidden size or vocabulary differ.
        """
        facts = [("layers", self.num_hidden_layers, num_hidden_layers)]
        if self.model is not None and model is not None:
            names = ("architecture", "hidden_size", "vocab_size")
            facts += [(name, getattr(self.model, name), getattr(model, name)) for name in names]
        if self.adapters is not None and model is not None:
            facts.append(("hidden_size", self.adapters.hidden_size, model.hidden_size))
        for name, ours, theirs in facts:
            if ours != theirs:
                raise PolicyError(
                    f"policy {self.name or 'given'} is for a model with {name} {ours}, but this model has {theirs}",
                    "use a policy made for this model, or --mode full",
                )
        if self.model is not None and model is not None and self.model.quantization != model.quantization:
            return f"the policy was measured on {self.model.quantization} weights; this model has {model.quantization}"
        return ""

    def without_adapters(self) -> DepthPolicy:
        """The same policy on the model as it is."""
        return replace(self, adapters=None)

    def to_json(self) -> str:
        """The policy as versioned JSON text; `from_json` reads it back to an equal policy.

        Raises:
            PolicyError: it has adapters, which JSON has no room for, or a number in `provenance` is none.
        """
        if self.adapters is not None:
            raise PolicyError(f"policy {self.label} has adapters, which JSON cannot hold", "use taper.save_policy")
        data: dict[str, Any] = {"format_version": FORMAT_VERSION}
        if self.name:
            data["name"] = self.name
        keys = ("num_hidden_layers", "curve", *CURVES[self.schedule.curve], "min_depth")
        data |= {key: getattr(self.schedule, key) for key in keys}
        data["skip_order"] = list(self.skip_order)
        if self.model is not None:
            data["model"] = dict(vars(self.model))
        if self.provenance:
            data["provenance"] = self.provenance
        try:
            return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        except ValueError as error:
            raise PolicyError(f"policy {self.label} cannot be written: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> DepthPolicy:
        """Read a policy, strictly: unknown keys, wrong types and values out of range are rejected.

        Raises:
            PolicyError: the text is not a policy of this format version.
        """
        try:
            data = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        except (TypeError, ValueError, RecursionError) as error:
            raise PolicyError(f"not a policy: {error}", "a policy is a JSON object") from None
        required = {"format_version", "num_hidden_layers", "curve", "min_depth", "skip_order"}
        curve = str(data.get("curve")) if isinstance(data, dict) else ""
        of_curve = set(CURVES.get(curve, ()))  # of an unknown curve, the schedule says so
        optional = {"name", "model", "provenance"} | (set() if of_curve else {"alpha", "start", "span"})
        data = _check_object("a policy", data, required | of_curve, optional)
        if (version := data.pop("format_version")) != FORMAT_VERSION or type(version) is not int:
            raise PolicyError(f"format_version is {version!r}; this Taper reads {FORMAT_VERSION}", "update Taper")
        kinds = {"skip_order": (list, "a list"), "name": (str, "text"), "provenance": (dict, "an object")}
        for key, (kind, rule) in kinds.items():
            if not isinstance(data.get(key, kind()), kind):
                raise PolicyError(f"{key} is {shown(data[key])}; it must be {rule}")
        if "model" in data:
            data["model"] = _read_identity(data["model"])
        of_schedule = {key.name: data.pop(key.name) for key in fields(Schedule) if key.name in data}
        return cls(Schedule(**of_schedule), **data)


@lru_cache(maxsize=256)
def least_depths(skip_order: tuple[int, ...], num_hidden_layers: int) -> tuple[int, ...]:
    """The smallest depth at which each layer runs: [num_hidden_layers], 0 for core layers.

    This says which layers run at a depth: layer l runs at depth d if d >= least_depths(...)[l].
    """
    least = [0] * num_hidden_layers
    for rank, layer in enumerate(skip_order):
        least[layer] = num_hidden_layers - rank
    return tuple(least)


def active_prefixes(skip_order: tuple[int, ...], num_hidden_layers: int, depths: Sequence[int]) -> tuple[int, ...]:
    """How many tokens run each layer, given the depth of each: [num_hidden_layers] counts from 0 to len(depths).

    The tokens share `skip_order` and come deepest first, so by nesting those that run a layer are the first ones.
    """
    return _active_prefixes(skip_order, num_hidden_layers, tuple(depths))


@lru_cache(maxsize=256)  # depths seldom change from one step to the next
def _active_prefixes(skip_order: tuple[int, ...], num_hidden_layers: int, depths: tuple[int, ...]) -> tuple[int, ...]:
    assert all(a >= b for a, b in pairwise(depths)), "tokens must be sorted deepest first"
    falling = [-depth for depth in depths]
    return tuple(bisect_right(falling, -least) for least in least_depths(skip_order, num_hidden_layers))


def middle_first_order(num_hidden_layers: int) -> tuple[int, ...]:
    """Flex layers from the middle outwards; the first and last eighth (at least one layer each) are core."""
    core = max(1, _check_layers(num_hidden_layers) // 8)
    middle = (num_hidden_layers - 1) / 2
    return tuple(sorted(range(core, num_hidden_layers - core), key=lambda layer: (abs(layer - middle), layer)))


def _least_depth(num_hidden_layers: int, skip_order: Sequence[int]) -> int:
    return max(1, _check_layers(num_hidden_layers) - len(skip_order))


def _check_layers(num_hidden_layers: int) -> int:
    return whole_number("num_hidden_layers", num_hidden_layers, 1, MAX_LAYERS, PolicyError)


def _check_object(name: str, data: object, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PolicyError(f"{name} must be a JSON object, not {type(data).__name__}")
    if unknown := sorted(set(data) - required - optional):
        raise PolicyError(f"{name} has no key {shown(unknown[0])}", f"keys: {', '.join(sorted(required | optional))}")
    if missing := sorted(required - set(data)):
        raise PolicyError(f"{name} lacks {missing[0]!r}")
    return data


def _read_identity(data: object) -> ModelIdentity:
    kinds = {"architecture": str, "hidden_size": int, "vocab_size": int, "quantization": str}
    identity = _check_object("model", data, set(kinds), set())
    for key, kind in kinds.items():
        if type(identity[key]) is not kind or (kind is int and identity[key] < 1):
            raise PolicyError(f"model.{key} is {shown(identity[key])}, which has the wrong type")
    return ModelIdentity(**identity)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")
