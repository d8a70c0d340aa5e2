"""docs/results/tasks.md, from research/results/task_calibration-*.json; `render.py` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import measured, prose, table

from taper.calibration.statistics import Estimate, PairedComparison
from taper.calibration.summary import interval

Json = dict[str, Any]


def pages(results: Path, docs: Path) -> dict[Path, str]:
    """The page, if there are results of a model."""
    models = [json.loads(path.read_text()) for path in sorted(results.glob("task_calibration-*.json"))]
    if not models:
        return {}
    lines = [
        "# Layers that a task can spare",
        "",
        prose(
            """
            This page is written by `python research/render.py` from `research/results/task_calibration-*.json`. It
            shows what `taper calibrate --task TASK` tried: one layer after another is skipped at every step after the
            first, until the accuracy can no longer be shown to stay within the margin.
            [Calibration](../../docs/calibration.md)
            says how layers are chosen and when it stops looking. Speeds are predicted from the time of a step at each
            depth. Brackets hold 95 % intervals.
            """
        ),
        "",
    ]
    for model in models:
        lines += _model(model)
    return {docs / "tasks.md": "\n".join(lines)}


def _model(result: Json) -> list[str]:
    """The section of a model and task."""
    s, rows = result["settings"], []
    for trial in result["trials"]:
        measures = {name: Estimate(*trial["comparison"][name]) for name in ("full", "tapered", "difference")}
        found = PairedComparison(**trial["comparison"] | measures)
        figures = [interval(measure, 100, digits=1) for measure in measures.values()]
        skipped = " ".join(map(str, trial["skipped"]))
        speed = f"{trial['speedup']:.2f}x"
        rows.append((skipped, speed, str(found.problems), *figures, found.conclusion))
    kept = result["policy"]
    outcome = (
        "No policy was shown to hold."
        if kept is None
        else f"The policy that is kept skips {len(kept['skip_order'])} of {kept['num_hidden_layers']} layers."
    )
    part = "" if s["split"] is None else f" of the {s['split']} split"
    header = ("layers skipped", "speed", "problems", "full depth, %", "solved, %", "difference, points", "verdict")
    return [
        f"## {s['model']['name'].removesuffix('.gguf')}, {s['task']}, within {100 * s['margin']:g} points",
        "",
        *table(header, rows),
        "",
        prose(
            f"""
            {outcome} Layers were chosen on {s["problems"]["search"]} problems{part}, and policies compared on up to
            {s["problems"]["validation"]} others. Measured {measured(s["conditions"])}:
            """
        ),
        "",
        f"    {_command(s)}",
        "",
    ]


def _command(s: Json) -> str:
    """The line that measures it again."""
    asked, own = s["asked"], s["split"] is None
    options = {
        "model": s["model"]["name"],
        "task": f"{s['task']}.jsonl" if own else s["task"],
        "data-dir": None if own else "DATA",
        "split": s["split"],
        "fewshot": s["fewshot"],
        "max-tokens": asked["max_tokens"],
        "filter": s["figure"],
        "margin": s["margin"],
        "problems": s["problems"]["validation"],
        "seed": asked["seed"],
        "threads": s["conditions"]["threads"],
    }
    words = " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)
    return f"taper calibrate {words}{' --chat' if asked['chat'] else ''} --json > FILE"
