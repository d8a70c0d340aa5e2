"""What came out of a calibration to a task: what was asked, each policy that was tried, and the one that is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..calibration.store import Conditions
from ..calibration.summary import to_plain
from ..policy import DepthPolicy
from .statistics import PairedComparison


@dataclass(frozen=True)
class TaskSettings:
    """What every policy was asked, and where."""

    task: str
    version: str
    fewshot: int
    split: str | None
    asked: dict[str, Any]  # how: chat, max_tokens, seed
    figure: str  # the filter whose figure counts
    margin: float
    problems: dict[str, int]  # searched on, and at most validated on
    conditions: Conditions
    model: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A policy that skips some layers, and how the task went with it."""

    policy: DepthPolicy
    comparison: PairedComparison  # with full depth on the validation problems asked; at the level of a single look
    tokens: float  # of an output, mean
    speedup: float  # predicted, over outputs of that length

    @property
    def holds(self) -> bool:
        """Whether the accuracy was shown to be within the margin."""
        return self.comparison.verdict == "holds"


@dataclass(frozen=True)
class TaskCalibration:
    """The fastest policy that holds, or None; and every policy that was tried, gentle to fast."""

    policy: DepthPolicy | None
    settings: TaskSettings
    trials: list[Trial]

    @property
    def order(self) -> list[int]:
        """The layers as they were chosen; without the last one the task may not have held."""
        return list(self.trials[-1].policy.skip_order) if self.trials else []

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        trials = [
            {
                "skipped": list(trial.policy.skip_order),
                "comparison": to_plain(trial.comparison),
                "tokens": trial.tokens,
                "speedup": trial.speedup,
            }
            for trial in self.trials
        ]
        policy = None if self.policy is None else json.loads(self.policy.to_json())
        return {"settings": to_plain(self.settings), "trials": trials, "policy": policy}
