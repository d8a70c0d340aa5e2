"""Writes the numbers of results/vllm_speed.json and scale.json into docs/vllm.md and pages/fleets.md; a test checks it.

python research/render_vllm.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VLLM_PAGE, SCALE_PAGE = ROOT / "docs" / "vllm.md", ROOT / "research" / "pages" / "fleets.md"
RESULTS = ROOT / "research" / "results"
KINDS = {"measured": "measured costs", "memory-bound": "memory-bound limit"}


def speed_table(speed: dict[str, Any]) -> str:
    """The measured speed and its conditions."""
    c = speed["conditions"]
    rows = [
        "| rows | engine | ms a step | against stock eager | ratio to ideal | realised fraction |",
        "| - | - | - | - | - | - |",
    ]
    for batch, runs in speed["batches"].items():
        for name, run in runs.items():
            if isinstance(run, dict):
                label = (
                    f"tapered, {c['mean_depth']} of {c['num_hidden_layers']} layers, {name}" if "ratio" in run else name
                )
                ratio = f"{run['ratio']:.2f} | {run['realised_fraction']:.2f}" if "ratio" in run else " | "
                rows.append(f"| {batch} | {label} | {run['ms']:.1f} | {run['speedup']:.2f}x | {ratio} |")
    ideal = next(iter(speed["batches"].values()))["ideal_speedup"]
    mixed = next(run for runs in speed["batches"].values() for name, run in runs.items() if name == "mixed depths")
    versions = ", ".join(f"{name} {number}" for name, number in c["versions"].items())
    rows += [
        "",
        f"Ideal: {ideal:.2f}x, by bytes and by multiplications alike (layers and lm_head). Ratio = speedup / ideal; "
        "realised fraction = (speedup - 1) / (ideal - 1).",
        f"Mixed depths could reach {mixed['ideal_with_rows_as_measured']:.2f}x if gathering were free: each layer at "
        "the [measured cost](../research/pages/fleets.md) of the rows it has.",
        "",
        f"{c['date']}, commit {c['commit']}. {c['cpu']}, {c['cores']} cores, {c['threads']} thread, {versions}. "
        f"{c['model']}, {c['dtype']}, prompts of {c['prompt_tokens']} tokens, {c['steps']} steps of each engine in "
        f"turn; {c['statistic']}. `python research/vllm_speed.py`",
    ]
    return "\n".join(rows)


def costs_table(speed: dict[str, Any]) -> str:
    """What a layer costs, by its rows."""
    rows = ["| rows | ms a layer | ms a step besides |", "| - | - | - |"]
    rows += [f"| {n} | {cost['layer_ms']:.2f} | {cost['fixed_ms']:.1f} |" for n, cost in speed["costs"].items()]
    return "\n".join(rows)


def scale_table(scale: dict[str, Any], part: str, heading: str, pick: str | None = None) -> str:
    """One part of the simulation, for both machines and both policies."""
    first = scale["measured"]["decaying"][part]
    rows = [f"| {heading} | " + " | ".join(first) + " |", "| - |" + " - |" * len(first)]
    for machine, label in KINDS.items():
        for kind in ("decaying", "constant"):
            values = scale[machine][kind][part].values()
            cells = [f"{value[pick] if pick else value:.2f}x" for value in values]
            rows.append(f"| {label}, {kind} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def ages_table(scale: dict[str, Any]) -> str:
    """Engines by age, for both machines."""
    rows = ["| | engines by age |", "| - | - |"]
    for machine, label in KINDS.items():
        rows.append(f"| {label}, decaying | {scale[machine]['decaying']['engines_by_age']:.2f}x |")
    return "\n".join(rows)


def scale_conditions(scale: dict[str, Any]) -> str:
    """What the simulation assumes."""
    c = scale["conditions"]
    policies = "; ".join(f"{kind}: {label}" for kind, label in c["policies"].items())
    return (
        f"Costs from `{c['costs']['from']}` ({c['costs']['cpu']}). "
        f"Lengths of completions: {c['completion_lengths']}; prompts of {c['prompt_tokens']} tokens run in the same "
        f"steps; {c['steps']} steps. Policies: {policies}. Waves, tensor and pipeline parallel at "
        f"{c['batch_of_parallel_and_waves']} rows; a split layer's all-reduces are assumed to take "
        f"{c['communication']:.0%} of its time on one rank. `python research/scale.py`"
    )


def rendered() -> dict[Path, str]:
    """The pages as they should be."""
    speed = json.loads((RESULTS / "vllm_speed.json").read_text())
    scale = json.loads((RESULTS / "scale.json").read_text())
    scale_parts = {
        "costs": costs_table(speed),
        "batch": scale_table(scale, "batch", "rows"),
        "waves": scale_table(scale, "waves", "steps between waves"),
        "engines by age": ages_table(scale),
        "tensor": scale_table(scale, "tensor_parallel", "ranks"),
        "pipeline even": scale_table(scale, "pipeline", "stages, even split", "even"),
        "pipeline best": scale_table(scale, "pipeline", "stages, best split", "best_split"),
        "conditions": scale_conditions(scale),
    }
    return {VLLM_PAGE: filled(VLLM_PAGE, {"speed": speed_table(speed)}), SCALE_PAGE: filled(SCALE_PAGE, scale_parts)}


def filled(page: Path, parts: dict[str, str]) -> str:
    """A page with these parts between their marks."""
    text = page.read_text()
    for name, part in parts.items():
        start, end = f"<!-- numbers: {name} -->\n", "<!-- end of numbers -->\n"
        before, rest = text.split(start)
        text = before + start + part + "\n" + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
