"""The paper's experiment on any model: is it as accurate on GSM8K and BBH with 1.5 times fewer layers?

    python research/reproduce.py smollm2-135m-instruct --data-dir DATA --limit 20

It calibrates a policy, compares methods with full depth at the mean depth of the paper and at that of the policy, times
them, and writes results.json and a page with pictures. It takes hours on a CPU unless --limit is small. The same
command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from comparison import FULL, MEASURED_ORDER, Log, Study, TaskStudy, by_step, joined, mean_depth
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from task_options import run, say

from taper.cli.common import check_report
from taper.cli.eval import listed
from taper.errors import RequestError, whole_number
from taper.lab.calibration.clock import TimedRuns, measure_speedup
from taper.lab.calibration.report import plain, png, render
from taper.lab.calibration.run import calibrate
from taper.lab.calibration.statistics import Estimate
from taper.lab.calibration.store import current_conditions, numbers
from taper.lab.calibration.summary import CalibratedModel, interval, to_plain
from taper.lab.evals import load_tasks
from taper.lab.evals.summary import Score, check_comparison, summarise
from taper.lab.evals.tasks import Selection
from taper.llm import LLM
from taper.models import model_name
from taper.models.download import content_hash
from taper.models.files import write_whole
from taper.policy import DepthPolicy

PAGE = Path(__file__).with_suffix(".html")
MIN_AGREEMENT = 0.95  # budget of the calibration
FEWER = 1.5  # times fewer layers, the paper's headline
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


def reproduce(
    llm: LLM,
    selection: Selection,
    order: Sequence[int],
    policy: DepthPolicy | None,
    folder: Path,
    *,
    budget: str,
    lengths: Sequence[int],
    limit: int | None,
    chat: bool,
    margin: float,
    baselines: bool,
    log: Log,
) -> None:
    """Compare methods on tasks, at each length of outputs; write index.html and results.json, each whole or not at all.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: the tasks.
        order: flex layers in the order in which calibration skips them.
        policy: the calibrated policy; None if no policy meets the budget.
        folder: for the results; it also keeps outputs and replays, from which the same call continues.
        budget: where the policy comes from, in words.
        lengths: most tokens of an output, see `check_numbers`.
        limit: problems of each task, the first ones; None: all.
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
    results: list[Result] = []
    speeds: list[Speed] = []
    nll: list[dict[str, Any]] = []
    left_out: list[str] = []

    def leave_out(line: str) -> None:
        if line not in left_out:
            left_out.append(line)
            log(line)

    adapters = None if policy is None else policy.adapters
    for length in sorted(set(lengths)):
        own = folder / f"{length}-tokens"
        with closing(Study(llm, order, own, limit, length, NUM_REPLAYED, log, adapters)) as study:
            tasks = [TaskStudy(study, replace(selection, tasks=[task], groups={}), chat) for task in selection.tasks]
            words = ("",) if baselines else MAIN_METHODS
            results += _results(tasks, length, selection, policy, words, margin, leave_out)
            log(f"the clock, {length} tokens")
            speeds += _speeds(tasks[0], policy, length)
            if length == max(lengths):
                nll = _nll(tasks, selection)
    content = {
        "model": CalibratedModel(model_name(llm.model), content_hash(llm.path), llm.config.num_hidden_layers),
        "budget": budget,
        "policy": None if policy is None else numbers(policy),
        "order": list(order),
        "margin": margin,
        "asked": {"chat": chat, "limit": limit, "fewshot": {t.name: t.num_fewshot for t in selection.tasks}},
        "groups": selection.groups,
        "missing": selection.missing,  # tasks of groups that have no local data
        "left_out": left_out,  # methods that cannot come near a mean depth, in words
        "results": results,
        "speeds": speeds,
        "nll": nll,  # of full depth's own outputs, the longest: of each task or group, rows of steps, outputs and NLL
        "conditions": current_conditions(llm),
    }
    write_whole(folder / "results.json", json.dumps(to_plain(content)).encode())
    write_whole(folder / "index.html", _page(content).encode())


def check_numbers(llm: LLM, lengths: Sequence[int], limit: int | None) -> None:
    """Reject lengths of outputs and numbers of problems that cannot be compared.

    Raises:
        RequestError: a length is below 2 or leaves no room for a prompt, or the limit is below 1.
    """
    if limit is not None:
        whole_number("limit", limit, 1)
    room = llm.engine.backend.context_length
    for length in lengths:
        if not 2 <= length < room:
            rule = f"it must have 2 or more, and leave room for the prompt in a context of {room}"
            hint = "change --lengths or --context"
            raise RequestError(f"an output of {length} tokens is asked for; {rule}", hint)


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
    study = tasks[0].study
    compared: dict[tuple[str, float | None], DepthPolicy] = {(FULL, None): study.full}
    depths = [study.num_hidden_layers / FEWER]
    if policy is not None:
        compared[CALIBRATED, None] = replace(policy, name=CALIBRATED)
        lengths = [tokens for task in tasks for tokens in task.lengths]
        depths += [mean_depth(policy, lengths)] if max(lengths, default=0) > 1 else []
    depths = [round(depth, 2) for depth in depths if 2 <= depth <= study.num_hidden_layers - 1]
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


def _speeds(task: TaskStudy, policy: DepthPolicy | None, length: int) -> list[Speed]:
    """The calibrated policy and the measured order at the headline's depth, after a prompt of the task."""
    study, headline = task.study, round(task.study.num_hidden_layers / FEWER, 2)
    tuned = task.methods(headline, lambda line: None, [length])
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
        scores = study.scores(references, {FULL: study.full})[FULL]
        nll.append({"task": name, "rows": by_step(scores, {"nll": scores.nll_full})})
    return nll


# The page


def _page(content: dict[str, Any]) -> str:
    """The content of results.json as a page, on which tasks of groups are shown together."""
    in_groups = {task for members in content["groups"].values() for task in members}
    by_task: dict[str, list[Result]] = {}
    for result in content["results"]:
        if result.task not in in_groups:
            by_task.setdefault(result.task, []).append(result)
    layers, margin = content["model"].num_hidden_layers, content["margin"]
    pictures = {f"accuracy {name}": png(_accuracy_picture(own, layers)) for name, own in by_task.items()}
    pictures["nll"] = png(_nll_picture({p["task"]: p["rows"] for p in content["nll"] if p["task"] in by_task}))
    return render(
        PAGE.read_text(encoding="utf-8"),
        pictures,
        **content,
        tables={name: [_row(result) for result in own] for name, own in by_task.items()},
        fewer=FEWER,
        calibrated=CALIBRATED,
        accepted=f"{100 * margin:g} {'point' if margin == 0.01 else 'points'}",
    )


def _row(result: Result) -> tuple[str, ...]:
    """Length, method, mean depth, accuracy, difference, verdict."""
    score, compared = result.score, result.score.against_full
    name = result.method if result.depth is None else f"{result.method}, at {result.depth:g} layers"
    cells = (str(result.max_tokens), name, f"{score.mean_depth:.1f}", interval(score.accuracy, 100, digits=1))
    if compared is None:
        return (*cells, "", "")
    return (*cells, interval(compared.difference, 100, digits=1), compared.conclusion)


def _accuracy_picture(results: Sequence[Result], layers: int) -> Figure:
    """Accuracy against mean depth at each length of outputs: a line for each method, from full depth on."""
    results = [result for result in results if result.score.accuracy]
    styles = _styles(dict.fromkeys(result.method for result in results))
    lengths = sorted({result.max_tokens for result in results}) or [0]
    figure = Figure(figsize=(max(7.0, 3.6 * len(lengths)), 4.6), layout="constrained")
    grid = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for axes, length in zip(grid, lengths, strict=True):
        plain(axes)
        axes.set_title(f"up to {length} tokens", loc="left", fontsize=11)
        axes.set_xlabel(f"mean depth, of {layers} layers (fewer to the right)")
        axes.invert_xaxis()
        here = [result for result in results if result.max_tokens == length]
        for name, style in styles.items():
            own = [result for result in here if result.method == name]
            if any(result.depth is not None for result in own):
                own = [here[0], *sorted(own, key=lambda result: -result.score.mean_depth)]
            accuracies = [Estimate(*(100 * x for x in result.score.accuracy or ())) for result in own]
            depths = [result.score.mean_depth for result in own]
            _draw_estimates(axes, depths, accuracies, elinewidth=0.8, linewidth=1.2, **style)
    grid[0].set_ylabel("solved, %")
    handles = {handle.get_label(): handle for axes in grid for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A mark, a colour and a label for each method."""
    fixed: dict[str, dict[str, Any]] = {
        FULL: {"fmt": "D", "color": _INK, "label": FULL, "zorder": 5},
        CALIBRATED: {"fmt": "d", "color": _INK, "label": CALIBRATED, "zorder": 5},
    }
    styles: dict[str, dict[str, Any]] = {}
    others = zip(cycle(_MARKS), cycle(_COLOURS), strict=False)
    for name in names:
        if "random order" in name:
            styles[name] = {"fmt": ".-", "color": _GREY, "label": "D3, random orders"}
        elif name in fixed:
            styles[name] = fixed[name]
        else:
            mark, colour = next(others)
            styles[name] = {"fmt": f"{mark}-", "color": colour, "label": name}
    return styles


def _nll_picture(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """NLL of full depth's own outputs to some tasks, by step, with intervals."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    plain(axes)
    for (name, own), colour in zip(rows.items(), cycle(_COLOURS), strict=False):
        estimates = [Estimate(*row["nll"]) for row in own]
        _draw_estimates(axes, range(len(estimates)), estimates, fmt="o-", color=colour, label=name)
    longest = max(rows.values(), key=len)
    axes.set_xticks(range(len(longest)), ["{} to {}".format(*row["steps"]) for row in longest])
    axes.set(ylim=(0, None), xlabel="steps: tokens of the output so far", ylabel="mean NLL, nats a token")
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure


def _draw_estimates(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> None:
    """A line with error bars, which have no negative length even after rounding."""
    below = [max(0.0, value - low) for value, low, _ in estimates]
    above = [max(0.0, high - value) for value, _, high in estimates]
    axes.errorbar(x, [estimate.value for estimate in estimates], [below, above], capsize=2, **style)


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="name, file, folder or hub id")
    parser.add_argument("--tasks", default="gsm8k,bbh_cot_fewshot", help="of the harness, or groups of them")
    parser.add_argument("--data-dir", type=Path, help="data of GSM8K and BBH; default the Hugging Face hub")
    parser.add_argument("--limit", type=int, help="only the first problems of each task")
    parser.add_argument("--fewshot", type=int, help="examples before each problem; default the task's own number")
    parser.add_argument("--chat", action="store_true", help="ask by the model's chat template")
    parser.add_argument("--lengths", default="128,512", help="most tokens of an output, one run for each")
    parser.add_argument("--policy", help="name or file of a policy, instead of calibrating one")
    parser.add_argument("--min-agreement", type=float, help=f"budget of the calibration; default {MIN_AGREEMENT}")
    parser.add_argument("--baselines", action="store_true", help="compare every method; takes long")
    parser.add_argument("--margin", type=float, default=0.01, help="accepted loss of accuracy; default %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="outputs at a time; default %(default)s")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="convert or quantise weights when loading")
    parser.add_argument("--context", type=int, help="prompt and output together")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="outputs, results and the page; default reproduce-MODEL")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.policy is not None and options.min_agreement is not None:
        raise RequestError("--min-agreement does nothing with --policy", "leave out one of the two")
    try:
        lengths = [int(length) for length in options.lengths.split(",")]
    except ValueError:
        raise RequestError(f"--lengths is {options.lengths!r}; it must be whole numbers with commas between") from None
    out = options.out or Path(f"reproduce-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', model_name(options.model))}")
    check_report("--out", out)
    selection = load_tasks(listed("tasks", options.tasks), fewshot=options.fewshot, data_dir=options.data_dir)
    check_comparison(selection, options.margin, None)
    loading = {name: getattr(options, name) for name in ("device", "dtype", "context", "threads")}
    llm = LLM(options.model, **loading, max_batch_size=options.batch_size)
    check_numbers(llm, lengths, options.limit)
    order, policy, budget = _policy(
        llm, options.policy, 0.95 if options.min_agreement is None else options.min_agreement
    )
    given = {name: getattr(options, name) for name in ("limit", "chat", "margin", "baselines")}
    reproduce(llm, selection, order, policy, out, budget=budget, lengths=lengths, log=say, **given)
    say(f"report: {out / 'index.html'}")


def _policy(llm: LLM, policy: str | None, min_agreement: float | None) -> tuple[list[int], DepthPolicy | None, str]:
    """The measured order, the policy for the budget if one meets it, and where it comes from."""
    if policy is not None:
        given = llm.resolve_policy(policy)
        return list(given.skip_order), given, f"the policy {given.label}"
    min_agreement = MIN_AGREEMENT if min_agreement is None else min_agreement
    result = calibrate(llm, min_agreement=min_agreement)
    budget = f"agreement with full depth of {100 * min_agreement:g} % over tapered steps, on the built-in prompts"
    if not result.met:
        say(f"no policy meets the budget: {budget}")
        return result.summary.skip_order, None, budget
    return result.summary.skip_order, result.policy, f"the fastest one that was found for an {budget}"


if __name__ == "__main__":
    run(main)
