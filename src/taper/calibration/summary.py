"""Everything that a calibration measured, as typed values and as JSON.

`taper calibrate --json` and committed results hold all of it, policy files the part called `Provenance`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import RequestError, number
from ..policy import ModelIdentity
from .clock import CostModel, TimedRuns
from .statistics import Estimate, FreeRunning, Loss, LossByStep, Losses, LossEstimate, SolvedProblems
from .store import Conditions

MEASURED_ORDER = "measured order"  # what a comparison of methods calls the order that calibration found
LossByDepth = dict[int, Estimate]
T = TypeVar("T")


@dataclass(frozen=True)
class Speedup:
    """Time per token at full depth over that of the policy, first tokens left out."""

    predicted: float
    measured: TimedRuns


@dataclass(frozen=True)
class Figures:
    """What a policy saves and costs: what tables of results show."""

    mean_depth: float  # layers run for a token, over steps from 1 on of an answer of the planned length
    speedup: Speedup
    held_out: Losses  # on held-out prompts
    free_running: FreeRunning  # the policy's own answers to those prompts
    # On held-out word problems; None where the model solves too few at full depth.
    problems: SolvedProblems | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """The inverse of `to_json`, of data that Taper wrote; keys that are not fields are left out."""
        value: T = from_plain(cls, data)
        return value


@dataclass(frozen=True)
class CalibratedModel:
    """The calibrated model: what to call it, the hash of its files, its layers."""

    name: str
    sha256: str
    num_hidden_layers: int


@dataclass(frozen=True)
class PromptCounts:
    """How many prompts were searched on and held out, and a hash of all of them."""

    search: int
    held_out: int
    sha256: str


@dataclass(frozen=True)
class Provenance(Figures):
    """What a policy file says of its origin."""

    model: CalibratedModel
    prompts: PromptCounts
    seed: int  # of the split and the samples
    budget: Budget
    tokens: int  # of all prompts and answers
    answer_tokens: int  # length of answer that was planned for
    policy: str  # name or label of the policy
    on_search_prompts: Losses
    conditions: Conditions

    @property
    def verdict(self) -> Verdict | None:
        """Whether the policy keeps the budget on held-out prompts; None where a speed was asked for."""
        return self.budget.verdict(self.held_out.tapered_steps)

    @property
    def budget_met(self) -> bool:
        """Whether the estimates keep the budget; a speed always does, as it is predicted."""
        return self.verdict != "not kept"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data, with the verdict."""
        return super().to_json() | {"budget_met": self.budget_met, "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    """Loss of several orders of layers on the same steps, at constant depths: method -> depth -> figure."""

    kl: dict[str, LossByDepth]  # mean KL, nats
    agreement: dict[str, LossByDepth]  # 0 to 1
    kl_above_measured_order: dict[str, LossByDepth]  # paired; of methods that retain other layers at that depth


@dataclass(frozen=True)
class Frontier:
    """Loss against constant depth, and predicted speed: of the order found alone, or of a `Comparison`."""

    prompts: Literal["search", "held out"]
    speedup: dict[int, float]  # by depth
    kl: Mapping[str, Mapping[int, float | Estimate]]  # as in `Comparison`; on search prompts without an interval
    agreement: dict[str, LossByDepth] | None = None
    kl_above_measured_order: dict[str, LossByDepth] | None = None


@dataclass(frozen=True)
class Summary(Provenance):
    """All that was measured."""

    model_identity: ModelIdentity  # what policies are checked against
    cost_ms: CostModel  # time of a step by depth
    importance: list[float]  # [L], mean KL of skipping each layer alone, nats
    skip_order: list[int]  # the flex layers
    searched_layers: int  # how many of those were ordered by search; the rest are by importance
    core_layers: list[int]
    curve: list[int]  # [answer_tokens], the policy's depth at each step
    by_step: LossByStep  # on held-out prompts
    frontier: Frontier
    # How many of the first ones can be skipped before fewer word problems are solved; None where these tell nothing.
    harmless_layers: int | None = None


def to_plain(value: Any) -> Any:
    """A value of these types as JSON has it; a field that is None by default is left out when it is None."""
    if is_dataclass(value):
        pairs = [(field, getattr(value, field.name)) for field in fields(value)]
        return {_key(field): to_plain(part) for field, part in pairs if part is not None or field.default is not None}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [to_plain(part) for part in value]
    return list(value) if isinstance(value, Estimate | TimedRuns) else value


def from_plain(kind: Any, data: Any) -> Any:
    """The inverse of `to_plain`: a value of this type, which is one that a field of a summary has."""
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        known = [field for field in fields(kind) if _key(field) in data]
        return kind(**{field.name: from_plain(kinds[field.name], data[_key(field)]) for field in known})  # type: ignore[operator]
    if kind in (Estimate, TimedRuns):
        return kind(*data)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (dict, Mapping):
        return {parts[0](key): from_plain(parts[1], part) for key, part in data.items()}
    if origin in (Union, UnionType):  # X | None, or a figure that may have an interval
        return from_plain(parts[1] if isinstance(data, list) else parts[0], data)
    return data


def _key(field: Field[Any]) -> str:
    """The JSON key of a field."""
    return field.metadata.get("json", field.name)  # type: ignore[no-any-return]


Verdict = Literal["kept", "kept by the estimate", "not kept"]

# Each limit is above the first number and at most the second.
_RANGES = {"max_kl": (0, 1000), "min_agreement": (0, 1), "max_nll_increase": (0, 100_000), "speedup": (1, 100)}


@dataclass(frozen=True)
class Budget:
    """What a policy must keep to, over tapered steps; or the speed to reach at the best quality.

    Raises:
        RequestError: a number is out of its range, there is none, or speed and quality are both given.
    """

    max_kl: float | None = None  # mean KL(full || policy), nats, above 0
    min_agreement: float | None = None  # share of steps whose likeliest token is that of full depth, in (0, 1]
    max_nll_increase: float | None = None  # rise of the NLL of full depth's own answers, per cent, above 0
    speedup: float | None = None  # predicted time per token at full depth over that of the policy, above 1

    def __post_init__(self) -> None:
        for name, limit in self.given.items():
            low, high = _RANGES[name]
            object.__setattr__(self, name, number(name, limit, low, high, above=True))
        if self.speedup is not None and len(self.given) > 1:
            raise RequestError(
                "a speed and a quality cannot both be asked for",
                "leave out --speedup, or leave out --max-kl, --min-agreement and --max-nll-increase",
            )
        if not self.given:
            raise RequestError("no budget", "give --max-kl, --min-agreement, --max-nll-increase or --speedup")

    @property
    def given(self) -> dict[str, float]:
        """The limits that were set, by name."""
        limits = {limit.name: getattr(self, limit.name) for limit in fields(self)}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def shares(self, loss: Loss) -> dict[str, float]:
        """How much of each quality limit a loss takes, by name: at most 1 where the limit is kept."""
        taken = {"max_kl": loss.kl, "min_agreement": 1 - loss.agreement, "max_nll_increase": loss.nll_increase}
        limits = self.given
        if self.min_agreement is not None:
            limits["min_agreement"] = max(1 - self.min_agreement, 1e-9)
        return {name: taken[name] / limit for name, limit in limits.items() if name in taken}

    def worst_share(self, loss: Loss) -> float:
        """The largest of these shares, 0 where quality has no limit."""
        return max([0.0, *self.shares(loss).values()])

    def verdict(self, tapered: LossEstimate | None) -> Verdict | None:
        """Whether a loss over tapered steps keeps the budget.

        "kept" only where whole intervals do; "not kept" also where too few steps were measured (None); no verdict
        where a speed was asked for, as quality has no limit then.
        """
        if self.speedup is not None:
            return None
        if tapered is None or self.worst_share(tapered.value) > 1:
            return "not kept"
        return "kept" if self.worst_share(tapered.worst) <= 1 else "kept by the estimate"


HURTS = 0.9  # agreement over tapered steps below which readers are warned


# Each quality limit in words, and the figure that it bounds: its name, factor and unit.
_LIMITS = {
    "max_kl": ("mean KL at most {:.4g} nats", "kl", 1, "nats"),
    "min_agreement": ("agreement of {:.4g} % or more", "agreement", 100, "%"),
    "max_nll_increase": ("NLL rise at most {:.4g} %", "nll_increase", 1, "%"),
}


def interval(estimate: Estimate | None, factor: float = 1.0, unit: str = "", digits: int | None = None) -> str:
    """A figure and its interval, times a factor, such as "0.052 (0.048 to 0.057)"; a dash for None.

    `digits` are decimals, by default up to the first one that the interval leaves open.
    """
    if estimate is None:
        return "–"
    value, low, high = (factor * x for x in estimate)
    if digits is None and high > low:
        digits = min(6, max(0, -math.floor(math.log10((high - low) / 2))))
    form = ".3g" if digits is None else f".{digits}f"
    return f"{value:{form}}{unit} ({low:{form}} to {high:{form}}{unit})"


def limits(summary: Provenance) -> list[tuple[str, str]]:
    """Each limit of the budget, and what was measured on held-out prompts."""
    measured, speedup = summary.held_out.tapered_steps or summary.held_out.all_steps, summary.speedup
    rows = []
    for name, limit in summary.budget.given.items():
        if name in _LIMITS:
            asked, _, factor, _ = _LIMITS[name]
            rows.append((asked.format(factor * limit), _bounded(name, measured.value)))
        else:
            speeds = f"{speedup.predicted:.2f} predicted, {speedup.measured.median:.2f} measured"
            rows.append((f"{limit:.4g} times the speed of full depth", speeds))
    return rows


def verdict(summary: Provenance) -> str:
    """What came of the budget: "kept" only where whole intervals keep it."""
    budget, tapered = summary.budget, summary.held_out.tapered_steps
    if summary.verdict is None:
        return "the best quality that was found at this speed"
    if summary.verdict == "kept by the estimate" and tapered is not None:
        over = [name for name, share in budget.shares(tapered.worst).items() if share > 1]
        reached = " and ".join(_bounded(name, tapered.worst) for name in over)
        return f"kept by the estimate; the 95 % interval reaches {reached}"
    return "kept" if summary.verdict == "kept" else "not kept; this is the nearest policy that was found"


def remarks(summary: Provenance) -> list[str]:
    """What a user would want to be told before any figure."""
    tapered, speed, repetition = summary.held_out.tapered_steps, summary.speedup, summary.free_running.repetition
    problems = summary.problems
    if tapered is None:
        return []
    asked_speed = summary.budget.speedup or 0.0
    texts = {
        "This policy hurts: at more than one tapered step in ten another token becomes the likeliest. Expect other "
        "answers than at full depth, and read some before you use it.": tapered.agreement.value < HURTS,
        "It solves fewer word problems than the model does at full depth: do not trust its arithmetic.": (
            problems is not None and problems.difference.high < 0
        ),
        "Not every timed run was faster than full depth.": speed.measured.slowest <= 1,
        "Measured, it is slower than was asked for.": speed.measured.fastest < asked_speed,
        "Left to itself, it repeats itself more than the model does at full depth.": (
            repetition.policy.low > repetition.full.high
        ),
    }
    return [text for text, holds in texts.items() if holds]


def _bounded(name: str, loss: Loss) -> str:
    """The figure that a limit bounds."""
    _, figure, factor, unit = _LIMITS[name]
    return f"{factor * getattr(loss, figure):.3g} {unit}"
