"""From a model and a task to the fastest policy that keeps the task's accuracy within a margin.

Layers are ordered as for a budget, with the task's problems in place of word problems; policies are validated by the
problems that they solve.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import RequestError, number, whole_number
from ..llm import LLM
from ..policy import DepthPolicy
from .clock import measure_speedup
from .problems import Problems, ProblemSet
from .prompts import BATCH
from .replay import Reference
from .run import Calibrator, StageProgress
from .search import first_steps
from .statistics import PairedComparison, compare_with_interim_tests
from .store import Measurements
from .summary import to_plain

SEARCH_PROBLEMS, PROBLEMS = 32, 192
FIRST_TEST = 32  # problems before the first interim test, where a policy that fails at once is given up
REPLAYED, REPLAYED_STEPS = 16, 48  # outputs of full depth and steps of each from which KL is measured


@dataclass(frozen=True)
class Trial:
    """A policy that skips some layers, and how the task went with it."""

    policy: DepthPolicy
    comparison: PairedComparison  # with full depth on the validation problems asked; at the level of a single test
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
    settings: dict[str, Any]  # what every policy was asked, and where
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
        return {"settings": self.settings, "trials": trials, "policy": policy}


def calibrate_to_task(
    llm: LLM,
    problem_set: ProblemSet,
    margin: float,
    *,
    problems: int = PROBLEMS,
    seed: int = 0,
    name: str = "",
    progress: StageProgress | None = None,
) -> TaskCalibration:
    """Find the layers that a task can spare, and the most of them that it can spare at once.

    The problems are shuffled. On the first ones, layers are chosen one after another. After each layer, the policy
    without all those so far is compared with full depth on other problems, and the first policy that does not hold ends
    it. Each is compared at the 5 % level, gentle to fast, so the last one that holds does so at that level too.

    Args:
        llm: the model; its `max_batch_size` is at least 16, the number of outputs generated at a time.
        problem_set: problems that are not those the task is tested on.
        margin: the loss of accuracy that is accepted, in (0, 1).
        problems: most problems for each comparison.
        seed: of the shuffle.
        name: of the policy.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Raises:
        RequestError: an argument out of its range, too few problems, or none that the model solves.
        ModelError: the model's output is not a number.
    """
    margin = number("margin", margin, 0, 1, above=True, below=True)
    problems = whole_number("problems", problems, FIRST_TEST)
    shuffled = np.random.default_rng(seed).permutation(len(problem_set)).tolist()
    search, rest = shuffled[:SEARCH_PROBLEMS], shuffled[SEARCH_PROBLEMS:]
    if len(rest) < FIRST_TEST:
        raise RequestError(
            f"the task has {len(shuffled)} problems; {SEARCH_PROBLEMS + FIRST_TEST} are needed",
            "give a task with more problems",
        )
    with closing(Calibrator(llm, seed, progress)) as calibrator:
        judged = Problems(problem_set, search, rest[:problems], calibrator.full, calibrator.store)
        settings = {
            **problem_set.identity,
            "margin": margin,
            "problems": {"search": len(search), "validation": problems},
            "conditions": to_plain(calibrator.conditions),
            "model": to_plain(calibrator.model),
        }
        return _TaskCalibrator(calibrator, judged, margin).run(settings, name)


class _TaskCalibrator:
    """One calibration to a task."""

    def __init__(self, calibrator: Calibrator, problems: Problems, margin: float) -> None:
        self._calibrator, self._problems, self._margin = calibrator, problems, margin
        self._layers, self._full = calibrator.layers, calibrator.full
        first = problems.search[0]
        self._timed_prompt = problems.problem_set.prompt_ids([first])[first]

    def run(self, settings: dict[str, Any], name: str) -> TaskCalibration:
        """Choose layers and try policies in turn, until one does not hold."""
        order: list[int] = []
        trials: list[Trial] = []
        with closing(self._measurements()) as measurements:
            importance = self._calibrator.importance(measurements)
            rounds = self._layers // 3
            for skipped in self._calibrator.layers_to_skip(measurements, importance, self._problems, rounds):
                measurements.close()  # frees the slots for the outputs
                order.append(skipped.layer)
                trials.append(self._try(order))
                if not trials[-1].holds:
                    break
        best = max((trial for trial in trials if trial.holds), key=lambda trial: trial.speedup, default=None)
        policy = None if best is None else self._finished(best, order, settings, name)
        return TaskCalibration(policy, settings, trials)

    def _measurements(self) -> Measurements:
        """Full depth's outputs to the search problems, for replay."""
        search, llm = self._problems.search, self._calibrator.llm
        tick = self._calibrator.ticks("outputs at full depth", -(-len(search) // BATCH))
        attempts = self._problems.attempts(search, self._full, tick)
        if not any(attempt.solved for attempt in attempts):
            raise RequestError(
                f"at full depth the model solves none of {len(attempts)} problems",
                "choose a task that it can do, or another --filter",
            )
        prompts = self._problems.problem_set.prompt_ids(search)
        outputs = [(prompts[i], tuple(one.completion_ids)) for i, one in zip(search, attempts, strict=True)]
        references = [Reference(prompt, ids) for prompt, ids in outputs if ids]
        known = first_steps(references, REPLAYED_STEPS)[:REPLAYED]
        if not known:
            raise RequestError("the outputs end with their first token: there is no step to taper")
        return Measurements(llm.engine, known, self._calibrator.store)

    def _try(self, skipped: Sequence[int]) -> Trial:
        """Compare a policy with full depth on more and more problems, until the verdict is clear or none is left."""
        label = f"skip {' '.join(map(str, skipped))}"
        policy = replace(DepthPolicy.static(self._layers, self._layers - len(skipped), skipped), name=label)
        validation, lengths = self._problems.validation, list[int]()

        def ask(count: int) -> tuple[list[bool], list[bool]]:
            stage = f"{len(skipped)} layers skipped: {count} problems"
            tick = self._calibrator.ticks(stage, 2 * -(-count // BATCH))
            full, own = (self._problems.attempts(validation[:count], one, tick) for one in (self._full, policy))
            lengths[:] = [len(attempt.completion_ids) for attempt in own]
            return [attempt.solved for attempt in full], [attempt.solved for attempt in own]

        comparison = compare_with_interim_tests(ask, len(validation), FIRST_TEST, self._margin, self._calibrator.seed)
        tokens = float(np.mean(lengths))
        planned = max(32, round(tokens) // 32 * 32)  # the clock is the same for outputs of about this length
        cost = self._calibrator.cost(self._timed_prompt, planned)
        return Trial(policy, comparison, tokens, cost.speedup(policy, max(2, round(tokens))))

    def _finished(self, trial: Trial, order: Sequence[int], settings: dict[str, Any], name: str) -> DepthPolicy:
        """The policy with its provenance and its measured speed."""
        policy, tokens = trial.policy, max(2, round(trial.tokens))
        self._calibrator.ticks("speed", 1)()
        llm = self._calibrator.llm
        measured = measure_speedup(llm.engine, self._timed_prompt, policy, tokens)
        provenance = settings | {
            "order": list(order),
            "comparison": to_plain(trial.comparison),
            "answer_tokens": tokens,
            "mean_depth": round(policy.mean_depth(tokens), 3),
            "speedup": {"predicted": round(trial.speedup, 4), "measured": list(measured)},
        }
        return replace(policy, name=name, model=llm.config.identity, provenance=provenance)
