"""What was asked of a calibration, what it measured, and both in words.

`taper calibrate --json` and committed results hold all of a `CalibrationSummary`, policy files its `provenance`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from ...errors import RequestError, number
from ...policy import ModelIdentity
from .clock import CostModel, TimedRuns
from .long_outputs import MAX_TOKENS, LongOutputs
from .statistics import MIN_OUTPUTS, MIN_STEPS, FreeRunning, Loss, LossByStep, Losses, LossEstimate, SolvedProblems
from .store import Conditions

HURTS = 0.9  # agreement over tapered steps below which readers are warned

BudgetVerdict = Literal["kept", "kept by the estimate", "not kept", "not enough steps"]

# Each limit of a budget is above the first number and at most the second.
_RANGES = {"max_kl": (0, 1000), "min_agreement": (0, 1), "max_nll_increase": (0, 100_000), "speedup": (1, 100)}
# Each quality limit in words, and the metric that it bounds: its name, factor and unit.
_LIMITS = {
    "max_kl": ("mean KL at most {:.4g} nats", "kl", 1, "nats"),
    "min_agreement": ("agreement of {:.4g} % or more", "agreement", 100, "%"),
    "max_nll_increase": ("NLL rise at most {:.4g} %", "nll_increase", 1, "%"),
}


@dataclass(frozen=True)
class Budget:
    """The quality that a policy must keep over tapered steps, or the speed that it must reach.

    Raises:
        RequestError: a number is out of its range, there is none, or speed and quality are both given.
    """

    max_kl: float | None = None  # mean KL(full || policy), nats, above 0
    min_agreement: float | None = None  # share of steps whose argmax is that of full depth, in (0, 1]
    max_nll_increase: float | None = None  # rise of the NLL of full depth's own outputs, per cent, above 0
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
            hint = "give --min-agreement 95%, --max-kl 0.1, --max-nll-increase 5, or instead of a budget --speedup 1.1"
            raise RequestError("a budget is missing: what may be lost", hint)

    @property
    def given(self) -> dict[str, float]:
        """The limits that were set, by name."""
        return {name: limit for name, limit in vars(self).items() if limit is not None}

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

    def verdict(self, tapered: LossEstimate | None) -> BudgetVerdict | None:
        """Whether a loss over tapered steps keeps the budget; None if a speed was asked for, as quality has no limit.

        It is "kept" only if whole intervals keep it, and "not enough steps" if too few were measured (None).
        """
        if self.speedup is not None:
            return None
        if tapered is None:
            return "not enough steps"
        if self.worst_share(tapered.value) > 1:
            return "not kept"
        return "kept" if self.worst_share(tapered.worst) <= 1 else "kept by the estimate"

    def is_met(self, tapered: LossEstimate | None) -> bool:
        """Whether the estimates keep the budget; a speed is always met, as it is predicted."""
        return self.verdict(tapered) not in ("not kept", "not enough steps")


# What was measured


@dataclass(frozen=True)
class Speedup:
    """Time per token at full depth over that of the policy, without first tokens."""

    predicted: float
    measured: TimedRuns


@dataclass(frozen=True)
class CalibratedModel:
    """What to call the calibrated model, the hash of its files, and its layers."""

    name: str
    sha256: str
    num_hidden_layers: int


@dataclass(frozen=True)
class PromptCounts:
    """How many prompts were searched on and held out, and a hash of all of them; whether they are those of `quick`."""

    search: int
    held_out: int
    sha256: str
    quick: bool | None = None  # None: no


@dataclass(frozen=True)
class Frontier:
    """Loss and predicted speed at constant depths, along the measured order, on the search prompts."""

    speedup: dict[int, float]  # by depth
    kl: dict[int, float]  # mean KL by depth, nats


@dataclass(frozen=True)
class Example:
    """A held-out prompt, and how full depth and the policy go on from it, as text."""

    prompt: str
    full: str
    policy: str


@dataclass(frozen=True)
class Validation:
    """What a policy costs on prompts and problems that the search never saw."""

    held_out: Losses  # on held-out prompts
    free_running: FreeRunning  # the policy's own outputs to those prompts
    long_outputs: LongOutputs  # both by ranges of steps, how outputs end, and whether the policy may be a default
    # On held-out word problems; None where the model solves too few at full depth.
    problems: SolvedProblems | None = field(default=None, kw_only=True)
    # On the next output at full depth after one of the policy's own, whose skipped layers have filled keys and values;
    # None where the context is too short for two.
    next_output: LossEstimate | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class CalibrationSummary(Validation):
    """All that was measured."""

    mean_depth: float  # layers run for a token, over steps from 1 on of an output of the planned length
    speedup: Speedup
    model: CalibratedModel
    prompts: PromptCounts
    seed: int  # of the split and the samples
    budget: Budget
    tokens: int  # of all prompts and outputs
    answer_tokens: int  # length of output that was planned for
    policy: str  # name or label of the policy
    on_search_prompts: Losses
    conditions: Conditions
    # Policy files leave out what follows.
    model_identity: ModelIdentity  # what policies are checked against
    cost_ms: CostModel  # time of a step by depth
    importance: list[float]  # [L], mean KL of skipping each layer alone, nats
    skip_order: list[int]  # the flex layers
    searched_layers: int  # how many of those were ordered by search; the rest are by importance
    core_layers: list[int]
    curve: list[int]  # [answer_tokens], the policy's depth at each step
    by_step: LossByStep  # on held-out prompts
    frontier: Frontier
    # How many of the first layers can be skipped before fewer word problems are solved; None without word problems.
    harmless_layers: int | None = None
    examples: list[Example] = field(default_factory=list)

    @property
    def verdict(self) -> BudgetVerdict | None:
        """Whether the policy keeps the budget on held-out prompts; None if a speed was asked for."""
        return self.budget.verdict(self.held_out.tapered_steps)

    @property
    def budget_met(self) -> bool:
        """Whether the estimates keep the budget; a speed is always met, as it is predicted."""
        return self.budget.is_met(self.held_out.tapered_steps)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data, with the verdict."""
        return to_plain(self) | {"budget_met": self.budget_met, "verdict": self.verdict}  # type: ignore[no-any-return]

    @property
    def provenance(self) -> dict[str, Any]:
        """What a policy file says of its origin."""
        names = [item.name for item in fields(self)]
        left_out = names[names.index("model_identity") :]
        return {name: value for name, value in self.to_json().items() if name not in left_out}


def to_plain(value: Any) -> Any:
    """Dataclasses, named tuples and what holds them as JSON has it; a field that is None by default is left out.

    The key of a field is its name, or what its metadata has under "json".
    """
    return json.loads(json.dumps(value, default=_given_fields))


def _given_fields(value: Any) -> dict[str, Any]:
    given = [(item, getattr(value, item.name)) for item in fields(value)]
    needed = [(item, part) for item, part in given if part is not None or item.default is MISSING]
    return {item.metadata.get("json", item.name): part for item, part in needed}


# In words, which the command line, the report and pages of results share


def interval(estimate: Sequence[float] | None, factor: float = 1.0, unit: str = "", digits: int | None = None) -> str:
    """An estimate and its interval, times a factor, such as "0.052 (0.048 to 0.057)"; a dash for None.

    An interval without width is left out: it comes from too few outputs, or from outputs that are all alike. `digits`
    are decimals, by default up to the first one that the interval leaves open.
    """
    if estimate is None:
        return "–"
    value, low, high = (factor * x for x in estimate)
    if low == high:
        return f"{value:{'.3g' if digits is None else f'.{digits}f'}}{unit}"
    if digits is None:
        digits = min(6, max(0, -math.floor(math.log10((high - low) / 2))))
    form = f".{digits}f"
    return f"{value:{form}}{unit} ({low:{form}} to {high:{form}}{unit})"


def limits(summary: CalibrationSummary) -> list[tuple[str, str]]:
    """Each limit of the budget, and what was measured on held-out prompts."""
    held_out, speedup = summary.held_out, summary.speedup
    if summary.budget.speedup is not None:
        speeds = f"{speedup.predicted:.2f} predicted, {speedup.measured.median:.2f} measured"
        return [(f"{summary.budget.speedup:.4g} times the speed of full depth", speeds)]
    measured = (held_out.tapered_steps or held_out.all_steps).value
    where = "" if held_out.tapered_steps else " over all steps"
    return [
        (_LIMITS[name][0].format(_LIMITS[name][2] * limit), _bounded(name, measured) + where)
        for name, limit in summary.budget.given.items()
    ]


def verdict(summary: CalibrationSummary) -> str:
    """The verdict on the budget in words."""
    budget, tapered = summary.budget, summary.held_out.tapered_steps
    if summary.verdict is None:
        return "the best quality that was found at this speed"
    if tapered is None:
        return f"no verdict, as {too_few_steps(summary)}"
    if summary.verdict == "kept by the estimate":
        over = [name for name, share in budget.shares(tapered.worst).items() if share > 1]
        reached = " and ".join(_bounded(name, tapered.worst) for name in over)
        return f"kept by the estimate; the 95 % interval reaches {reached}"
    return "kept" if summary.verdict == "kept" else "not kept; this is the nearest policy that was found"


def too_few_steps(summary: CalibrationSummary) -> str:
    """Why there are no figures over tapered steps."""
    steps, outputs = summary.held_out.num_tapered_steps, summary.held_out.num_tapered_outputs
    if not steps:
        return "no held-out step skips a layer"
    few = f"only {counted(steps, 'held-out step')} in {counted(outputs, 'output')} {'skips' if steps == 1 else 'skip'}"
    return f"{few} a layer; at least {MIN_STEPS} steps in {MIN_OUTPUTS} outputs are needed"


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remarks(summary: CalibrationSummary) -> list[str]:
    """What a user should know before any figure."""
    tapered, speed, repetition = summary.held_out.tapered_steps, summary.speedup, summary.free_running.repetition
    problems, prompts = summary.problems, summary.prompts
    quick = (
        f"A quick look: {prompts.held_out} held-out prompts and no word problems. Calibrate without --quick before you "
        "rely on it."
    )
    unknown = "" if tapered else f"What it costs is not known: {too_few_steps(summary)}."
    if summary.curve[-1] == summary.model.num_hidden_layers:  # it skips no layer
        return [quick] if prompts.quick else []
    asked_speed, long = summary.budget.speedup or 0.0, summary.long_outputs
    short = long.max_tokens < MAX_TOKENS
    texts = {
        "Do not use this policy here: measured, it is slower than full depth.": speed.measured.median < 1,
        quick: bool(prompts.quick),
        unknown: tapered is None and summary.budget.speedup is not None,
        "This policy hurts: at more than one tapered step in ten another token becomes the likeliest. Expect other "
        "answers than at full depth, and read some before you use it.": tapered is not None
        and tapered.agreement.value < HURTS,
        "It solves significantly fewer word problems than full depth: do not trust its arithmetic.": (
            problems is not None and problems.difference.high < 0
        ),
        "Not every timed run was faster than full depth.": speed.measured.slowest <= 1 <= speed.measured.median,
        "Measured, it is slower than was asked for.": speed.measured.fastest < asked_speed,
        "Left to itself, it repeats itself more than the model does at full depth.": (
            repetition.policy.low > repetition.full.high
        ),
        f"Measured in outputs of up to {long.max_tokens} tokens. Longer ones mostly run at its least depth: calibrate "
        f"with --answer-tokens {MAX_TOKENS} to see what that costs.": short and not prompts.quick,
        f"Do not make it a default: in outputs of up to {long.max_tokens} tokens, it may be worse than full depth in "
        f"{', '.join(long.failures)}.": bool(long.failures) and not short,
    }
    return [text for text, holds in texts.items() if holds]


def _bounded(name: str, loss: Loss) -> str:
    """The metric that a limit bounds."""
    _, metric, factor, unit = _LIMITS[name]
    return f"{factor * getattr(loss, metric):.3g} {unit}"
