"""From the records of an evaluation to its metrics: accuracy by task and policy, and each policy against full depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import RequestError, number, shown
from ..calibration.statistics import Estimate, PairedComparison, compare, wilson
from ..calibration.summary import to_plain
from .records import Evaluation, Record
from .tasks import EvalTask, Selection

MARGIN = 0.01  # the loss of accuracy that the paper calls nearly none
_LENIENT = "flexible-extract"  # the harness's name for the filter that accepts the most forms of an answer


@dataclass(frozen=True)
class Score:
    """The metrics of one policy on a task."""

    mode: str  # "full" or "taper"
    policy: str
    accuracy: Estimate | None  # with its Wilson interval; None: no metric of the task is right or wrong
    mean_depth: float  # over the tokens written, from step 1 on
    tokens: float  # of an output, mean
    cut_off: float  # share of outputs that ended at the limit of tokens, or of the context
    empty: float  # share of outputs without any text
    against_full: PairedComparison | None  # None: it is full depth, or there is nothing to compare with


@dataclass(frozen=True)
class TaskSummary:
    """The scores on a task, or on all tasks of a group together."""

    name: str
    tasks: list[str]  # of the group; of a task, itself alone
    problems: int
    metric: str = field(metadata={"json": "figure"})  # what is right or wrong: the metric and the filter; "": none is
    scores: list[Score]


@dataclass(frozen=True)
class EvalSummary:
    """The scores on every task and group, and their settings."""

    settings: dict[str, Any]
    margin: float
    num_truncated: int  # problems whose prompt lost its beginning
    missing: list[str]  # tasks of groups that have no local data
    results: list[TaskSummary]
    problem_s: float | None = None  # seconds that a problem took at full depth and tapered, if any was asked now

    def to_json(self) -> dict[str, Any]:
        """As plain data; an interval is a list of value, low and high."""
        return to_plain(self)  # type: ignore[no-any-return]


def check_comparison(selection: Selection, margin: float, filter_name: str | None) -> dict[str, str]:
    """The filter of each task by which it is compared; rejects before the work what would fail after it.

    Raises:
        RequestError: the margin is not in (0, 1), or a task has no such filter.
    """
    number("margin", margin, 0, 1, above=True, below=True)
    return {task.name: chosen_filter(task, filter_name) for task in selection.tasks}


def chosen_filter(task: EvalTask, filter_name: str | None) -> str:
    """The filter whose metric is compared.

    Raises:
        RequestError: the task has no such filter.
    """
    if filter_name is None:
        return _LENIENT if _LENIENT in task.filters else task.filters[-1]
    if filter_name not in task.filters:
        reason = f"task {task.name} has no filter {shown(filter_name)}"
        raise RequestError(reason, f"it has {' and '.join(task.filters)}")
    return filter_name


def solved(record: Record, filter_name: str) -> bool | None:
    """Whether a record is right by the first metric that is right or wrong; None if no metric is."""
    metric = _metric([record], filter_name)
    return None if metric is None else record.metrics[filter_name][metric] == 1


def summarise(evaluation: Evaluation, margin: float = MARGIN, filter_name: str | None = None) -> EvalSummary:
    """The metrics of an evaluation.

    Args:
        evaluation: what `evaluate` returned.
        margin: the loss of accuracy that is accepted, in (0, 1).
        filter_name: the harness's filter whose metric is compared; default the most lenient one of each task.

    Raises:
        RequestError: the margin is not in (0, 1), or a task has no such filter.
    """
    filters = check_comparison(evaluation.selection, margin, filter_name)
    by_task = {name: [record for record in evaluation.records if record.task == name] for name in filters}
    metrics = {name: metric for name in filters if (metric := _metric(by_task[name], filters[name]))}
    results = []
    for name, tasks in ({name: [name] for name in filters} | evaluation.selection.groups).items():
        records = [record for task in tasks for record in by_task[task]]
        compared: set[str] = set()
        is_right: dict[tuple[str, int, str], bool] = {}
        if all(task in metrics for task in tasks):  # a task without a metric would be missing in that of its group
            compared = {f"{metrics[task]} under {filters[task]}" for task in tasks}
            is_right = {r.key: r.metrics[filters[r.task]][metrics[r.task]] == 1 for r in records}
        scores = [_score(records, policy, is_right, margin) for policy in evaluation.policies]
        results.append(TaskSummary(name, tasks, _num_problems(records), " or ".join(sorted(compared)), scores))
    num_truncated = _num_problems(record for record in evaluation.records if record.truncated)
    problem_s = None if evaluation.record_s is None else 2 * evaluation.record_s
    settings, missing = dict(evaluation.settings), evaluation.selection.missing
    return EvalSummary(settings, margin, num_truncated, missing, results, problem_s)


def _num_problems(records: Iterable[Record]) -> int:
    return len({(record.task, record.problem) for record in records})


def _metric(records: Sequence[Record], filter_name: str) -> str | None:
    """The first metric of a task that is right or wrong for every record, so 1 or 0."""
    for metric in records[0].metrics[filter_name]:
        if all(record.metrics[filter_name].get(metric) in (0.0, 1.0) for record in records):
            return metric
    return None


def _score(
    records: Sequence[Record], policy: str, is_right: Mapping[tuple[str, int, str], bool], margin: float
) -> Score:
    """One policy on the problems of some records; `is_right` is empty if they have no common metric."""
    own = [record for record in records if record.policy == policy]
    full = next((record.policy for record in records if record.mode == "full"), None)
    right = [is_right[record.key] for record in own if is_right]
    compared = None
    if right and own[0].mode != "full" and full is not None and len(own) > 1:  # one problem shows nothing
        compared = compare([is_right[record.task, record.problem, full] for record in own], right, margin)
    outputs = [output for record in own for output in record.completions]
    lengths = [len(output.token_ids) for output in outputs]
    steps = [max(0, length - 1) for length in lengths]  # step 0 always runs every layer
    depths = sum(output.mean_depth * count for output, count in zip(outputs, steps, strict=True))
    return Score(
        mode=own[0].mode,
        policy=policy,
        accuracy=wilson(sum(right), len(right)) if right else None,
        mean_depth=depths / sum(steps) if any(steps) else max(output.mean_depth for output in outputs),
        tokens=sum(lengths) / len(outputs),
        cut_off=sum(output.finish_reason == "length" for output in outputs) / len(outputs),
        empty=sum(not output.text.strip() for output in outputs) / len(outputs),
        against_full=compared,
    )
