"""Draws the pictures of the pages from results: pages/methods-MODEL.png, formats.png, frontier.png, long.png.

python research/pictures.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tables
from formats import FORMATS, TESTS
from render import PAGES, RESULTS, load

from taper.lab.calibration.statistics import Estimate

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

Json = dict[str, Any]
_COLOUR = "#0072B2"


def draw_all(results: Json, folder: Path) -> list[Path]:
    """Draw whatever there are results of; returns the files."""
    figures = {f"methods-{name}.png": draw_methods(result) for name, result in results["methods"].items()}
    if "formats" in results:
        figures["formats.png"] = draw_formats(results["formats"])
    for calibrated in results["calibration"].values():
        if "orders" in calibrated:
            figures["frontier.png"] = draw_orders(calibrated["orders"])
    if results["long_outputs"]:
        figures["long.png"] = draw_long(results["long_outputs"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in figures]


def draw_methods(result: Json) -> Figure:
    """A row of plots for each mean depth and group of tasks: accuracy on the left, KL on the right."""
    rows = [
        (f"{title}, mean depth {depth} of {result['model']['num_hidden_layers']}", cells)
        for depth, tasks in tables.by_depth(result).items()
        for title, cells in tables.groups(tasks).items()
    ]
    heights = [len(tables.common(cells)) + 3 for _, cells in rows]  # a line a method, and room for title and axis
    figure = Figure(figsize=(9, 0.27 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(rows), 2, squeeze=False, height_ratios=heights)
    for (left, right), (title, cells) in zip(grid, rows, strict=True):
        _draw_group(left, right, cells)
        left.set_title(title, loc="left", fontsize=10)
        right.set_xlabel("mean KL to full depth, nats")
    return figure


def _draw_group(left: Axes, right: Axes, cells: Sequence[Json]) -> None:
    """What each method solved of some tasks together, with lines for full depth and for guessing, and its KL."""
    names = tables.common(cells)
    solved = [Estimate(*(100 * x for x in tables.pooled(cells, name)[0])) for name in names]
    kl = [tables.mean_of([Estimate(*cell["methods"][name]["kl"]) for cell in cells]) for name in names[1:]]
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


def draw_formats(formats: Json) -> Figure:
    """The ratios to llama.cpp as bars: a plot for each kind of test, a group for each format, a shade for each size."""
    peer = tables.format_peers(formats)[0]
    titles = {
        "decode": "Decoding, by tokens of context",
        "prefill": "Prompts, by tokens",
        "batch": "Batches, by outputs side by side",
    }
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    for axes, (kind, title) in zip(figure.subplots(len(titles), 1, sharex=True), titles.items(), strict=True):
        sizes = sorted(size for other, size in TESTS if other == kind)
        for index, size in enumerate(sizes):
            bars = [
                (FORMATS.index(n), cell["ratio"][peer]) for n, s, cell in tables.cells_of(formats, kind) if s == size
            ]
            places = [place + (index - (len(sizes) - 1) / 2) * 0.27 for place, _ in bars]
            shade = matplotlib.colormaps["viridis"](0.2 + 0.6 * index / max(1, len(sizes) - 1))
            axes.bar(places, [ratio for _, ratio in bars], 0.25, label=f"{size:,}", color=shade)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel("ratio")
        axes.set_xticks(range(len(FORMATS)), FORMATS)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"Taper's speed over llama.cpp's ({peer}), full depth, higher is better for Taper", fontsize=10)
    return figure


def draw_orders(orders: Json) -> Figure:
    """Mean KL against depth, with a line for each order of skipping layers."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, by_depth in orders["kl"].items():
        is_ours = name == "measured order"
        shown = {"color": _COLOUR, "linewidth": 2.5, "zorder": 3} if is_ours else {"linewidth": 1}
        axes.plot([int(depth) for depth in by_depth], [kl[0] for kl in by_depth.values()], label=name, **shown)
    axes.set(xlabel="mean depth, layers", ylabel="mean KL to full depth, nats", yscale="log")
    axes.invert_xaxis()
    axes.grid(color="#E4E4E4", linewidth=0.6)
    axes.legend(fontsize=8)
    return figure


def draw_long(models: Json) -> Figure:
    """A row for each model: agreement on the left, and on the right the likelihood of outputs, by range of steps."""
    figure = Figure(figsize=(9, 3.4 * len(models)), layout="constrained")
    for (left, right), (model, result) in zip(
        figure.subplots(len(models), 2, squeeze=False), models.items(), strict=True
    ):
        colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(result["policies"])))
        full: Json = {}
        for (name, policy), colour in zip(result["policies"].items(), colours, strict=True):
            ranges = policy["long_outputs"]["ranges"]
            labels = [f"{part['first']} to\n{part['end']}" for part in ranges]
            _draw_ranges(left, [part["agreement"] for part in ranges], 100, name, colour)
            _draw_ranges(right, [part["nll"] and part["nll"]["policy"] for part in ranges], 1, name, colour)
            full |= {place: part["nll"]["full"] for place, part in enumerate(ranges) if part["nll"]}
        _draw_ranges(right, [full.get(place) for place in range(len(ranges))], 1, "full depth", "#707070")
        left.set_title(model, loc="left", fontsize=10)
        left.set(ylabel="agreement with full depth, %", xlabel="steps")
        right.set(ylabel="own outputs under full depth, nats", xlabel="steps")
        for axes in (left, right):
            axes.set_xticks(range(len(labels)), labels, fontsize=8)
            axes.grid(color="#E4E4E4", linewidth=0.6)
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_ranges(axes: Axes, estimates: Sequence[Any], factor: float, name: str, colour: Any) -> None:
    """A line through the estimates that there are, with their intervals."""
    given = [(place, *(factor * x for x in values)) for place, values in enumerate(estimates) if values]
    places, value, low, high = np.transpose(given)
    axes.errorbar(places, value, yerr=[value - low, high - value], label=name, color=colour, marker="o", capsize=2)


if __name__ == "__main__":
    for path in draw_all(load(RESULTS), PAGES):
        print(path.name)
