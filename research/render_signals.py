"""docs/results/signals.md, from research/results/task_signals-*.json; `render.py` writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import prose, table

from taper.calibration.statistics import Estimate
from taper.calibration.summary import interval

Json = dict[str, Any]
FULL = "full"


def pages(results: Path, docs: Path) -> dict[Path, str]:
    """The page, if there are results of a model."""
    models = [json.loads(path.read_text()) for path in sorted(results.glob("task_signals-*.json"))]
    if not models:
        return {}
    lines = [
        "# Which figure tells how a task will go?",
        "",
        prose(
            """
            This page is written by `python research/render.py` from `research/results/task_signals-*.json`. It asks
            which cheap figure tells how many problems of a task a model solves without some layers. Each set of layers
            is skipped at every step after the first. Its accuracy is measured on some problems, and every signal on
            others. `own` signals are of the outputs that the model writes without these layers; `replay` signals are of
            full depth's outputs, replayed without them. NLL is the negative log-likelihood under full depth. The task
            `words` is problems of one step, of the kind that `research/word_problems.py` writes.
            """
        ),
        "",
        prose(
            f"""
            A signal is good if its correlation with the accuracy, over the sets, is far from zero. Tables are sorted by
            Spearman's. Brackets hold 95 % intervals, from resampling sets; with so few sets they are wide, and signals
            whose intervals overlap cannot be told apart. Replay looks over {_WORST}.
            """
        ),
        "",
    ]
    if len(models) > 1:
        lines += _overall(models)
    for model in models:
        lines += _model(model)
    return {docs / "signals.md": "\n".join(lines)}


_WORST = "all steps, over the fifth of them that is worst, over the worst fifth of the outputs, and over digits alone"


def _overall(models: Sequence[Json]) -> list[str]:
    """The section of all models: a signal that is good has the same sign on each of them."""
    by_signal = {
        name: [model["correlation"][name]["spearman"][0] for model in models]
        for name in models[0]["correlation"]
        if all(_differs(model["correlation"][name]) for model in models)
    }
    found = sorted(by_signal.items(), key=lambda item: -abs(sum(item[1])))
    rows = [(name, f"{sum(each) / len(each):.2f}", *(f"{value:.2f}" for value in each)) for name, each in found]
    return [
        "## All models",
        "",
        prose(
            """
            Spearman's correlation with the accuracy, and its mean over the models. The signals of the first rows cannot
            be told apart, as the intervals below show. One that changes its sign from model to model says nothing about
            the next model.
            """
        ),
        "",
        *table(("signal", "mean", *(_title(model["conditions"]) for model in models)), rows),
        "",
    ]


def _model(result: Json) -> list[str]:
    """The section of a model and task."""
    c, sets = result["conditions"], {name: row for name, row in result["sets"].items() if name != FULL}
    found = sorted(result["correlation"].items(), key=lambda item: -abs(item[1]["spearman"][0]))
    signals = [
        (name, *(interval(Estimate(*figures[kind]), digits=2) for kind in ("spearman", "pearson")))
        for name, figures in found
        if _differs(figures)
    ]
    accuracies = [
        (name, f"{100 * row['accuracy']:.0f}", f"{100 * row['own: solved']:.0f}", _kl(row))
        for name, row in sorted(sets.items(), key=lambda item: -item[1]["accuracy"])
    ]
    full = result["sets"][FULL]
    accuracies.insert(0, ("none", f"{100 * full['accuracy']:.0f}", f"{100 * full['own: solved']:.0f}", ""))
    return [
        f"## {_title(c)}",
        "",
        "Made by",
        "",
        f"    {_command(c, list(sets))}",
        "",
        prose(
            f"""
            on {c["date"]} at commit {c["commit"]}, on an {c["cpu"]} with {c["cores"]} cores, --threads {c["threads"]}:
            {len(sets)} sets of layers, signals on {c["signal_problems"]} problems, the accuracy on {c["problems"]}
            others, outputs of up to {c["max_tokens"]} tokens.
            """
        ),
        "",
        *table(("signal", "Spearman", "Pearson"), signals),
        "",
        *table(("layers skipped", "solved, %", "own: solved, %", "replay: KL, nats"), accuracies),
        "",
    ]


def _differs(figures: Json) -> bool:
    """Whether a signal differs between the sets; one that is the same for all says nothing."""
    return any(figures["spearman"])


def _title(c: Json) -> str:
    return f"{c['model'].removesuffix('.gguf')}, {c['task']}"


def _kl(row: Json) -> str:
    return f"{row['replay: KL']:.2f}"


def _command(c: Json, sets: Sequence[str]) -> str:
    """The line that measures it again."""
    task = f"{c['task']}.jsonl" if c["version"] == "own" else f"{c['task']} --data-dir DATA"
    numbers = f"--signal-problems {c['signal_problems']} --problems {c['problems']} --max-tokens {c['max_tokens']}"
    return (
        f"python research/task_signals.py --model {c['model']} --task {task} --sets '{', '.join(sets)}' {numbers} "
        "--records FOLDER/records.jsonl --out FILE"
    )
