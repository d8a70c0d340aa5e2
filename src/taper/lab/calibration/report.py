"""The results of a calibration as pictures and one page, for people who have never heard of it.

Knows the `CalibrationSummary` and nothing of models or engines. No text of a user's goes into a picture.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ...models.files import write_whole
from .summary import CalibrationSummary, interval, limits, remarks, verdict

SMOOTHED = 9  # steps of a running mean, its own in the middle
_DPI = 160
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_BLUE, _SKY, _ORANGE, _INK, _GREY = "#0072B2", "#56B4E9", "#E69F00", "#333333", "#B0B0B0"
_STEP = "step: tokens of the output so far"


def write_report(folder: Path, summary: CalibrationSummary) -> None:
    """Write index.html and its pictures, each file whole or not at all, making the folder."""
    drawn = (_frontier, _speed, _loss_by_step, _depth_by_step, _importance)
    pictures = {function.__name__[1:]: png(function(summary)) for function in drawn}
    page = _page(summary, pictures)
    for name, picture in pictures.items():
        write_whole(folder / f"{name}.png", picture)
    write_whole(folder / "index.html", page.encode())


def _page(summary: CalibrationSummary, pictures: Mapping[str, bytes]) -> str:
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    words: dict[str, Any] = {"remarks": remarks(summary), "limits": limits(summary)}
    is_on_budget = summary.verdict not in (None, "not enough steps")
    text = f"budget {verdict(summary)}" if is_on_budget else verdict(summary)
    words["headline"] = text[0].upper() + text[1:]
    words["answers"] = [(one.prompt, *_differing(one.full, one.policy)) for one in summary.examples]
    names = {**vars(summary), "verdict": summary.verdict, "smoothed": SMOOTHED}
    return render(template, pictures, **names | words)


def render(template: str, pictures: Mapping[str, bytes], **names: Any) -> str:
    """A page from its template, in the style of all reports, with its pictures in it."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["interval"] = interval
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    encoded = {name: base64.b64encode(picture).decode() for name, picture in pictures.items()}
    return environment.from_string(template).render(names, pictures=encoded, style=Markup(style))


def _differing(one: str, other: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Two texts in parts, each with whether the other one lacks it."""
    words, others = (re.findall(r"\s*\S+", text) for text in (one, other))
    blocks = SequenceMatcher(None, words, others, autojunk=False).get_opcodes()
    ours = [("".join(words[first:end]), kind != "equal") for kind, first, end, _, _ in blocks if end > first]
    theirs = [("".join(others[first:end]), kind != "equal") for kind, _, _, first, end in blocks if end > first]
    return ours, theirs


# The pictures


def _frontier(summary: CalibrationSummary) -> Figure:
    layers, frontier = summary.model.num_hidden_layers, summary.frontier
    figure, axes = _figure()
    axes.plot([layers, *frontier.kl], [0.0, *frontier.kl.values()], "o-", color=_BLUE, linewidth=2)
    axes.set(xlabel=f"layers run per token, of {layers} (fewer to the right)", ylabel="mean KL per token, nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(layers, min(frontier.kl)), ylim=(0, None))
    return figure


def _speed(summary: CalibrationSummary) -> Figure:
    frontier, (speed, slowest, fastest) = summary.frontier, summary.speedup.measured
    figure, axes = _figure()
    axes.plot([1.0, *frontier.speedup.values()], [0.0, *frontier.kl.values()], "o-", color=_BLUE, linewidth=2)
    kl, low, high = summary.held_out.all_steps.kl
    sideways, upwards = [[speed - slowest], [fastest - speed]], [[kl - low], [high - kl]]
    axes.errorbar(speed, kl, upwards, sideways, "D", color=_INK, elinewidth=1.2, capsize=3, zorder=5, clip_on=False)
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "weight": "bold", "color": _INK}
    axes.annotate("this policy", (speed, kl), (9, 10), bbox={"color": "white", "alpha": 0.85, "pad": 1}, **style)
    axes.set(xlabel="speed, times that of full depth", ylabel="mean KL per token, nats", ylim=(0, None))
    axes.set_xlim(min(1.0, slowest) - 0.01, max(*frontier.speedup.values(), fastest) + 0.01)
    return figure


def _loss_by_step(summary: CalibrationSummary) -> Figure:
    """Loss and agreement by step, without step 0, which comes from the prompt at full depth."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    by_step = summary.by_step
    outputs = np.array(by_step.outputs, float)[1:]
    steps = np.arange(1, len(outputs) + 1)
    for axes, values in ((above, np.array(by_step.kl)[1:]), (below, 100 * np.array(by_step.agreement)[1:])):
        axes.plot(steps, values, color=_GREY, linewidth=0.7)
        axes.plot(steps, _running_mean(values, outputs), color=_BLUE, linewidth=2)
        plain(axes)
    above.set(ylabel="mean KL per token, nats", ylim=(0, None))
    below.set(ylabel="same token, %", ylim=(None, 101), xlabel=_STEP, xlim=(0, len(outputs) + 1))
    return figure


def _depth_by_step(summary: CalibrationSummary) -> Figure:
    figure, axes = _figure()
    curve, layers, mean = summary.curve, summary.model.num_hidden_layers, summary.mean_depth
    axes.stairs(curve, color=_BLUE, linewidth=2, baseline=None)
    axes.stairs(curve, color=_BLUE, alpha=0.12, fill=True)
    axes.axhline(mean, color=_INK, linewidth=1, linestyle=(0, (5, 4)))
    place, above = 0.99 * len(curve), mean + 0.01 * layers  # where the curve, which never rises, is not
    axes.text(place, above, f"mean {mean:.1f} of {layers}", ha="right", va="bottom", color=_INK)
    axes.set(xlim=(0, len(curve)), ylim=(0, 1.1 * layers), xlabel=_STEP, ylabel="depth: layers run")
    every = max(1, layers // 6)
    axes.set_yticks([*range(0, layers - every // 2, every), layers])
    return figure


def _importance(summary: CalibrationSummary) -> Figure:
    figure, axes = _figure()
    layers, importance = summary.model.num_hidden_layers, summary.importance
    core, skipped = set(summary.core_layers), set(summary.skip_order[: layers - summary.curve[-1]])
    least = min((kl for kl in importance if kl > 0), default=2e-9) / 2
    roles = [("core: always run", "#777777", core), ("flex, still run", _SKY, set(range(layers)) - core - skipped)]
    for role, colour, members in [*roles, ("skipped by the last step", _ORANGE, skipped)]:
        heights = [max(importance[layer], least) for layer in sorted(members)]
        axes.bar(sorted(members), heights, color=colour, label=f"{role} ({len(members)})")
    axes.set(xlim=(-0.7, layers - 0.3), xlabel="layer, counted from 0", ylabel="mean KL without it, nats (log scale)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yscale("log")
    axes.set_ylim(bottom=least)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure


def _figure() -> tuple[Figure, Axes]:
    """A picture without a title, as the heading above it is one."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    plain(axes)
    return figure, axes


def plain(axes: Axes) -> None:
    """The look of all pictures: a light grid, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)


def png(figure: Figure) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, backend="agg", facecolor="white")
    return buffer.getvalue()


def _running_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over the `SMOOTHED` steps around each, fewer at both ends: [steps]."""
    window = [slice(max(0, i - SMOOTHED // 2), i + SMOOTHED // 2 + 1) for i in range(len(values))]
    return np.array([np.average(values[part], weights=weights[part]) for part in window])
