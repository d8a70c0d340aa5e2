"""The comparison of methods on tasks, for `taper reproduce` and for research scripts.

A `Study` is a model on which methods are compared. A `TaskStudy` is one task of it: the outputs of full depth, policies
tuned to one mean depth over them, and the outputs of those policies. Outputs and replays are kept in a folder, so an
interrupted comparison continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
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
from .run import Evaluation, evaluate, prompt_ids
from .tasks import Selection

TUNED = 32  # problems of each task; policies are tuned to a mean depth over full depth's outputs to them
SPANS = (1, 9, 17, 33, 65, 129, 257, 513, 1025)  # first steps of the spans over which metrics by step are averaged
INFLUENCE_PROMPTS, INFLUENCE_TOKENS = 24, 64  # block influence is measured on outputs to these built-in prompts
Log = Callable[[str], None]


class Study:
    """A model on which methods are compared. Close it to close its files.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        order: flex layers in the order in which calibration skips them.
        folder: keeps outputs and replays.
        limit: problems of each task, the first ones; default all.
        max_tokens: most tokens of an output; default the task's own limit.
        num_replayed: outputs of full depth to each task that policies are replayed on.
        log: called with one line about each step of the work.

    Raises:
        RequestError: a number is below 1, or the folder cannot be written to.
    """

    def __init__(
        self,
        llm: LLM,
        order: Sequence[int],
        folder: Path,
        *,
        limit: int | None = None,
        max_tokens: int | None = None,
        num_replayed: int = 16,
        log: Log = print,
    ) -> None:
        self.llm, self.order, self.folder, self.log = llm, order, folder, log
        self.limit = None if limit is None else whole_number("limit", limit, 1)
        self.max_tokens, self.num_replayed = max_tokens, whole_number("num_replayed", num_replayed, 1)
        self.num_hidden_layers = llm.config.num_hidden_layers
        self._store = open_store(content_hash(llm.path), current_conditions(llm), folder / "replays.sqlite")

    def close(self) -> None:
        """Close the file of replays."""
        self._store.close()

    def scores(self, references: Sequence[Reference], policies: Mapping[str, DepthPolicy]) -> dict[str, Scores]:
        """Policies by name, replayed on known outputs: steps from 1 on."""
        with self._measurements(references) as measurements:
            replayed = {name: measurements.scores(policy, _ignore) for name, policy in policies.items()}
        return {name: scores.where(scores.step > 0) for name, scores in replayed.items()}

    def kl_of_each_layer(self, references: Sequence[Reference]) -> np.ndarray:
        """The sum of KL over each output if one layer is skipped at every step: float64 [outputs, L], nats."""
        with self._measurements(references) as measurements:
            outputs = [range(index, index + 1) for index in range(len(references))]
            layers = range(self.num_hidden_layers)
            return np.stack([measurements.kl_sums(frozenset(), layers, output, _ignore) for output in outputs])

    @cached_property
    def influence(self) -> list[float]:
        """Block influence of each layer on outputs to built-in prompts, which are not problems of a task: [L]."""
        prompts = encode_prompts(self.llm, builtin_prompts(), 0, INFLUENCE_PROMPTS)
        full = DepthPolicy.full(self.num_hidden_layers)
        references = completions(self.llm, prompts, full, INFLUENCE_TOKENS, self._store, _ignore)
        with self._measurements(references) as measurements:
            return measurements.block_influence()

    def methods(self, depth: float, lengths: Sequence[int], log: Log | None = None) -> dict[str, DepthPolicy]:
        """Full depth and every method at one mean depth over outputs of these lengths, by name: `methods.methods`."""
        return methods(self.num_hidden_layers, depth, lengths, self.order, self.influence, log or self.log)

    def _measurements(self, references: Sequence[Reference]) -> closing[Measurements]:
        return closing(Measurements(self.llm.engine, references, self._store))


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
        self.study, self.selection, self.chat = study, selection, chat
        self.task = selection.tasks[0]
        self.num_problems = min(study.limit or self.task.num_problems, self.task.num_problems)
        self._full = DepthPolicy.full(study.num_hidden_layers)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of full depth's outputs to the first `TUNED` problems, whatever the limit."""
        problems = range(min(TUNED, self.task.num_problems))
        records = self._evaluate([self._full], problems).records
        return [len(record.answers[0].token_ids) for record in records if record.answers[0].token_ids]

    @cached_property
    def records(self) -> list[Record]:
        """Full depth on the first problems, up to the limit."""
        return self._evaluate([self._full], range(self.num_problems)).records

    @cached_property
    def prompts(self) -> dict[int, tuple[int, ...]]:
        """Token ids of the prompt of each problem, by its index."""
        indices = range(self.num_problems)
        return prompt_ids(self.study.llm, self.task, indices, self.chat, self.study.max_tokens)

    @cached_property
    def references(self) -> list[Reference]:
        """The first `num_replayed` outputs of full depth that have at least two tokens, with their prompts."""
        outputs = [Reference(self.prompts[r.problem], r.answers[0].token_ids) for r in self.records]
        return [output for output in outputs if len(output.completion_ids) > 1][: self.study.num_replayed]

    def methods(self, depth: float, log: Log | None = None) -> dict[str, DepthPolicy]:
        """Full depth and every method at one mean depth over `lengths`, by name.

        A method that cannot come near it is left out, and `log` is called with a line about it; default the study's.

        Raises:
            RequestError: see `taper.evals.methods.methods`.
        """
        tuned = self.study.methods(depth, self.lengths, log)
        suffix = f"at depth {depth:.6g}"  # in one file of records, policies of one name must be the same
        return {n: policy if n == FULL else replace(policy, name=f"{n}, {suffix}") for n, policy in tuned.items()}

    def evaluate(self, policies: Sequence[DepthPolicy]) -> Evaluation:
        """Policies, each with a name of its own, on the first problems, up to the limit.

        Each batch of problems is completed under one policy after the other: a prompt stays in its slot, and the rows
        of a batch all skip the same layers.
        """
        size = self.study.llm.engine.backend.num_slots
        for first in range(0, self.num_problems, size):
            batch = range(first, min(first + size, self.num_problems))
            for policy in policies:
                self._evaluate([policy], batch)
        return self._evaluate(policies, range(self.num_problems))

    def _evaluate(self, policies: Sequence[DepthPolicy], problems: range) -> Evaluation:
        is_new: list[bool] = []
        study = self.study
        evaluation = evaluate(
            study.llm,
            self.selection,
            policies,
            indices=problems,
            chat=self.chat,
            max_tokens=study.max_tokens,
            out=study.folder / f"{self.task.name}.jsonl",
            progress=lambda record, total, was_there: is_new.append(not was_there),
        )
        if any(is_new):
            labels = ", ".join(policy.label for policy in policies)
            study.log(f"{self.task.name}, {labels}: problems {problems.start + 1} to {problems.stop}")
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


def _ignore() -> None:
    pass
