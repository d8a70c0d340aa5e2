"""From the records of an evaluation to figures: accuracy by task and policy, and each policy against full depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..calibration.statistics import Estimate, PairedComparison, compare, wilson
from ..calibration.summary import interval, to_plain
from ..errors import RequestError, number, shown
from .records import Record
from .run import Evaluation
from .tasks import EvalTask, Selection

MARGIN = 0.01  # the loss of accuracy that the paper calls nearly none
_LENIENT = "flexible-extract"  # the harness's name for the filter that finds answers in the most forms


@dataclass(frozen=True)
class Score:
    """What one policy did on a task."""

    mode: str  # "full" or "taper"
    policy: str
    accuracy: Estimate | None  # with its Wilson interval; None: the task has no figure that is right or wrong
    mean_depth: float  # over the tokens written, from step 1 on
    tokens: float  # of an output, mean
    cut_off: float  # share of outputs that ended at the limit of tokens, or of the context
    against_full: PairedComparison | None  # None: it is full depth, or there is nothing to compare with


@dataclass(frozen=True)
class TaskSummary:
    """What came out on a task, or on all tasks of a group together."""

    name: str
    tasks: list[str]  # of the group; of a task, itself alone
    problems: int
    figure: str  # what is right or wrong: the metric and the filter
    scores: list[Score]


@dataclass(frozen=True)
class Summary:
    """What came out."""

    settings: dict[str, Any]
    margin: float
    num_truncated: int  # problems whose prompt lost its beginning
    missing: list[str]  # tasks of groups that have no local data
    results: list[TaskSummary]

    def to_json(self) -> dict[str, Any]:
        """As plain data; an interval is a list of value, low and high."""
        return to_plain(self)  # type: ignore[no-any-return]


def check_comparison(selection: Selection, margin: float, filter_name: str | None) -> float:
    """Reject before the work what would fail after it; returns the margin.

    Raises:
        RequestError: the margin is not in (0, 1), or a task has no such filter.
    """
    for task in selection.tasks:
        chosen_filter(task, filter_name)
    return number("margin", margin, 0, 1, above=True, below=True)


def summarise(evaluation: Evaluation, margin: float = MARGIN, filter_name: str | None = None) -> Summary:
    """The figures of an evaluation.

    Args:
        evaluation: what `evaluate` returned.
        margin: the loss of accuracy that is accepted, in (0, 1).
        filter_name: the harness's filter whose figure is compared; default the most lenient one of each task.

    Raises:
        RequestError: the margin is not in (0, 1), or a task has no such filter.
    """
    selection, policies = evaluation.selection, list(evaluation.policies)
    margin = check_comparison(selection, margin, filter_name)
    by_task = {task.name: [r for r in evaluation.records if r.task == task.name] for task in selection.tasks}
    filters = {task.name: chosen_filter(task, filter_name) for task in selection.tasks}
    parts = {name: [name] for name in by_task} | selection.groups
    results = []
    for name, tasks in parts.items():
        metrics = {task: _metric(by_task[task], filters[task]) for task in tasks}
        figures = {f"{metric} under {filters[task]}" for task, metric in metrics.items() if metric}
        solved = {
            (record.task, record.problem, record.policy): record.metrics[filters[task]][metric] == 1
            for task, metric in metrics.items()
            if metric
            for record in by_task[task]
        }
        if not all(metrics.values()):  # a task without such a figure would be missing in that of its group
            solved = {}
        records = [record for task in tasks for record in by_task[task]]
        results.append(
            TaskSummary(
                name=name,
                tasks=tasks,
                problems=len({(record.task, record.problem) for record in records}),
                figure=" or ".join(sorted(figures)) if solved else "",
                scores=[_score(records, policy, solved, margin) for policy in policies],
            )
        )
    num_truncated = len({(record.task, record.problem) for record in evaluation.records if record.truncated})
    return Summary(dict(evaluation.settings), margin, num_truncated, selection.missing, results)


def chosen_filter(task: EvalTask, filter_name: str | None) -> str:
    """The filter whose figure is compared.

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
    """Whether a record is right, by its first metric that says so; None if none does."""
    metric = _metric([record], filter_name)
    return None if metric is None else record.metrics[filter_name][metric] == 1


def _metric(records: Sequence[Record], filter_name: str) -> str | None:
    """The first metric of a task that is right or wrong for every problem."""
    for metric in records[0].metrics[filter_name]:
        if all(record.metrics[filter_name].get(metric) in (0.0, 1.0) for record in records):
            return metric
    return None


def _score(records: Sequence[Record], policy: str, solved: dict[tuple[str, int, str], bool], margin: float) -> Score:
    """One policy on some records, given which of all of them are right; none of them where no figure says so."""
    own = [record for record in records if record.policy == policy]
    answers = [answer for record in own for answer in record.answers]
    right = [solved[record.key] for record in own if solved]
    full = [record.policy for record in records if record.mode == "full"]
    comparison = None
    if solved and own[0].mode != "full" and full and len(own) > 1:  # a single problem tells nothing
        comparison = compare([solved[record.task, record.problem, full[0]] for record in own], right, margin)
    lengths = [len(answer.token_ids) for answer in answers]
    steps = sum(max(0, length - 1) for length in lengths)  # step 0 always runs every layer
    depths = sum(answer.mean_depth * max(0, length - 1) for answer, length in zip(answers, lengths, strict=True))
    return Score(
        mode=own[0].mode,
        policy=policy,
        accuracy=wilson(sum(right), len(right)) if solved else None,
        mean_depth=depths / steps if steps else max(answer.mean_depth for answer in answers),
        tokens=sum(lengths) / len(answers),
        cut_off=sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        against_full=comparison,
    )


_TITLES = ("", "solved, %", "mean depth", "tokens", "difference, points", "McNemar p", "")
_MANY = 0.05  # share of outputs at the limit of tokens from which readers are told


def as_text(summary: Summary) -> str:
    """The tables, and what a reader should know before using them."""
    lines: list[str] = []
    for result in summary.results:
        lines += [*_table(result, summary), ""]
    return "\n".join([*lines, *_remarks(summary)])


def _table(result: TaskSummary, summary: Summary) -> list[str]:
    """A task's title and table."""
    settings = summary.settings["tasks"][result.tasks[0]]
    problems = "1 problem" if result.problems == 1 else f"{result.problems} problems"
    facts = [problems, f"{settings['fewshot']}-shot{' chat' if summary.settings['chat'] else ''}"]
    if len(result.tasks) > 1:
        facts.insert(0, f"{len(result.tasks)} tasks together")
    else:
        facts.append(f"version {settings['version']}")
    facts.append(result.figure or "no figure that is right or wrong; the records have its metrics")
    margin = f"loss within {100 * summary.margin:g} {'point' if summary.margin == 0.01 else 'points'}"
    rows = [(*_TITLES[:-1], margin), *(_row(score) for score in result.scores)]
    if all(score.against_full is None for score in result.scores):
        rows = [row[:4] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{result.name}: {', '.join(facts)}", *(f"  {line}" for line in table)]


def _row(score: Score) -> tuple[str, ...]:
    """A policy's line."""
    name = "full" if score.mode == "full" else f"taper {score.policy}"
    cells = (name, interval(score.accuracy, 100, digits=1), f"{score.mean_depth:.1f}", f"{score.tokens:.0f}")
    compared = score.against_full
    if compared is None:
        return (*cells, "", "", "")
    return (*cells, interval(compared.difference, 100, digits=1), f"{compared.p_value:.2g}", compared.conclusion)


def _remarks(summary: Summary) -> list[str]:
    """What a reader should know."""
    remarks = ["Intervals are 95 %; the verdict is a one-sided test at the 5 % level."]
    for result in summary.results:
        if len(result.tasks) == 1 and any(score.cut_off > _MANY for score in result.scores):
            shares = ", ".join(f"{score.cut_off:.0%} ({score.policy})" for score in result.scores)
            remarks.append(
                f"{result.name}: outputs that reached the limit of tokens, which --max-tokens raises: {shares}."
            )
    if summary.missing:
        remarks.append(f"Not run, as the data folder has no data for them: {', '.join(summary.missing)}.")
    if summary.num_truncated:
        cut = f"{summary.num_truncated} prompts did" if summary.num_truncated > 1 else "1 prompt did"
        remarks.append(f"{cut} not fit with the output and lost the beginning; --context raises the limit.")
    return remarks
