"""What a user asks of a policy, and whether a loss keeps to it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ..checks import number
from ..errors import RequestError
from .statistics import Loss, LossEstimate

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
