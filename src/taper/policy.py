"""Depth policies: how many layers, and which, run for each token of an answer.

Plain data with a versioned JSON form; every engine reads the same values. Knows nothing of models,
tensors or sampling, and uses the standard library only.

Nesting, which every key-value cache relies on, is kept here: the depth never rises with the step and
`skip_order` is fixed, so the layers retained at a step are a subset of those retained at any earlier one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .errors import PolicyError

FORMAT_VERSION = 1
MAX_LAYERS = 4096
MAX_FILE_BYTES = 1 << 20

# The numbers each curve has besides `min_depth`; any other is refused.
CURVES = {"power": ("alpha", "start"), "linear": ("start", "span"), "constant": ("start",)}


class Plateau(NamedTuple):
    """A maximal run of steps with one depth: `first` to `last`, both included."""

    first: int
    last: int
    depth: int


@dataclass(frozen=True)
class ModelIdentity:
    """The model a policy was made on. `quantization` may differ from the model in use, the rest may not."""

    architecture: str
    hidden_size: int
    vocab_size: int
    quantization: str


@dataclass(frozen=True)
class DepthPolicy:
    """How depth falls over an answer, and which layers go first.

    With L = `num_hidden_layers`, the depth of the forward that predicts the token of step i is L at step 0, and

    - power, D3 (arXiv 2503.08524): max(min_depth, floor(L * alpha ** max(0, i - start)))
    - linear, SkipDecode (arXiv 2307.02628):
      max(min_depth, floor(L - (L - min_depth) * min(1, max(0, i - start) / span)))
    - constant: min_depth for every i >= max(1, start)

    Args:
        num_hidden_layers: layers of the model, L.
        curve: "power", "linear" or "constant".
        min_depth: the least depth; from max(1, L - len(skip_order)) to L.
        skip_order: the flex layers in the order in which they are skipped. All others are core: always run.
        alpha: decay of the power curve, in (0, 1].
        start: the step up to which depth stays at L.
        span: steps over which the linear curve falls.
        name: what users call it.
        model: the model it was made on, where that is known.
        provenance: how it was found and what was measured; engines ignore it.

    Raises:
        PolicyError: a number or the order breaks a rule.
    """

    num_hidden_layers: int
    curve: str
    min_depth: int
    skip_order: tuple[int, ...] = ()
    alpha: float | None = None
    start: int = 0
    span: int | None = None
    name: str = ""
    model: ModelIdentity | None = None
    provenance: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        layers = self.num_hidden_layers
        _check_int("num_hidden_layers", layers, 1, MAX_LAYERS)
        if self.curve not in CURVES:
            raise PolicyError(f"curve is {self.curve!r}; it must be one of {', '.join(CURVES)}")
        _check_int("start", self.start, 0)
        for key in ("alpha", "span"):
            if (getattr(self, key) is not None) != (key in CURVES[self.curve]):
                needs = "needs" if key in CURVES[self.curve] else "has no"
                raise PolicyError(f"a {self.curve} curve {needs} {key}; got {key} = {getattr(self, key)!r}")
        if self.alpha is not None and not (_is_number(self.alpha) and 0 < self.alpha <= 1):
            raise PolicyError(f"alpha is {self.alpha!r}; it must be in (0, 1]")
        if self.span is not None:
            _check_int("span", self.span, 1)
        seen: set[int] = set()
        for layer in self.skip_order:
            _check_int("a layer of skip_order", layer, 0, layers - 1)
            if layer in seen:
                raise PolicyError(f"skip_order names layer {layer} twice; each layer can be skipped once")
            seen.add(layer)
        _check_int("min_depth", self.min_depth, max(1, layers - len(self.skip_order)), layers)

    @classmethod
    def full(cls, num_hidden_layers: int) -> DepthPolicy:
        """Every layer for every token: the model as it is (alpha = 1)."""
        return cls(num_hidden_layers, "power", num_hidden_layers, alpha=1.0, name="full")

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
        order = tuple(skip_order)
        least = _least_depth(num_hidden_layers, order) if min_depth is None else min_depth
        return cls(num_hidden_layers, "power", least, order, alpha=alpha, start=start)

    @classmethod
    def middle_first(
        cls, num_hidden_layers: int, alpha: float, start: int = 0, min_depth: int | None = None
    ) -> DepthPolicy:
        """D3 with head and tail core and the middle skipped first: our reading of the paper's choice of layers."""
        return cls.d3(num_hidden_layers, alpha, start, min_depth, middle_first_order(num_hidden_layers))

    @classmethod
    def skipdecode(
        cls, num_hidden_layers: int, min_depth: int, span: int, start: int = 0, warmup_layers: int = 1
    ) -> DepthPolicy:
        """SkipDecode (arXiv 2307.02628): linear decay; after a warm-up of first layers, the lower ones go first."""
        _check_int("warmup_layers", warmup_layers, 0, num_hidden_layers - 1)
        order = tuple(range(warmup_layers, num_hidden_layers - 1))
        return cls(num_hidden_layers, "linear", min_depth, order, start=start, span=span)

    @classmethod
    def early_exit(cls, num_hidden_layers: int, depth: int) -> DepthPolicy:
        """The first `depth` layers for every token after the first: layers are skipped from the last one down."""
        order = tuple(range(num_hidden_layers - 1, 0, -1))
        return cls(num_hidden_layers, "constant", depth, order)

    @classmethod
    def static(cls, num_hidden_layers: int, depth: int, skip_order: Iterable[int]) -> DepthPolicy:
        """The same retained layers for every token after the first, as static pruning would have it."""
        return cls(num_hidden_layers, "constant", depth, tuple(skip_order))

    @property
    def label(self) -> str:
        """What to call it in a line of text: its name, else its numbers."""
        numbers = " ".join(f"{key}={getattr(self, key)}" for key in (*CURVES[self.curve], "min_depth"))
        return self.name or f"{self.curve} {numbers}"

    @property
    def core_layers(self) -> frozenset[int]:
        """Layers that always run."""
        return frozenset(range(self.num_hidden_layers)) - frozenset(self.skip_order)

    @property
    def flex_layers(self) -> frozenset[int]:
        """Layers that may be skipped."""
        return frozenset(self.skip_order)

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

    def retained_at(self, depth: int) -> tuple[int, ...]:
        """Layers run at a depth, ascending: all but the first L - depth of `skip_order`."""
        skipped = frozenset(self.skip_order[: self.num_hidden_layers - depth])
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in skipped)

    def retained_layers(self, step: int) -> tuple[int, ...]:
        """Layers run for the token of `step`, ascending."""
        return self.retained_at(self.depth(step))

    def plateaus(self, max_tokens: int) -> list[Plateau]:
        """The runs of equal depth over the steps of an answer of `max_tokens` tokens."""
        runs: list[Plateau] = []
        for step in range(max_tokens):
            depth = self.depth(step)
            if runs and runs[-1].depth == depth:
                runs[-1] = runs[-1]._replace(last=step)
            else:
                runs.append(Plateau(step, step, depth))
        return runs

    def mean_depth(self, max_tokens: int) -> float:
        """Mean depth over steps 1 to max_tokens - 1; L where an answer has no such step."""
        if max_tokens < 2:
            return float(self.num_hidden_layers)
        return sum(self.depth(step) for step in range(1, max_tokens)) / (max_tokens - 1)

    def with_alpha(self, alpha: float) -> DepthPolicy:
        """The same policy with another decay.

        Raises:
            PolicyError: the curve has no alpha.
        """
        if self.curve != "power":
            raise PolicyError(f"alpha does nothing to a {self.curve} curve", "choose a policy with a power curve")
        return replace(self, alpha=alpha, name="", provenance={})

    def check_model(self, num_hidden_layers: int, model: ModelIdentity | None) -> str:
        """Refuse a model this policy was not made for; return a warning for another quantisation of it, else "".

        With no `model`, only the number of layers is compared.

        Raises:
            PolicyError: the number of layers, architecture, hidden size or vocabulary differ.
        """
        facts = [("layers", self.num_hidden_layers, num_hidden_layers)]
        if self.model is not None and model is not None:
            for what in ("architecture", "hidden_size", "vocab_size"):
                facts.append((what, getattr(self.model, what), getattr(model, what)))
        for what, ours, theirs in facts:
            if ours != theirs:
                raise PolicyError(
                    f"policy {self.name or 'given'} is for a model with {what} {ours}, this model has {theirs}",
                    "use a policy made for this model, or --mode full",
                )
        if self.model is not None and model is not None and self.model.quantization != model.quantization:
            return f"policy was measured on {self.model.quantization} weights, this model has {model.quantization}"
        return ""

    def to_json(self) -> str:
        """The policy as versioned JSON text; `from_json` reads it back to an equal policy."""
        data: dict[str, Any] = {"format_version": FORMAT_VERSION}
        if self.name:
            data["name"] = self.name
        data |= {"num_hidden_layers": self.num_hidden_layers, "curve": self.curve}
        data |= {key: getattr(self, key) for key in CURVES[self.curve]}
        data |= {"min_depth": self.min_depth, "skip_order": list(self.skip_order)}
        if self.model is not None:
            data["model"] = dict(vars(self.model))
        if self.provenance:
            data["provenance"] = self.provenance
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DepthPolicy:
        """Read a policy, strictly: unknown keys, wrong types and values out of range are refused.

        Raises:
            PolicyError: the text is not a policy of this format version.
        """
        try:
            data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"not a policy: {error}", "a policy is a JSON object") from None
        required = {"format_version", "num_hidden_layers", "curve", "min_depth", "skip_order"}
        data = _check_object("a policy", data, required, {"name", "model", "provenance", "alpha", "start", "span"})
        version = data.pop("format_version")
        if version is True or version != FORMAT_VERSION:
            raise PolicyError(f"format_version is {version!r}; this Taper reads {FORMAT_VERSION}", "upgrade Taper")
        curve = data["curve"]
        if not isinstance(curve, str) or curve not in CURVES:
            raise PolicyError(f"curve is {curve!r}; it must be one of {', '.join(CURVES)}")
        _check_object(f"a {curve} policy", data, set(CURVES[curve]), set(data) - {"alpha", "start", "span"})
        if not isinstance(data["skip_order"], list):
            raise PolicyError(f"skip_order is {data['skip_order']!r}; it must be a list of layers")
        data["skip_order"] = tuple(data["skip_order"])
        if not isinstance(data.get("name", ""), str):
            raise PolicyError(f"name is {data['name']!r}; it must be text")
        if not isinstance(data.get("provenance", {}), dict):
            raise PolicyError("provenance must be an object")
        if "model" in data:
            data["model"] = _read_identity(data["model"])
        return cls(**data)


def active_prefixes(policy: DepthPolicy, depths: Sequence[int]) -> tuple[int, ...]:
    """How many tokens run each layer, for tokens that share the policy's `skip_order`, deepest first.

    By nesting they are the first ones: [num_hidden_layers] counts, each 0 to len(depths).
    """
    assert all(a >= b for a, b in pairwise(depths)), "tokens must be sorted deepest first"
    active = [len(depths)] * policy.num_hidden_layers
    for rank, layer in enumerate(policy.skip_order):
        active[layer] = sum(depth >= policy.num_hidden_layers - rank for depth in depths)
    return tuple(active)


def middle_first_order(num_hidden_layers: int) -> tuple[int, ...]:
    """Flex layers from the middle outwards; the first and last eighth (at least one layer each) are core."""
    core = max(1, num_hidden_layers // 8)
    middle = (num_hidden_layers - 1) / 2
    return tuple(sorted(range(core, num_hidden_layers - core), key=lambda layer: (abs(layer - middle), layer)))


def load_policy(path: str | Path) -> DepthPolicy:
    """Read a policy file.

    Raises:
        PolicyError: the file is missing, not UTF-8, too large, or not a policy.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        hint = "taper policy list shows those shipped"
        raise PolicyError(f"cannot read policy {path}: {error.strerror}", hint) from None
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(f"policy {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return DepthPolicy.from_json(raw.decode())
    except UnicodeDecodeError:
        raise PolicyError(f"policy {path} is not UTF-8 text") from None
    except PolicyError as error:
        raise PolicyError(f"policy {path}: {error.message}", error.hint) from None


def shipped_policies() -> dict[str, list[DepthPolicy]]:
    """The calibrated policies that come with Taper, by model, deepest first."""
    shipped: dict[str, list[DepthPolicy]] = {}
    for folder in resources.files(__package__).joinpath("policies").iterdir():
        if folder.is_dir():
            files = [file for file in folder.iterdir() if file.name.endswith(".json")]
            policies = [DepthPolicy.from_json(file.read_text(encoding="utf-8")) for file in files]
            shipped[folder.name] = sorted(policies, key=lambda policy: -policy.mean_depth(128))
    return shipped


def _least_depth(num_hidden_layers: int, skip_order: tuple[int, ...]) -> int:
    return max(1, num_hidden_layers - len(skip_order))


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _check_int(what: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return
    rule = f"at least {low}" if high is None else f"from {low} to {high}"
    raise PolicyError(f"{what} is {value!r}; it must be a whole number {rule}")


def _check_object(what: str, data: object, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PolicyError(f"{what} must be a JSON object, got {type(data).__name__}")
    if unknown := sorted(set(data) - required - optional):
        raise PolicyError(f"{what} has no key {unknown[0]!r}", f"keys: {', '.join(sorted(required | optional))}")
    if missing := sorted(required - set(data)):
        raise PolicyError(f"{what} lacks {missing[0]!r}")
    return data


def _read_identity(data: object) -> ModelIdentity:
    checks: dict[str, Callable[[Any], bool]] = {
        "architecture": lambda value: isinstance(value, str),
        "hidden_size": lambda value: type(value) is int and value > 0,
        "vocab_size": lambda value: type(value) is int and value > 0,
        "quantization": lambda value: isinstance(value, str),
    }
    identity = _check_object("model", data, set(checks), set())
    for key, check in checks.items():
        if not check(identity[key]):
            raise PolicyError(f"model.{key} is {identity[key]!r}; it has the wrong type")
    return ModelIdentity(**identity)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return data


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")
