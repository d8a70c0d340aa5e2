"""From a model and a task to the fastest policy that keeps the task's accuracy within a margin.

Layers are ordered as for a budget, with the task's problems in place of word problems; policies are validated by the
problems that they solve.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import RequestError, number, whole_number
from ...llm import LLM
from ...policy import DepthPolicy
from .measured_model import MeasuredModel, measured_model
from .problems import Problems, ProblemSet
from .progress import Report
from .prompts import BATCH
from .replay import Reference
from .run import adapted, search_order
from .search import first_steps
from .statistics import PairedComparison, compare_with_interim_tests
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

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        rows = [{"skipped": trial.policy.skip_order, **vars(trial)} for trial in self.trials]
        trials = [to_plain({name: value for name, value in row.items() if name != "policy"}) for row in rows]
        policy = None if self.policy is None else json.loads(self.policy.without_adapters().to_json())
        return {"settings": self.settings, "trials": trials, "policy": policy}


def check_count(num_problems: int) -> None:
    """Raise RequestError for a task with too few problems."""
    if num_problems < SEARCH_PROBLEMS + FIRST_TEST:
        raise RequestError(
            f"the task has {num_problems} problems; {SEARCH_PROBLEMS + FIRST_TEST} are needed",
            "give more; taper eval compares policies on any number",
        )


def calibrate_to_task(
    llm: LLM,
    problem_set: ProblemSet,
    margin: float,
    *,
    problems: int = PROBLEMS,
    healed: DepthPolicy | None = None,
    seed: int = 0,
    name: str = "",
    progress: Report | None = None,
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
        healed: a policy with adapters, whose layers are tried in its own order.
        seed: of the shuffle.
        name: of the policy.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Raises:
        RequestError: an argument out of its range, too few problems, or none that the model solves.
        ModelError: the model's output is not a number.
    """
    margin = number("margin", margin, 0, 1, above=True, below=True)
    problems = whole_number("problems", problems, FIRST_TEST)
    if healed is not None:
        healed = adapted(llm, healed)
    check_count(len(problem_set))
    shuffled = np.random.default_rng(seed).permutation(len(problem_set)).tolist()
    search, rest = shuffled[:SEARCH_PROBLEMS], shuffled[SEARCH_PROBLEMS:]
    with measured_model(llm, progress) as model:
        judged = Problems(problem_set, search, rest[:problems], model.store)
        settings = {
            **problem_set.identity,
            "margin": margin,
            "problems": {"search": len(search), "validation": problems},
            "conditions": to_plain(model.conditions),
            "model": to_plain(model.identity),
        }
        prompt = problem_set.prompt_ids(search[:1])[search[0]]  # of the clock
        order: list[int] = []
        trials: list[Trial] = []
        with model.measurements(_references(model, judged)) as measurements:
            layers_to_skip: Iterable[int] = healed.adapted_layers if healed else ()
            if healed is None:
                rounds = model.num_hidden_layers // 3
                _, searched = search_order(model, measurements, judged, rounds, tolerance=0)
                layers_to_skip = (skipped.layer for skipped in searched)
            for layer in layers_to_skip:
                measurements.close()  # frees the slots for the outputs
                order.append(layer)
                trials.append(_try(model, judged, order, margin, seed, prompt, healed))
                if not trials[-1].holds:
                    break
        best = max((trial for trial in trials if trial.holds), key=lambda trial: trial.speedup, default=None)
        if best is None:
            return TaskCalibration(None, settings, trials)
        tokens = max(2, round(best.tokens))
        provenance = settings | {
            "order": order,
            "comparison": to_plain(best.comparison),
            "answer_tokens": tokens,
            "mean_depth": round(best.policy.mean_depth(tokens), 3),
            "speedup": {
                "predicted": round(best.speedup, 4),
                "measured": list(model.speedup(prompt, best.policy, tokens)),
            },
        }
        policy = replace(best.policy, name=name, model=llm.config.identity, provenance=provenance)
        return TaskCalibration(policy, settings, trials)


def _references(model: MeasuredModel, problems: Problems) -> list[Reference]:
    """The first steps of full depth's outputs to some search problems, for replay."""
    search = problems.search
    stage = model.progress.stage("outputs at full depth", -(-len(search) // BATCH))
    attempts = problems.attempts(search, model.full, stage)
    if not any(attempt.solved for attempt in attempts):
        raise RequestError(
            f"at full depth the model solves none of {len(attempts)} problems",
            "choose a task that it can do, or another --filter",
        )
    prompts = problems.problem_set.prompt_ids(search)
    outputs = [Reference(prompts[i], tuple(one.completion_ids)) for i, one in zip(search, attempts, strict=True)]
    known = first_steps(outputs, REPLAYED_STEPS)[:REPLAYED]
    if not known:
        raise RequestError("the outputs end with their first token: there is no step to taper")
    return known


def _try(
    model: MeasuredModel,
    problems: Problems,
    skipped: Sequence[int],
    margin: float,
    seed: int,
    prompt: tuple[int, ...],
    healed: DepthPolicy | None,
) -> Trial:
    """Compare a policy with full depth on more and more problems, until the verdict is clear or none is left."""
    policy = DepthPolicy.static(model.num_hidden_layers, model.num_hidden_layers - len(skipped), skipped)
    chosen = healed.adapters.only(skipped) if healed and healed.adapters else None
    policy = replace(policy, name=f"skip {' '.join(map(str, skipped))}", adapters=chosen)
    validation, lengths = problems.validation, list[int]()

    def ask(count: int) -> tuple[list[bool], list[bool]]:
        name = f"{len(skipped)} layers skipped: {count} problems"
        stage = model.progress.stage(name, 2 * -(-count // BATCH))
        full, own = (problems.attempts(validation[:count], one, stage) for one in (model.full, policy))
        lengths[:] = [len(attempt.completion_ids) for attempt in own]
        return [attempt.solved for attempt in full], [attempt.solved for attempt in own]

    comparison = compare_with_interim_tests(ask, len(validation), FIRST_TEST, margin, seed)
    tokens = float(np.mean(lengths))
    planned = max(32, round(tokens) // 32 * 32)  # the clock is the same for outputs of about this length
    return Trial(policy, comparison, tokens, model.cost(prompt, planned, healed).speedup(policy, max(2, round(tokens))))
