"""The results of a benchmark as a picture: speed by output length and policy, and the time of a step by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture as a .png or .svg file, as the name says."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    outputs, depths = figure.subplots(1, 2)
    phases = [phase for phase in result["phases"].values() if "output_tokens" in phase]
    for policy in result["conditions"]["policies"]:
        speeds = [row["tokens_per_s"] for phase in phases for row in phase["rows"] if row["policy"] == policy]
        outputs.plot([phase["output_tokens"] for phase in phases], speeds, marker="o", label=policy)
    outputs.set(xlabel="output, tokens", ylabel="tokens per second", ylim=(0, None), title="Speed")
    if phases:
        outputs.set_xscale("log", base=2)
        outputs.legend()
    if step := result["phases"].get("depth"):
        layers = [row["depth"] for row in step["rows"]]
        depths.plot(layers, [row["step_ms"] for row in step["rows"]], "o", label="measured")
        ends = [0, max(layers)]
        line = [step["fixed_ms"] + step["ms_per_layer"] * depth for depth in ends]
        depths.plot(ends, line, label="straight line")
        full = step["rows"][0]["step_ms"]
        depths.plot(layers, [full / row["ideal_speedup"] for row in step["rows"]], "--", label="ideal by bytes")
        depths.legend()
    depths.set(xlabel="layers run", ylabel="ms", ylim=(0, None), title="One decode step")
    figure.suptitle(result["conditions"]["model"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
