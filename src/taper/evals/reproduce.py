"""The paper's experiment on any model: accuracy on tasks with fewer layers per token, the clock, and the NLL by step.

Methods are compared at the mean depth of the paper's headline and at the mean depth of a given policy, such as one
that a calibration found for a budget. The results are written as JSON and as one page with pictures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..calibration.clock import TimedRuns, measure_speedup
from ..calibration.report import plain, png, render
from ..calibration.statistics import Estimate
from ..calibration.store import Conditions, current_conditions, numbers
from ..calibration.summary import MEASURED_ORDER, CalibratedModel, interval, to_plain
from ..errors import RequestError, whole_number
from ..llm import LLM
from ..models.download import content_hash
from ..models.files import write_whole
from ..policy import DepthPolicy
from .comparison import Log, Study, TaskStudy, by_step, joined
from .methods import FULL, mean_depth
from .summary import MARGIN, Score, check_comparison, summarise
from .tasks import Selection

FEWER = 1.5  # times fewer layers, the paper's headline
LENGTHS = (128, 512)  # most tokens of an output
CALIBRATED = "calibrated policy"
MAIN_METHODS = (MEASURED_ORDER, "middle first")  # words of their names
NUM_REPLAYED = 32  # outputs of each task that the NLL by step comes from

# Okabe and Ito's colours, which colour-blind readers can distinguish, and a mark for each method; random orders share.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9", "#8A6D00")
_MARKS = "os^vP*X"
_GREY, _INK = "#B0B0B0", "#333333"


@dataclass(frozen=True)
class Result:
    """One method on a task, or on all tasks of a group together."""

    task: str
    max_tokens: int  # of an output
    method: str
    depth: float | None  # the mean depth that it was tuned to; None: full depth or the calibrated policy
    problems: int
    metric: str = field(metadata={"json": "figure"})  # what is right or wrong: the metric and the filter
    score: Score


@dataclass(frozen=True)
class Speed:
    """The clock, for one output at a time."""

    max_tokens: int  # of the output, all of them written
    method: str
    mean_depth: float
    speedup: TimedRuns  # time per token at full depth over that of the method


@dataclass(frozen=True)
class Reproduction:
    """All that was measured: the content of results.json."""

    model: CalibratedModel
    budget: str  # where the calibrated policy comes from, in words
    policy: dict[str, Any] | None  # its numbers; None: no policy meets the budget
    order: list[int]  # layers in the measured order of skipping
    margin: float  # the loss of accuracy that is accepted
    asked: dict[str, Any]  # chat, examples of each task, limit
    groups: dict[str, list[str]]  # the tasks of each name that stands for several
    missing: list[str]  # tasks of groups that have no local data
    left_out: list[str]  # methods that cannot come near a mean depth, in words
    results: list[Result]
    speeds: list[Speed]
    nll: list[dict[str, Any]]  # of full depth's own outputs: the task or group, and rows of steps, outputs and NLL
    conditions: Conditions


def reproduce(
    llm: LLM,
    selection: Selection,
    order: Sequence[int],
    policy: DepthPolicy | None,
    folder: Path,
    *,
    budget: str = "",
    lengths: Sequence[int] = LENGTHS,
    limit: int | None = None,
    chat: bool = False,
    margin: float = MARGIN,
    baselines: bool = False,
    log: Log = print,
) -> Reproduction:
    """Compare methods on tasks, at each length of outputs.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: the tasks.
        order: flex layers in the order in which calibration skips them.
        policy: the calibrated policy; None if no policy meets the budget.
        folder: keeps outputs and replays; the same call continues an interrupted one.
        budget: where the policy comes from, in words.
        lengths: most tokens of an output, at least 2 each.
        limit: problems of each task, the first ones; default all.
        chat: ask by the model's chat template.
        margin: the loss of accuracy that is accepted, in (0, 1).
        baselines: compare every method, not only the measured order and the middle first.
        log: called with one line about each step of the work.

    Raises:
        RequestError: a number is out of range, records in the folder are of other settings, or full depth writes at
            most one token to every problem of a task.
        PolicyError: the order names a layer twice or one that the model does not have.
        ModelError: the model's output is not a number.
    """
    margin, lengths = check_comparison(selection, margin, None), sorted(set(lengths))
    check_numbers(llm, lengths, limit)
    results: list[Result] = []
    speeds: list[Speed] = []
    left_out: list[str] = []

    def leave_out(line: str) -> None:
        if line not in left_out:
            left_out.append(line)
            log(line)

    for length in lengths:
        limits: dict[str, Any] = {"limit": limit, "max_tokens": length, "num_replayed": NUM_REPLAYED}
        with closing(Study(llm, order, folder / f"{length}-tokens", **limits, log=log)) as study:
            tasks = [TaskStudy(study, replace(selection, tasks=[task], groups={}), chat) for task in selection.tasks]
            words = ("",) if baselines else MAIN_METHODS
            results += _results(tasks, length, selection, policy, words, margin, leave_out)
            log(f"the clock, {length} tokens")
            speeds += _speeds(tasks[0], policy, length)
            if length == lengths[-1]:
                nll = _nll(tasks, selection)
    return Reproduction(
        model=CalibratedModel(Path(llm.model).name, content_hash(llm.path), llm.config.num_hidden_layers),
        budget=budget,
        policy=None if policy is None else numbers(policy),
        order=list(order),
        margin=margin,
        asked={"chat": chat, "limit": limit, "fewshot": {t.name: t.num_fewshot for t in selection.tasks}},
        groups=selection.groups,
        missing=selection.missing,
        left_out=left_out,
        results=results,
        speeds=speeds,
        nll=nll,
        conditions=current_conditions(llm),
    )


def check_numbers(llm: LLM, lengths: Sequence[int], limit: int | None) -> None:
    """Reject lengths of outputs and numbers of problems that cannot be compared.

    Raises:
        RequestError: there is no length, one is below 2 or leaves no room for a prompt, or the limit is below 1.
    """
    if limit is not None:
        whole_number("limit", limit, 1)
    room = llm.engine.backend.context_length
    if not lengths:
        raise RequestError("no length of outputs is given", "give one, such as 128")
    for length in lengths:
        if not 2 <= length < room:
            raise RequestError(
                f"an output of {length} tokens is asked for; it must have 2 or more, and leave room for the prompt in "
                f"a context of {room}",
                "change --lengths or --context",
            )


def _results(
    tasks: Sequence[TaskStudy],
    max_tokens: int,
    selection: Selection,
    policy: DepthPolicy | None,
    words: Sequence[str],
    margin: float,
    leave_out: Log,
) -> list[Result]:
    """Full depth, the calibrated policy, and methods by words of their names, on each task and group.

    A method that cannot come near a mean depth on one of the tasks is left out on all of them.
    """
    layers = tasks[0].study.num_hidden_layers
    depths = _depths(layers, policy, [tokens for task in tasks for tokens in task.lengths])
    compared: dict[tuple[str, float | None], DepthPolicy] = {(FULL, None): DepthPolicy.full(layers)}
    if policy is not None:
        compared[CALIBRATED, None] = replace(policy, name=CALIBRATED)
    tuned = {depth: [_named(task.methods(depth, leave_out), words) for task in tasks] for depth in depths}
    parts = []
    for number, task in enumerate(tasks):
        for depth, by_task in tuned.items():
            names = [name for name in by_task[0] if all(name in policies for policies in by_task)]
            compared |= {(name, depth): by_task[number][name] for name in names}
        parts.append(task.evaluate(list(compared.values())))
    return [
        Result(result.name, max_tokens, name, depth, result.problems, result.metric, score)
        for result in summarise(joined(parts, selection.groups), margin).results
        for (name, depth), score in zip(compared, result.scores, strict=True)
    ]


def _named(policies: Mapping[str, DepthPolicy], words: Sequence[str]) -> dict[str, DepthPolicy]:
    """The methods whose names contain one of some words, without full depth."""
    return {name: own for name, own in policies.items() if name != FULL and any(word in name for word in words)}


def _depths(num_hidden_layers: int, policy: DepthPolicy | None, lengths: Sequence[int]) -> list[float]:
    """Mean depths at which methods are compared: that of the headline, and that of a policy over known outputs."""
    depths = [num_hidden_layers / FEWER]
    if policy is not None and max(lengths, default=0) > 1:
        depths.append(mean_depth(policy, lengths))
    return [round(depth, 2) for depth in depths if 2 <= depth <= num_hidden_layers - 1]


def _speeds(task: TaskStudy, policy: DepthPolicy | None, length: int) -> list[Speed]:
    """The calibrated policy and the measured order at the headline's depth, after a prompt of the task."""
    study, headline = task.study, round(task.study.num_hidden_layers / FEWER, 2)
    tuned = study.methods(headline, [length], log=lambda line: None)
    timed = {} if policy is None else {CALIBRATED: policy}
    timed |= {f"{name} at depth {headline:g}": own for name, own in _named(tuned, [MEASURED_ORDER]).items()}
    return [
        Speed(length, name, own.mean_depth(length), measure_speedup(study.llm.engine, task.prompts[0], own, length))
        for name, own in timed.items()
    ]


def _nll(tasks: Sequence[TaskStudy], selection: Selection) -> list[dict[str, Any]]:
    """The NLL by step of full depth's outputs to each task and group, replayed at full depth."""
    study, nll = tasks[0].study, []
    for name, members in ({task.task.name: [task.task.name] for task in tasks} | selection.groups).items():
        references = [reference for task in tasks if task.task.name in members for reference in task.references]
        scores = study.scores(references, {FULL: DepthPolicy.full(study.num_hidden_layers)})[FULL]
        nll.append({"task": name, "rows": by_step(scores, {"nll": scores.nll_full})})
    return nll


# The page


def write_report(folder: Path, reproduction: Reproduction) -> None:
    """Write index.html and results.json, each whole or not at all, making the folder."""
    in_groups = {task for members in reproduction.groups.values() for task in members}  # results.json has these too
    names = dict.fromkeys(result.task for result in reproduction.results)
    results = {name: [r for r in reproduction.results if r.task == name] for name in names if name not in in_groups}
    layers = reproduction.model.num_hidden_layers
    pictures = {f"accuracy {name}": png(_accuracy_picture(own, layers)) for name, own in results.items()}
    pictures["nll"] = png(_nll_picture({part["task"]: part["rows"] for part in reproduction.nll}, list(results)))
    page = render(
        resources.files(__package__).joinpath("reproduce.html").read_text(encoding="utf-8"),
        pictures,
        **vars(reproduction),
        shown=list(results),
        tables={name: [_row(result) for result in own] for name, own in results.items()},
        fewer=FEWER,
        calibrated=CALIBRATED,
        accepted=f"{100 * reproduction.margin:g} {'point' if reproduction.margin == 0.01 else 'points'}",
    )
    write_whole(folder / "results.json", json.dumps(to_plain(reproduction)).encode())
    write_whole(folder / "index.html", page.encode())


def _row(result: Result) -> tuple[str, ...]:
    """Length, method, mean depth, accuracy, difference, verdict."""
    score, compared = result.score, result.score.against_full
    name = result.method if result.depth is None else f"{result.method}, at {result.depth:g} layers"
    cells = (str(result.max_tokens), name, f"{score.mean_depth:.1f}", interval(score.accuracy, 100, digits=1))
    if compared is None:
        return (*cells, "", "")
    return (*cells, interval(compared.difference, 100, digits=1), compared.conclusion)


def _accuracy_picture(results: Sequence[Result], layers: int) -> Figure:
    """Accuracy against mean depth, a line and mark for each method, at each length of outputs."""
    results = [result for result in results if result.score.accuracy]
    lengths = sorted({result.max_tokens for result in results}) or [0]
    styles = _styles(list(dict.fromkeys(result.method for result in results)))
    figure = Figure(figsize=(max(7.0, 3.6 * len(lengths)), 4.6), layout="constrained")
    grid = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for axes, length in zip(grid, lengths, strict=True):
        plain(axes)
        axes.set_title(f"up to {length} tokens", loc="left", fontsize=11)
        axes.set_xlabel(f"mean depth, of {layers} layers (fewer to the right)")
        axes.invert_xaxis()
        _draw_methods(axes, [result for result in results if result.max_tokens == length], styles)
    grid[0].set_ylabel("solved, %")
    handles = {handle.get_label(): handle for axes in grid for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_methods(axes: Axes, results: Sequence[Result], styles: Mapping[str, dict[str, Any]]) -> None:
    """The methods on one task at one length; each line begins at full depth."""
    full = [result for result in results if result.method == FULL]
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, list(full) if result.depth is not None else []).append(result)
    for name, own in by_method.items():
        own = sorted(own, key=lambda result: -result.score.mean_depth)
        accuracies = [Estimate(*(100 * x for x in result.score.accuracy or (0, 0, 0))) for result in own]
        depths = [result.score.mean_depth for result in own]
        _draw_estimates(axes, depths, accuracies, elinewidth=0.8, linewidth=1.2, **styles[name])


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A mark, a colour and a label for each method."""
    styles: dict[str, dict[str, Any]] = {
        FULL: {"fmt": "D", "color": _INK, "label": FULL, "zorder": 5},
        CALIBRATED: {"fmt": "d", "color": _INK, "label": CALIBRATED, "zorder": 5},
    }
    random = {"fmt": ".-", "color": _GREY, "label": "D3, random orders"}
    styles |= {name: random for name in names if "random order" in name}
    for index, name in enumerate(name for name in names if name not in styles):
        mark, colour = _MARKS[index % len(_MARKS)], _COLOURS[index % len(_COLOURS)]
        styles[name] = {"fmt": f"{mark}-", "color": colour, "label": name}
    return styles


def _nll_picture(rows: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]) -> Figure:
    """NLL of full depth's own outputs to some tasks, by step, with intervals."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    plain(axes)
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        estimates = [Estimate(*row["nll"]) for row in rows[name]]
        _draw_estimates(axes, range(len(estimates)), estimates, fmt="o-", color=colour, label=name)
    longest = max((rows[name] for name in names), key=len)
    axes.set_xticks(range(len(longest)), ["{} to {}".format(*row["steps"]) for row in longest])
    axes.set(ylim=(0, None), xlabel="steps: tokens of the output so far", ylabel="mean NLL, nats a token")
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure


def _draw_estimates(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> None:
    """A line with error bars, which have no negative length even after rounding."""
    below = [max(0.0, value - low) for value, low, _ in estimates]
    above = [max(0.0, high - value) for value, _, high in estimates]
    axes.errorbar(x, [estimate.value for estimate in estimates], [below, above], capsize=2, **style)
