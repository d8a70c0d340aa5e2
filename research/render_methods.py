"""docs/results/methods.md and its pictures, from research/results/methods-*.json; `render.py` writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from pages import measured, prose, table
from task_options import DEFAULTS

from taper.calibration.statistics import Estimate, bootstrap_difference, mcnemar, wilson
from taper.calibration.summary import interval
from taper.evals.methods import FULL

Json = dict[str, Any]
GSM8K, BBH = "gsm8k", "bbh"
_COLOUR = "#0072B2"


def pages(results: Path, docs: Path) -> dict[Path, str]:
    """The page, if there are results of a model."""
    models = {path: json.loads(path.read_text()) for path in sorted(results.glob("methods-*.json"))}
    if not models:
        return {}
    lines = [
        "# Methods compared",
        "",
        prose(
            """
            This page is written by `python research/render.py` from `research/results/methods-*.json`. It compares
            every published rule of skipping layers that Taper knows on one engine, at one mean depth: full depth, D3
            in the measured order, D3 with the middle first, SkipDecode, early exit, ShortGPT, Unified Layer Skipping,
            HSD and random orders.
            """
        ),
        "",
        prose(
            """
            Each method was tuned to the same mean depth over the outputs of full depth to the first problems of the
            task. Methods of constant depth run the nearest whole number of layers. A method's own outputs are longer or
            shorter than those of full depth, so over these the mean depth differs; both are shown. The measured order
            is that of a policy that was calibrated on general prompts, and block influence (ShortGPT) comes from such
            prompts too: no method saw a problem of these tasks.
            """
        ),
        "",
        prose(
            """
            *Solved* and *difference* are about the outputs that each method wrote itself, to the same problems, scored
            by lm-evaluation-harness. Where a method was asked fewer problems than full depth, the difference is over
            those. Where always giving the task's most frequent answer would solve as many as full depth does, there is
            nothing to lose, and a difference says little. Brackets hold 95 % intervals, and McNemar's test is exact and
            two-sided.
            *KL* and *same likeliest token* come from replaying outputs of full depth, over all steps after the first.
            *Speed* is time per token at full depth over that of the method, for one output at a time of the task's
            median length. A step of each is timed in turn, over several rounds, and brackets hold the slowest and the
            fastest of them. Tasks whose name says `fewshot` show three worked examples first. All others are asked in a
            chat, without examples.
            """
        ),
        "",
    ]
    for path, result in models.items():
        lines += _model(result, docs / path.with_suffix(".png").name)
    return {docs / "methods.md": "\n".join(lines)}


def draw_all(results: Path, docs: Path) -> list[Path]:
    """Draw the picture of each model; returns their files."""
    files = []
    for path in sorted(results.glob("methods-*.json")):
        files.append(docs / path.with_suffix(".png").name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        _picture(json.loads(path.read_text())).savefig(files[-1], dpi=160)
    return files


def _model(result: Json, picture: Path) -> list[str]:
    """The section of a model."""
    model, depths = result["model"], _by_depth(result)
    lines = [f"## {model['name']}", ""]
    lines += [f"![What each method solves, and its KL to full depth]({picture.name})", ""]
    for depth, cells in depths.items():
        lines += [f"### Mean depth {depth} of {model['num_hidden_layers']}", ""]
        lines += ["Made by", "", *(f"    {command}" for command in _commands(model["name"], depth, cells)), ""]
        lines += [_conditions(cells), ""]
        for title, tasks in _groups(cells).items():
            lines += [f"#### {title}", "", *_accuracies([cells[task] for task in tasks]), ""]
            if len(tasks) == 1:
                lines += [*_losses(cells[tasks[0]]), ""]
        several = [task for task in cells if task.startswith(BBH)]
        if len(several) > 1:
            lines += _task_by_task(several, [cells[task] for task in several])
    return lines


def _task_by_task(tasks: Sequence[str], cells: Sequence[Json]) -> list[str]:
    """What each method solved of each task, beside its most frequent answer, and its KL."""
    header, names = ("method", *(task.removeprefix("bbh_cot_").replace("_", " ") for task in tasks)), _common(cells)
    solved = [(name, *(_solved(cell["methods"][name]) for cell in cells)) for name in names]
    if all(cell.get("guessed") for cell in cells):
        solved.append(("always the most frequent answer", *(f"{100 * cell['guessed']:.0f}" for cell in cells)))
    kl = [(name, *(f"{cell['methods'][name]['kl'][0]:.2f}" for cell in cells)) for name in names if name != FULL]
    tables = {"Solved, %": solved, "Mean KL, nats": kl}
    return [line for what, rows in tables.items() for line in (f"{what}, task by task:", "", *table(header, rows), "")]


def _by_depth(result: Json) -> dict[str, dict[str, Json]]:
    """The tasks measured at each depth."""
    depths = sorted({depth for cells in result["tasks"].values() for depth in cells}, key=float, reverse=True)
    return {
        depth: {task: cells[depth] for task, cells in result["tasks"].items() if depth in cells} for depth in depths
    }


def _groups(cells: Mapping[str, Json]) -> dict[str, list[str]]:
    """GSM8K, and all tasks of BBH together."""
    bbh = [task for task in cells if task.startswith(BBH)]
    groups = {"GSM8K": [GSM8K]} if GSM8K in cells else {}
    if bbh:
        groups[f"BBH, {len(bbh)} tasks together" if len(bbh) > 1 else bbh[0]] = bbh
    return groups


def _accuracies(cells: Sequence[Json]) -> list[str]:
    """What each method solved of some tasks together, beside full depth."""
    rows = []
    for name in _common(cells):
        solved, difference, p_value = pooled(cells, name)
        compared = ("", "") if difference is None else (interval(difference, 100, digits=1), f"{p_value:.2g}")
        own = [cell["methods"][name] for cell in cells]
        tokens, cut = (sum(row[key] for row in own) / len(own) for key in ("tokens", "cut_off"))
        problems = str(sum(row["problems"] for row in own))
        rows.append((name, problems, interval(solved, 100, digits=1), *compared, f"{tokens:.0f}", f"{100 * cut:.0f}"))
    columns = ("method", "problems", "solved, %", "difference, points", "McNemar p", "tokens of an output")
    return table((*columns, "cut off at the limit, %"), rows)


def _common(cells: Sequence[Json]) -> list[str]:
    """The methods that were measured on all of some tasks."""
    return [name for name in cells[0]["methods"] if all(name in cell["methods"] for cell in cells)]


def pooled(cells: Sequence[Json], name: str) -> tuple[Estimate, Estimate | None, float]:
    """Accuracy of a method on some tasks together, its difference to full depth, and McNemar's p-value.

    The difference is over the problems that the method was asked, which may be fewer than full depth was.
    """
    rows = [cell["methods"][name] for cell in cells]
    problems = sum(row["problems"] for row in rows)
    solved = wilson(sum(round(row["accuracy"][0] * row["problems"]) for row in rows if row["accuracy"]), problems)
    if name == FULL:
        return solved, None, 1.0
    only = [sum(row["against_full"][key] for row in rows) for key in ("only_full", "only_tapered")]
    return solved, bootstrap_difference(problems, *only), mcnemar(*only)


def _losses(cell: Json) -> list[str]:
    """Depths, what replay says, and speed if it was measured."""
    speeds, rows = cell.get("speed", {}).get("rows", {}), []
    for name, row in cell["methods"].items():
        figures = [f"{row['tuned_mean_depth']:.2f}", f"{row['mean_depth']:.2f}", "", ""]
        if name != FULL:
            figures[2:] = [interval(Estimate(*row["kl"])), interval(Estimate(*row["agreement"]), 100, digits=1)]
        if speeds:
            measured = speeds.get(name, {}).get("speedup")
            figures.append(interval(Estimate(*measured), 1, "x", digits=2) if measured else "")
        rows.append((name, *figures))
    columns = ["method", "mean depth as tuned", "mean depth, its own outputs"]
    columns += ["KL, nats", "same likeliest token, %", *(["speed"] if speeds else [])]
    return table(columns, rows)


def _solved(row: Json) -> str:
    return f"{100 * row['accuracy'][0]:.0f}" if row["accuracy"] else "–"


def command(script: str, model: str, about: Json, tasks: Sequence[str], depth: str | None, parts: str) -> str:
    """The line that measures something again, under its conditions."""
    options = {"model": model, "policy": about.get("policy"), "data-dir": "DATA", "folder": "FOLDER", "depth": depth}
    options |= {name: about[name.replace("-", "_")] for name in ("limit", "replayed", "max-tokens")}
    other = {name: value for name, value in DEFAULTS.items() if about[name] != value}
    options |= {name.replace("_", "-"): about[name] for name in other}
    options["tasks"] = ",".join(tasks)
    given = " ".join(f"--{name} {value}" for name, value in options.items() if value)
    return f"python research/{script} {given} {parts}"


def _commands(model: str, depth: str, cells: Mapping[str, Json]) -> list[str]:
    """The commands that measure a table again: one for tasks of the same limits."""
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for task, cell in cells.items():
        limits = (cell["conditions"]["limit"], cell["conditions"]["max_tokens"], "speed" in cell)
        groups.setdefault(limits, []).append(task)
    return [
        command("methods.py", model, cells[tasks[0]]["conditions"], tasks, depth, "quality" + " speed" * timed)
        for (*_, timed), tasks in groups.items()
    ]


def _conditions(cells: Mapping[str, Json]) -> str:
    """When, where and with what it was measured."""
    about = next(iter(cells.values()))["conditions"]
    dates = sorted({cell["conditions"]["date"] for cell in cells.values()})
    outputs, steps = (sum(cell[key] for cell in cells.values()) for key in ("replayed_outputs", "replayed_steps"))
    return prose(
        f"{measured(about | {'date': ' and '.join(dates)})}. Replay covers {steps:,} steps of {outputs} outputs."
    )


def _picture(result: Json) -> Figure:
    """A row of pictures for each mean depth and group of tasks: accuracy on the left, KL on the right."""
    groups = [
        (f"{title}, mean depth {depth} of {result['model']['num_hidden_layers']}", [cells[task] for task in tasks])
        for depth, cells in _by_depth(result).items()
        for title, tasks in _groups(cells).items()
    ]
    heights = [len(_common(cells)) + 3 for _, cells in groups]  # a line a method, and room for the title and the axis
    figure = Figure(figsize=(9, 0.27 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    for (left, right), (title, cells) in zip(grid, groups, strict=True):
        _draw(left, right, cells)
        left.set_title(title, loc="left", fontsize=10)
        right.set_xlabel("mean KL to full depth, nats")
    return figure


def _draw(left: Axes, right: Axes, cells: Sequence[Json]) -> None:
    """What each method solved of some tasks together, with lines for full depth and for guessing, and its KL."""
    names = _common(cells)  # full depth first
    solved = [Estimate(*(100 * x for x in pooled(cells, name)[0])) for name in names]
    kl = [mean_of([Estimate(*cell["methods"][name]["kl"]) for cell in cells]) for name in names[1:]]
    left.axvline(solved[0].value, color="#707070", linestyle="--", linewidth=0.8)
    left.set_xlabel("solved, %; dashed: full depth")
    if all(cell.get("guessed") for cell in cells):
        guessed = sum(cell["guessed"] for cell in cells) / len(cells)
        left.axvline(100 * guessed, color="#707070", linestyle=":", linewidth=0.8)
        left.set_xlabel("solved, %; dashed: full depth;\ndotted: always the most frequent answer")
    for axes, first, estimates in ((left, 0, solved), (right, 1, kl)):
        value, low, high = np.transpose(estimates)
        places, errors = range(first, len(names)), np.maximum(0, [value - low, high - value])
        axes.errorbar(value, places, xerr=errors, fmt="o", color=_COLOUR, capsize=2)
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first method on top
        axes.grid(color="#E4E4E4", linewidth=0.6)
    left.set_yticks(range(len(names)), names)
    left.set_xlim(left=0)
    right.set_yticks(range(len(names)), [])
    right.set_xscale("log")
    right.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter=NullFormatter())


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of figures of different tasks; its interval from theirs, which are independent."""
    value = sum(one.value for one in estimates) / len(estimates)
    below, above = (math.sqrt(sum((one[end] - one.value) ** 2 for one in estimates)) / len(estimates) for end in (1, 2))
    return Estimate(value, value - below, value + above)
