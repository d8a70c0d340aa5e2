"""What a calibration found, in words that the command line, the report and the pages of results share."""

from __future__ import annotations

import math

from .statistics import Estimate, Loss
from .summary import Provenance

HURTS = 0.9  # agreement over tapered steps below which readers are warned


# Each quality limit in words, and the figure that it bounds: its name, factor and unit.
_LIMITS = {
    "max_kl": ("mean KL at most {:.4g} nats", "kl", 1, "nats"),
    "min_agreement": ("agreement of {:.4g} % or more", "agreement", 100, "%"),
    "max_nll_increase": ("NLL rise at most {:.4g} %", "nll_increase", 1, "%"),
}


def interval(estimate: Estimate | None, factor: float = 1.0, unit: str = "", digits: int | None = None) -> str:
    """A figure and its interval, times a factor, such as "0.052 (0.048 to 0.057)"; a dash for None.

    `digits` are decimals, by default up to the first one that the interval leaves open.
    """
    if estimate is None:
        return "–"
    value, low, high = (factor * x for x in estimate)
    if digits is None and high > low:
        digits = min(6, max(0, -math.floor(math.log10((high - low) / 2))))
    form = ".3g" if digits is None else f".{digits}f"
    return f"{value:{form}}{unit} ({low:{form}} to {high:{form}}{unit})"


def limits(summary: Provenance) -> list[tuple[str, str]]:
    """Each limit of the budget, and what was measured on held-out prompts."""
    measured, speedup = summary.held_out.tapered_steps or summary.held_out.all_steps, summary.speedup
    rows = []
    for name, limit in summary.budget.given.items():
        if name in _LIMITS:
            asked, _, factor, _ = _LIMITS[name]
            rows.append((asked.format(factor * limit), _bounded(name, measured.value)))
        else:
            speeds = f"{speedup.predicted:.2f} predicted, {speedup.measured.median:.2f} measured"
            rows.append((f"{limit:.4g} times the speed of full depth", speeds))
    return rows


def verdict(summary: Provenance) -> str:
    """What came of the budget: "kept" only where whole intervals keep it."""
    budget, tapered = summary.budget, summary.held_out.tapered_steps
    if summary.verdict is None:
        return "the best quality that was found at this speed"
    if summary.verdict == "kept by the estimate" and tapered is not None:
        over = [name for name, share in budget.shares(tapered.worst).items() if share > 1]
        reached = " and ".join(_bounded(name, tapered.worst) for name in over)
        return f"kept by the estimate; the 95 % interval reaches {reached}"
    return "kept" if summary.verdict == "kept" else "not kept; this is the nearest policy that was found"


def remarks(summary: Provenance) -> list[str]:
    """What a user would want to be told before any figure."""
    tapered, speed, repetition = summary.held_out.tapered_steps, summary.speedup, summary.free_running.repetition
    problems = summary.problems
    if tapered is None:
        return []
    asked_speed = summary.budget.speedup or 0.0
    texts = {
        "This policy hurts: at more than one tapered step in ten another token becomes the likeliest. Expect other "
        "answers than at full depth, and read some before you use it.": tapered.agreement.value < HURTS,
        "It solves fewer word problems than the model does at full depth: do not trust its arithmetic.": (
            problems is not None and problems.difference.high < 0
        ),
        "Not every timed run was faster than full depth.": speed.measured.slowest <= 1,
        "Measured, it is slower than was asked for.": speed.measured.fastest < asked_speed,
        "Left to itself, it repeats itself more than the model does at full depth.": (
            repetition.policy.low > repetition.full.high
        ),
    }
    return [text for text, holds in texts.items() if holds]


def _bounded(name: str, loss: Loss) -> str:
    """The figure that a limit bounds."""
    _, figure, factor, unit = _LIMITS[name]
    return f"{factor * getattr(loss, figure):.3g} {unit}"
