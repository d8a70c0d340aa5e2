"""Everything that a calibration measured, as typed values and as JSON.

`taper calibrate --json` and committed results hold all of it, policy files the part called `Provenance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ..policy import ModelIdentity
from .budget import Budget, Verdict
from .conditions import Conditions
from .cost import CostModel
from .free_running import FreeRunning
from .statistics import Estimate, LossByStep, Losses

MEASURED_ORDER = "measured order"  # what a comparison of methods calls the order that calibration found
LossByDepth = dict[int, Estimate]
T = TypeVar("T")


class TimedRuns(NamedTuple):
    """Speed in several timed runs, times that of full depth."""

    median: float
    slowest: float
    fastest: float


@dataclass(frozen=True)
class Speedup:
    """Time per token at full depth over that of the policy, first tokens left out."""

    predicted: float
    measured: TimedRuns


@dataclass(frozen=True)
class Figures:
    """What a policy saves and costs: what tables of results show.

    Args:
        mean_depth: layers run for a token, over steps from 1 on of an answer of the planned length.
        speedup: predicted and measured.
        held_out: losses on held-out prompts.
        free_running: the policy's own answers to those prompts.
    """

    mean_depth: float
    speedup: Speedup
    held_out: Losses
    free_running: FreeRunning

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
    """What a policy file says of its origin.

    Args:
        model: the model it was calibrated on.
        prompts: the prompts it was calibrated on.
        seed: of the split and the samples.
        budget: what was asked for.
        tokens: tokens of all prompts and answers.
        answer_tokens: length of answer that was planned for.
        policy: name or label of the policy.
        on_search_prompts: losses on the prompts that the policy was chosen on.
        conditions: versions, machine, precision.
    """

    model: CalibratedModel
    prompts: PromptCounts
    seed: int
    budget: Budget
    tokens: int
    answer_tokens: int
    policy: str
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
    """Loss of several orders of layers on the same steps, at constant depths: method -> depth -> figure.

    Args:
        kl: mean KL, nats.
        agreement: 0 to 1.
        kl_above_measured_order: the paired difference in KL, of methods that retain other layers at that depth.
    """

    kl: dict[str, LossByDepth]
    agreement: dict[str, LossByDepth]
    kl_above_measured_order: dict[str, LossByDepth]


@dataclass(frozen=True)
class Frontier:
    """Loss against constant depth, and predicted speed: of the order found alone, or of a `Comparison`.

    Args:
        prompts: which ones it was measured on.
        speedup: by depth.
        kl: method -> depth -> KL in nats; on search prompts without an interval.
        agreement: as in `Comparison`, on held-out prompts.
        kl_above_measured_order: likewise.
    """

    prompts: Literal["search", "held out"]
    speedup: dict[int, float]
    kl: Mapping[str, Mapping[int, float | Estimate]]
    agreement: dict[str, LossByDepth] | None = None
    kl_above_measured_order: dict[str, LossByDepth] | None = None


@dataclass(frozen=True)
class Summary(Provenance):
    """All that was measured.

    Args:
        model_identity: what policies are checked against.
        cost_ms: time of a step by depth.
        importance: mean KL of skipping each layer alone, nats: [L].
        skip_order: the flex layers, in the order in which they are skipped.
        searched_layers: how many of those were ordered by search; the rest are by importance.
        core_layers: the layers that always run.
        curve: the policy's depth at each step: [answer_tokens].
        by_step: held-out loss along the answer.
        frontier: loss against depth.
    """

    model_identity: ModelIdentity
    cost_ms: CostModel
    importance: list[float]
    skip_order: list[int]
    searched_layers: int
    core_layers: list[int]
    curve: list[int]
    by_step: LossByStep
    frontier: Frontier


def to_plain(value: Any) -> Any:
    """A value of these types as JSON has it; a field that is None by default is left out when it is None."""
    if is_dataclass(value):
        pairs = [(field, getattr(value, field.name)) for field in fields(value)]
        return {_key(field): to_plain(part) for field, part in pairs if part is not None or field.default is not None}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
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
