"""Everything that a calibration measured, as typed values and as JSON.

`taper calibrate --json` and committed results hold all of it, policy files the part called `Provenance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..policy import ModelIdentity
from .budget import Budget, Verdict
from .conditions import Conditions
from .cost import CostModel, TimedRuns
from .statistics import Estimate, FreeRunning, LossByStep, Losses, SolvedProblems

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
