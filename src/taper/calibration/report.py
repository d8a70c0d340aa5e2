"""What a calibration found, as pictures and one page for people who have never heard of it.

Knows the `Summary` of a calibration and nothing of models or engines. No text of a user's goes into a picture.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..models.files import write_whole
from .statistics import MIN_STEPS, Estimate
from .summary import MEASURED_ORDER, Summary, interval, limits, remarks, verdict

SMOOTHED = 9  # steps of a running mean, its own in the middle
_WIDE = 30.0  # largest over smallest KL above which its scale is logarithmic
_LEAST = 1e-9  # KL of nothing, where the scale is logarithmic
_DPI = 160
_LINE = 0.06  # height of a line of text, in axes
# Okabe and Ito's colours, which colour-blind readers tell apart, but darker where they colour a name.
_BLUE, _SKY, _ORANGE, _INK, _GREY = "#0072B2", "#56B4E9", "#E69F00", "#333333", "#B0B0B0"
_OTHERS = ("#D55E00", "#009E73", "#AA4499", "#000000", "#8A6D00")
_STEP = "step: tokens of the answer so far"

_Style = dict[str, Any]
_Losses = Mapping[str, Mapping[int, float | Estimate]]  # method -> depth -> KL, with or without an interval


def write_report(folder: Path, summary: Summary) -> None:
    """Write index.html and its pictures, each file whole or not at all, making the folder."""
    drawn = (_frontier, _speed, _loss_by_step, _depth_by_step, _importance)
    pictures = {function.__name__[1:]: png(function(summary)) for function in drawn}
    page = _page(summary, pictures)
    for name, picture in pictures.items():
        write_whole(folder / f"{name}.png", picture)
    write_whole(folder / "index.html", page.encode())


# The page


def _page(summary: Summary, pictures: dict[str, bytes]) -> str:
    return render(
        resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"),
        pictures,
        **vars(summary),
        verdict=summary.verdict,
        verdict_text=verdict(summary),
        remarks=remarks(summary),
        limits=limits(summary),
        smoothed=SMOOTHED,
        min_steps=MIN_STEPS,
        measured_order=MEASURED_ORDER,
    )


def render(template: str, pictures: Mapping[str, bytes], **names: Any) -> str:
    """A page from its template, in the style of all reports, with its pictures in it."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["interval"] = interval
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    encoded = {name: base64.b64encode(picture).decode() for name, picture in pictures.items()}
    return environment.from_string(template).render(names, pictures=encoded, style=Markup(style))


# The pictures


def _frontier(summary: Summary) -> Figure:
    """Loss against mean depth."""
    figure, axes = _figure("What skipping layers costs")
    layers, frontier = summary.model.num_hidden_layers, summary.frontier
    axes.set_xlabel(f"mean depth: layers run per token, of {layers} (fewer to the right)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(layers, min(frontier.speedup))
    _draw_losses(axes, frontier.kl, {depth: float(depth) for depth in frontier.speedup}, layers)
    return figure


def _speed(summary: Summary) -> Figure:
    """Loss against speed, and where the policy stands."""
    figure, axes = _figure("What speed costs")
    frontier, (speed, slowest, fastest) = summary.frontier, summary.speedup.measured
    axes.set_xlabel("speed, times that of full depth")
    axes.set_xlim(min(1.0, slowest) - 0.01, max(*frontier.speedup.values(), fastest) + 0.01)
    least = min(_kls(frontier.kl)) / 2 if _is_wide(frontier.kl) else 0.0  # a logarithm has no place for 0
    kl, low, high = (max(x, least) for x in summary.held_out.all_steps.kl)
    sideways, upwards = [[speed - slowest], [fastest - speed]], [[kl - low], [high - kl]]
    axes.errorbar(speed, kl, upwards, sideways, "D", color=_INK, elinewidth=1.2, capsize=3, zorder=5, clip_on=False)
    style: _Style = {"textcoords": "offset points", "va": "center", "weight": "bold", "color": _INK, "zorder": 6}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate("this policy", (speed, kl), (9, 10 if kl == least else -11), bbox=box, **style)
    _draw_losses(axes, frontier.kl, frontier.speedup, 1.0)
    return figure


def _loss_by_step(summary: Summary) -> Figure:
    """Loss and agreement by step of the answer. Not step 0, which comes from the prompt at full depth."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    by_step = summary.by_step
    answers = np.array(by_step.answers, float)[1:]
    steps = np.arange(1, len(answers) + 1)
    for axes, values in ((above, np.array(by_step.kl)[1:]), (below, 100 * np.array(by_step.agreement)[1:])):
        axes.plot(steps, values, color=_GREY, linewidth=0.7)
        axes.plot(steps, _running_mean(values, answers), color=_BLUE, linewidth=2)
        plain(axes)
    title = f"What the policy costs along the answer (thick: mean over {SMOOTHED} steps)"
    above.set_title(title, loc="left", fontsize=11)
    above.set(ylabel="mean KL per token, nats", ylim=(0, None))
    below.set(ylabel="same token, %", ylim=(None, 101), xlabel=_STEP, xlim=(0, len(answers) + 1))
    return figure


def _depth_by_step(summary: Summary) -> Figure:
    """How many layers run at each step."""
    figure, axes = _figure("How many layers run along the answer")
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


def _importance(summary: Summary) -> Figure:
    """What each layer costs when it alone is skipped."""
    figure, axes = _figure("How much each layer matters")
    layers, importance = summary.model.num_hidden_layers, summary.importance
    core, skipped = set(summary.core_layers), set(summary.skip_order[: layers - summary.curve[-1]])
    least = min((kl for kl in importance if kl > 0), default=2 * _LEAST) / 2
    roles = [("core: always run", "#777777", core), ("flex, still run", _SKY, set(range(layers)) - core - skipped)]
    for role, colour, members in [*roles, ("skipped by the last step", _ORANGE, skipped)]:
        heights = [max(importance[layer], least) for layer in sorted(members)]
        axes.bar(sorted(members), heights, color=colour, label=f"{role} ({len(members)})")
    axes.set(xlim=(-0.7, layers - 0.3), xlabel="layer, counted from 0", ylabel="mean KL without it, nats (log scale)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _log_scale(axes, least)
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure


# Their parts


def _draw_losses(axes: Axes, methods: _Losses, x_of: Mapping[int, float], x_full: float) -> None:
    """A line a method, named at its end; the random orders thin and grey, the measured one on top with its interval."""
    colours, ends, wide = cycle(_OTHERS), {}, _is_wide(methods)
    for name, losses in methods.items():
        loss = np.maximum([x if isinstance(x, Estimate) else [x] * 3 for x in losses.values()], _LEAST)  # [depths, 3]
        x = [x_of[depth] for depth in losses]
        if not wide:  # full depth, which costs nothing
            x, loss = [x_full, *x], np.vstack([np.zeros(3), loss])
        if name == MEASURED_ORDER:
            colour, width, order = _BLUE, 2.2, 4
            axes.fill_between(x, loss[:, 1], loss[:, 2], color=colour, alpha=0.2, linewidth=0)
        elif name.startswith("random order"):
            name, colour, width, order = "random orders", _GREY, 0.9, 2
        else:
            colour, width, order = next(colours), 1.4, 3
        axes.plot(x, loss[:, 0], "o-", color=colour, lw=width, ms=1 + 1.5 * width, zorder=order, clip_on=False)
        ends[name] = (x[-1], float(loss[-1, 0]), colour)
    axes.set_ylabel("mean KL per token, nats" + (" (log scale)" if wide else ""))
    if wide:
        _log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    if len(methods) > 1:
        _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: dict[str, tuple[float, float, str]]) -> None:
    """Names beside the ends of their lines, moved apart where they would overlap."""
    place, names = axes.transScale + axes.transLimits, sorted(ends, key=lambda name: ends[name][1])
    heights = [float(place.transform(ends[name][:2])[1]) for name in names]  # 0 at the bottom of the axes, 1 at the top
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + _LINE)
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], 1 - _LINE * (len(heights) - 1 - i))
    line = {"arrowstyle": "-", "color": _GREY, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2}
    style: _Style = {"textcoords": "axes fraction", "va": "center", "annotation_clip": False, "arrowprops": line}
    for name, height in zip(names, heights, strict=True):
        x, y, colour = ends[name]
        label, weight = name.split(" (")[0], "bold" if name == MEASURED_ORDER else "normal"
        axes.annotate(label, (x, y), (1.04, height), color=_INK if colour == _GREY else colour, weight=weight, **style)


def _log_scale(axes: Axes, bottom: float | None = None) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
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


def _kls(methods: _Losses) -> list[float]:
    """The KL of every method at every depth."""
    values = (x for losses in methods.values() for x in losses.values())
    return [max(x.value if isinstance(x, Estimate) else x, _LEAST) for x in values]


def _is_wide(methods: _Losses) -> bool:
    """Whether their KL calls for a logarithmic scale."""
    return max(_kls(methods)) > _WIDE * min(_kls(methods))
