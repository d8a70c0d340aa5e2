"""The comparison of methods on tasks, for `taper reproduce` and for research scripts.

A `Study` is a model on which methods are compared. A `TaskStudy` is one task of it: the outputs of full depth, policies
tuned to one mean depth over them, and the outputs of those policies. Outputs and replays are kept in a folder, so an
interrupted comparison continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration.prompts import builtin_prompts, completions, encode_prompts
from ..calibration.replay import Reference, Scores
from ..calibration.statistics import by_completion, ratio_estimate
from ..calibration.store import Measurements, current_conditions, open_store
from ..errors import RequestError, whole_number
from ..llm import LLM
from ..models.download import content_hash
from ..policy import DepthPolicy
from .methods import FULL, methods
from .records import Record
from .run import Evaluation, Evaluator
from .tasks import Selection

TUNED = 32  # problems of each task; policies are tuned to a mean depth over full depth's outputs to them
SPANS = (1, 9, 17, 33, 65, 129, 257, 513, 1025)  # first steps of the spans over which metrics by step are averaged
INFLUENCE_PROMPTS, INFLUENCE_TOKENS = 24, 64  # block influence is measured on outputs to these built-in prompts
Log = Callable[[str], None]


@dataclass
class Study:
    """A model on which methods are compared. Close it to close its files.

    Raises:
        RequestError: a number is below 1, or the folder cannot be written to.
    """

    llm: LLM  # its `max_batch_size` is the number of outputs at a time
    order: Sequence[int]  # flex layers in the order in which calibration skips them
    folder: Path  # keeps outputs and replays
    limit: int | None = None  # problems of each task, the first ones; None: all
    max_tokens: int | None = None  # of an output; None: the task's own limit
    num_replayed: int = 16  # outputs of full depth to each task that policies are replayed on
    log: Log = print  # called with one line about each step of the work

    def __post_init__(self) -> None:
        whole_number("limit", 1 if self.limit is None else self.limit, 1)
        whole_number("num_replayed", self.num_replayed, 1)
        self.full = DepthPolicy.full(self.llm.config.num_hidden_layers)
        replays = self.folder / "replays.sqlite"
        self._store = open_store(content_hash(self.llm.path), current_conditions(self.llm), replays)

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, L."""
        return self.llm.config.num_hidden_layers

    def close(self) -> None:
        """Close the file of replays."""
        self._store.close()

    def measurements(self, references: Sequence[Reference]) -> closing[Measurements]:
        """Replays of known outputs, for a `with` statement."""
        return closing(Measurements(self.llm.engine, references, self._store))

    def scores(self, references: Sequence[Reference], policies: Mapping[str, DepthPolicy]) -> dict[str, Scores]:
        """Policies by name, replayed on known outputs: steps from 1 on."""
        with self.measurements(references) as measurements:
            replayed = {name: measurements.scores(policy, lambda: None) for name, policy in policies.items()}
        return {name: scores.where(scores.step > 0) for name, scores in replayed.items()}

    @cached_property
    def influence(self) -> list[float]:
        """Block influence of each layer on outputs to built-in prompts, which are not problems of a task: [L]."""
        prompts = encode_prompts(self.llm, builtin_prompts(), 0, INFLUENCE_PROMPTS)
        references = completions(self.llm, prompts, self.full, INFLUENCE_TOKENS, self._store, lambda: None)
        with self.measurements(references) as measurements:
            return measurements.block_influence()


class TaskStudy:
    """One task of a study.

    Args:
        study: the model.
        selection: the task, alone.
        chat: ask by the model's chat template.

    Raises:
        RequestError: the selection has several tasks.
    """

    def __init__(self, study: Study, selection: Selection, chat: bool) -> None:
        if len(selection.tasks) != 1:
            raise RequestError(f"{len(selection.tasks)} tasks are given as one", "name each task by itself")
        self.study, self.task, self.chat = study, selection.tasks[0], chat
        self.num_problems = min(study.limit or self.task.num_problems, self.task.num_problems)
        self._evaluator = Evaluator(study.llm, selection, chat=chat, max_tokens=study.max_tokens)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of full depth's outputs to the first `TUNED` problems, whatever the limit."""
        problems = range(min(TUNED, self.task.num_problems))
        records = self._evaluate([self.study.full], problems).records
        return [len(record.answers[0].token_ids) for record in records if record.answers[0].token_ids]

    @cached_property
    def records(self) -> list[Record]:
        """Full depth on the first problems, up to the limit."""
        return self._evaluate([self.study.full], range(self.num_problems)).records

    @cached_property
    def prompts(self) -> dict[int, tuple[int, ...]]:
        """Token ids of the prompt of each problem, by its index."""
        return self._evaluator.prompt_ids(range(self.num_problems))

    @cached_property
    def references(self) -> list[Reference]:
        """The first `num_replayed` outputs of full depth that have at least two tokens, with their prompts."""
        outputs = [Reference(self.prompts[r.problem], r.answers[0].token_ids) for r in self.records]
        return [output for output in outputs if len(output.completion_ids) > 1][: self.study.num_replayed]

    def methods(
        self, depth: float, log: Log | None = None, lengths: Sequence[int] | None = None
    ) -> dict[str, DepthPolicy]:
        """Full depth and every method at one mean depth over outputs of some lengths, by default `lengths`, by name.

        A method that cannot come near it is left out, and `log` is called with a line about it; default the study's.

        Raises:
            RequestError: see `taper.evals.methods.methods`.
        """
        study, log, lengths = self.study, log or self.study.log, lengths or self.lengths
        tuned = methods(study.num_hidden_layers, depth, lengths, study.order, study.influence, log)
        suffix = f"at depth {depth:.6g}"  # in one file of records, policies of one name must be the same
        return {n: policy if n == FULL else replace(policy, name=f"{n}, {suffix}") for n, policy in tuned.items()}

    def evaluate(self, policies: Sequence[DepthPolicy]) -> Evaluation:
        """Policies, each with a name of its own, on the first problems, up to the limit.

        Each batch of problems is completed under one policy after the other: a prompt stays in its slot, and the rows
        of a batch all skip the same layers.
        """
        size, count = self.study.llm.engine.backend.num_slots, len(self.prompts)  # which makes all prompts at once
        for first in range(0, count, size):
            for policy in policies:
                self._evaluate([policy], range(first, min(first + size, count)))
        return self._evaluate(policies, range(count))

    def _evaluate(self, policies: Sequence[DepthPolicy], problems: range) -> Evaluation:
        is_new: list[bool] = []
        evaluation = self._evaluator.evaluate(
            policies,
            indices=problems,
            out=self.study.folder / f"{self.task.name}.jsonl",
            progress=lambda record, total, was_there: is_new.append(not was_there),
        )
        if any(is_new):
            labels = ", ".join(policy.label for policy in policies)
            self.study.log(f"{self.task.name}, {labels}: problems {problems.start + 1} to {problems.stop}")
        return evaluation


def joined(parts: Sequence[Evaluation], groups: Mapping[str, list[str]]) -> Evaluation:
    """Evaluations of several tasks as one, with groups of tasks; each of them has policies of the same names."""
    first, tasks = parts[0], [task for part in parts for task in part.selection.tasks]
    selection = replace(first.selection, tasks=tasks, groups=dict(groups))
    settings = {**first.settings, "tasks": {k: v for part in parts for k, v in part.settings["tasks"].items()}}
    return Evaluation(settings, selection, first.policies, [record for part in parts for record in part.records])


def by_step(scores: Scores, metrics: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Means of metrics over spans of steps that at least two outputs reach; each metric is [steps] of the scores."""
    rows = []
    for first, end in pairwise(SPANS):
        inside = (scores.step >= first) & (scores.step < end)
        part = scores.where(inside)
        if len(set(part.reference.tolist())) > 1:
            ones = by_completion(part, np.ones(len(part.step)))
            sums = {name: by_completion(part, values[inside]) for name, values in metrics.items()}
            means = {name: ratio_estimate(values, ones) for name, values in sums.items()}
            rows.append({"steps": [first, end - 1], "outputs": len(ones), **means})
    return rows
