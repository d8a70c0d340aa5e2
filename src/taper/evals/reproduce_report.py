"""What a reproduction of the paper found, as one page with pictures. Knows no models and no engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..calibration.report import plain, png, render
from ..calibration.statistics import Estimate
from ..calibration.summary import interval, to_plain
from ..models.files import write_whole
from .methods import FULL
from .reproduce import CALIBRATED, FEWER, Reproduction, Result

# Okabe and Ito's colours, which colour-blind readers tell apart, and a mark for each method; the random orders share.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9", "#8A6D00")
_MARKS = "os^vP*X"
_GREY, _INK = "#B0B0B0", "#333333"


def write_report(folder: Path, reproduction: Reproduction) -> None:
    """Write index.html and results.json, each whole or not at all, making the folder."""
    shown = _shown(reproduction)
    pictures = {f"accuracy {task}": png(_accuracy(reproduction, task)) for task in shown}
    pictures["nll"] = png(_nll(reproduction, shown))
    page = render(
        resources.files(__package__).joinpath("reproduce.html").read_text(encoding="utf-8"),
        pictures,
        **vars(reproduction),
        shown=shown,
        tables={task: _table(reproduction, task) for task in shown},
        fewer=FEWER,
        calibrated=CALIBRATED,
        accepted=f"{100 * reproduction.margin:g} {'point' if reproduction.margin == 0.01 else 'points'}",
    )
    write_whole(folder / "results.json", json.dumps(to_plain(reproduction)).encode())
    write_whole(folder / "index.html", page.encode())


def _shown(reproduction: Reproduction) -> list[str]:
    """Groups, and the tasks that are in none; results.json has the tasks of the groups as well."""
    inside = {task for members in reproduction.groups.values() for task in members}
    return [name for name in dict.fromkeys(result.task for result in reproduction.results) if name not in inside]


def _table(reproduction: Reproduction, task: str) -> list[tuple[str, ...]]:
    """The rows of a task: length, method, mean depths, accuracy, difference, verdict."""
    rows: list[tuple[str, ...]] = []
    for result in (one for one in reproduction.results if one.task == task):
        score, compared = result.score, result.score.against_full
        difference = "" if compared is None else interval(compared.difference, 100, digits=1)
        verdict = "" if compared is None else compared.conclusion
        name = result.method if result.depth is None else f"{result.method}, at {result.depth:g} layers"
        solved = interval(score.accuracy, 100, digits=1)
        rows.append((str(result.max_tokens), name, f"{score.mean_depth:.1f}", solved, difference, verdict))
    return rows


def _accuracy(reproduction: Reproduction, task: str) -> Figure:
    """Accuracy against mean depth, a line and mark for each method, at each length of outputs."""
    results = [one for one in reproduction.results if one.task == task and one.score.accuracy]
    lengths = sorted({result.max_tokens for result in results}) or [0]
    figure = Figure(figsize=(max(7.0, 3.6 * len(lengths)), 4.6), layout="constrained")
    grid = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    layers = reproduction.model.num_hidden_layers
    for axes, length in zip(grid, lengths, strict=True):
        plain(axes)
        axes.set_title(f"up to {length} tokens", loc="left", fontsize=11)
        axes.set_xlabel(f"mean depth, of {layers} layers (fewer to the right)")
        axes.invert_xaxis()
        _draw(axes, [result for result in results if result.max_tokens == length])
    grid[0].set_ylabel("solved, %")
    handles = {handle.get_label(): handle for axes in grid for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, results: Sequence[Result]) -> None:
    """The methods on one task at one length; each line begins at full depth."""
    full = [result for result in results if result.method == FULL]
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, list(full) if result.depth is not None else []).append(result)
    styles = _styles(list(by_method))
    for name, own in by_method.items():
        own = sorted(own, key=lambda result: -result.score.mean_depth)
        accuracies = [Estimate(*(100 * x for x in result.score.accuracy or (0, 0, 0))) for result in own]
        below = [max(0.0, value - low) for value, low, _ in accuracies]
        above = [max(0.0, high - value) for value, _, high in accuracies]
        values = [accuracy.value for accuracy in accuracies]
        depths = [result.score.mean_depth for result in own]
        axes.errorbar(depths, values, [below, above], elinewidth=0.8, capsize=2, linewidth=1.2, **styles[name])


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A mark, a colour and a label for each method."""
    styles: dict[str, dict[str, Any]] = {
        FULL: {"fmt": "D", "color": _INK, "label": FULL, "zorder": 5},
        CALIBRATED: {"fmt": "d", "color": _INK, "label": CALIBRATED, "zorder": 5},
    }
    others = [name for name in names if name not in styles]
    for name in others:
        if "random order" in name:
            styles[name] = {"fmt": ".-", "color": _GREY, "label": "D3, random orders"}
    for index, name in enumerate(name for name in others if name not in styles):
        mark, colour = _MARKS[index % len(_MARKS)], _COLOURS[index % len(_COLOURS)]
        styles[name] = {"fmt": f"{mark}-", "color": colour, "label": name}
    return styles


def _nll(reproduction: Reproduction, shown: Sequence[str]) -> Figure:
    """NLL of full depth's own outputs, by step, with intervals."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    plain(axes)
    by_task: Mapping[str, Any] = {task.task: task.rows for task in reproduction.nll}
    for name, colour in zip(shown, _COLOURS * len(shown), strict=False):
        values = [Estimate(*row["nll"]) for row in by_task[name]]
        below = [max(0.0, one.value - one.low) for one in values]
        above = [max(0.0, one.high - one.value) for one in values]
        style: dict[str, Any] = {"fmt": "o-", "color": colour, "capsize": 2, "label": name}
        axes.errorbar(range(len(values)), [one.value for one in values], [below, above], **style)
    longest = max((by_task[name] for name in shown), key=len)
    axes.set_xticks(range(len(longest)), ["{} to {}".format(*row["steps"]) for row in longest])
    axes.set(ylim=(0, None), xlabel="steps: tokens of the output so far", ylabel="mean NLL, nats a token")
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure
