"""docs/results/paper.md, from research/results/claims-*.json; `render.py` writes it. Verdicts follow stated rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import claim_tables as tables
import render_methods
from pages import measured, prose, table

from taper.calibration.summary import MEASURED_ORDER

Json = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A section of the page: what the paper says, what was measured and the rule of the verdict."""

    part: str  # of research/claims.py
    title: str
    paper: str
    measured: str
    rule: str
    verdicts: Callable[[Json], dict[str, str]]  # what they are about, and what they say
    as_tables: Callable[[Json], list[str]]


def pages(results: Path, docs: Path) -> dict[Path, str]:
    """The page, if there are results of a model."""
    models = [json.loads(path.read_text()) for path in sorted(results.glob("claims-*.json"))]
    if not models:
        return {}
    verdicts = [
        (claim.title, model["model"]["name"], about, verdict)
        for claim in CLAIMS
        for model in models
        if claim.part in model
        for about, verdict in claim.verdicts(model[claim.part]).items()
    ]
    lines = [
        "# The paper's claims, one by one",
        "",
        prose(
            """
            This page is written by `python research/render.py` from `research/results/claims-*.json`. It takes the
            claims of D3 ([arXiv 2503.08524](https://arxiv.org/abs/2503.08524)) and says what came out when they were
            measured on models that fit a small machine. The paper's own models, Llama 2 of 7B to 70B, are larger; a
            claim that does not hold here may hold there. Every verdict follows from the figures by the rule that
            stands beside it. Brackets hold 95 % intervals, from resampling answers. `DATA` holds GSM8K and BBH, and
            `FOLDER` keeps what was answered, so that the parts share it.
            """
        ),
        "",
        *table(("claim", "model", "about", "verdict"), verdicts),
        "",
    ]
    for claim in CLAIMS:
        lines += _section(claim, models)
    return {docs / "paper.md": "\n".join(lines)}


def in_short(model: Json) -> list[str]:
    """What skipping as many layers as the paper does costs, for the README."""
    solved = tables.accuracy_in_short(model, "gsm8k", f"D3, {MEASURED_ORDER}")
    return [prose(f"{solved} Brackets hold 95 % intervals.")]


def _section(claim: Claim, models: Sequence[Json]) -> list[str]:
    lines = [f"## {claim.title}", "", prose(f"**The paper says:** {claim.paper}"), ""]
    lines += [prose(f"**Measured:** {claim.measured}"), "", prose(f"**Rule of the verdict:** {claim.rule}"), ""]
    missing = [model["model"]["name"] for model in models if claim.part not in model]
    if missing:
        lines += [f"Not measured yet on {' and '.join(missing)}.", ""]
    for model in models:
        if figures := model.get(claim.part):
            lines += [f"### {claim.title.split('. ')[0]}: {model['model']['name']}", ""]
            lines += [f"- {about}: **{verdict}**." for about, verdict in claim.verdicts(figures).items()]
            lines += ["", *claim.as_tables(figures), ""]
            for about in _runs(figures):
                command = _command(model["model"]["name"], claim.part, about, figures.get("depth"))
                lines += ["Repeat it with", "", f"    {command}", "", prose(f"Measured {measured(about)}."), ""]
    return lines


def _runs(figures: Json) -> list[Json]:
    """The conditions of a part, or of its tasks, as far as these differ."""
    every = [figures["conditions"]] if "conditions" in figures else [f["conditions"] for f in figures["tasks"].values()]
    return [about for place, about in enumerate(every) if about not in every[:place]]


def _command(model: str, part: str, about: Json, depth: float | None) -> str:
    fixed = part in ("accuracy", "length") or depth is None  # these depend on no --depth
    return render_methods.command("claims.py", model, about, about["tasks"], None if fixed else f"{depth:.6g}", part)


_INTERVAL = "A verdict needs the whole 95 % interval on one side of zero; if it includes zero, it cannot be told."
CLAIMS = (
    Claim(
        "perplexity",
        "(a) Later tokens need less",
        "tokens predicted later have lower perplexity, and so require less computation.",
        """these are two claims. The first: the negative log-likelihood (NLL) at full depth, along the answers that
        full depth wrote, and along the solutions that people wrote to GSM8K. The second: what skipping the same layers
        at every step costs, by step. Each answer's second half is compared with its own first half, so that long
        answers do not stand for late tokens.""",
        f"the claim says that the change from the first half to the second is below zero. {_INTERVAL}",
        tables.perplexity_verdicts,
        tables.perplexity_tables,
    ),
    Claim(
        "curves",
        "(b) Power-law decay is the right curve",
        "depth should decay with a power of the position, floor(L alpha^i).",
        """the KL to full depth over all steps, of four curves of the same mean depth over the same answers, in the
        same order of layers: the power law, a straight line, a constant depth, and full depth up to a late start with
        twice as many layers skipped after it.""",
        f"the claim says that every other curve has a higher KL than the power law. {_INTERVAL}",
        lambda f: {"power law against the other curves": tables.curves_verdict(f)},
        tables.curves_tables,
    ),
    Claim(
        "core",
        "(c) Head and tail are core",
        "the first and the last layers matter most, and those between can be skipped.",
        """the KL to full depth when one layer is skipped at every step, for each layer. Head and tail are the first and
        the last eighth of the layers: our reading, because the paper's own choice is known to us at second hand.""",
        f"the claim says that the mean KL of the part is above that of the layers between. {_INTERVAL}",
        tables.core_verdicts,
        tables.core_tables,
    ),
    Claim(
        "nesting",
        "(d) Missing keys and values break quality",
        """a layer that runs again after it was skipped misses keys and values; so the layers of a token must be among
        those of every token before it.""",
        """three rules in transformers in f32, with the same depth at each step. Nested: the measured order. Rotating:
        other layers at each step, out of twice as many, with keys and values missing where they were not computed.
        Rotating, filled in: the same layers, but they compute keys and values from the hidden states that pass them
        by. The difference between the last two is what missing keys and values cost, whichever layers are chosen.""",
        f"the claims say that these differences of KL are above zero. {_INTERVAL}",
        tables.nesting_verdicts,
        tables.nesting_tables,
    ),
    Claim(
        "accuracy",
        "(e) 1.5 times fewer operations at under 1 % loss",
        """on Llama 2 of 7B to 70B, accuracy on BBH rises by 0.5 to 1.3 points with 1.6 to 2 times fewer layers. On
        GSM8K it rises from 10.6 to 12.1 % on 7B, where only 5 to 7 % of the layers are skipped.""",
        """accuracy on the same problems, at full depth and with D3 at a mean depth of two thirds of the layers: in the
        measured order, and with the middle first (our reading of the paper).""",
        """a one-sided test of non-inferiority at a margin of 1 point, at the 5 % level. It cannot be told if there are
        too few problems. Where always giving the most frequent answer would solve as many as full depth does
        ([methods compared](methods.md)), there is nothing to lose, and a verdict says little.""",
        tables.accuracy_verdicts,
        tables.accuracy_tables,
    ),
    Claim(
        "length",
        "(f) What is saved grows with the answer",
        """one figure, 1.5 times fewer operations, and a wall clock of 1.12 to 1.23 times. By its formula what is saved
        depends on the length: 32 layers and alpha 0.998 give 1.15 times at 128 tokens and 1.64 times at 512.""",
        "the policy with alpha 0.998 and the middle first, one output at a time, against full depth, taking turns.",
        """it holds if the slowest round at the longest output saves more than the fastest one at the shortest; it does
        not if the fastest round at the longest saves no more than the slowest at the shortest.""",
        lambda f: {"the clock saves more on longer outputs": tables.length_verdict(f)},
        tables.length_tables,
    ),
    Claim(
        "start",
        "(g) The best start depends on the task",
        "the step at which depth begins to fall is chosen for each task.",
        """the KL of D3 with five starts, at the same mean depth over the answers to each task. Starts are shares of the
        task's median answer, since in tokens they would have to follow the length of answers anyway. Then starts are
        chosen on half of the answers, for each task and for all tasks together, and judged on the other half.""",
        f"""it holds if the whole 95 % interval of what own starts save is above zero; it does not if the interval ends
        below {100 * tables.LEAST_SAVED:.0f} %; else it cannot be told.""",
        lambda f: {"a start of each task's own is better than one for all": tables.start_verdict(f)},
        tables.start_tables,
    ),
)
