"""Tables of what `taper bench` measured beside llama.cpp, for README.md; `render.py` puts them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages import table

from taper.calibration.summary import Figures

LLAMA = "llama.cpp"
TOKENS = 128


def speeds(result: dict[str, Any], policies: Mapping[str, Figures]) -> list[str]:
    """Tokens per second of llama.cpp, of full depth, and of each policy with what it costs."""
    layers = result["conditions"]["num_hidden_layers"]
    rows = {row["name"].removeprefix("Taper, "): row for row in result["phases"][f"peers at {TOKENS}"]["rows"]}
    lines = [(LLAMA, str(layers), f"{rows[LLAMA]['tokens_per_s']:.1f}", "1x", "", "")]
    for name, row in rows.items():
        if "over" in row:
            figures = policies.get(name)
            title = f"Taper, `{name}`" if figures else "Taper, full depth"
            depth = f"{figures.mean_depth:.1f}" if figures else str(layers)
            cost = _same_token(figures) if figures else ("", "")
            lines.append((title, depth, f"{row['tokens_per_s']:.1f}", f"{row['over'][LLAMA]:.2f}x", *cost))
    header = ("", f"mean depth of {layers}", "tokens/s", "over llama.cpp", "same likeliest token", "95 % interval")
    return table(header, lines)


def command(model: str) -> str:
    """How a model was measured."""
    out = f"benchmarks/results/bench-{model}.json"
    rest = f"--lengths {TOKENS} --prompts {TOKENS} --rounds 7 --minutes 60 --llama-bin DIR --json {out}"
    return f"taper bench --model {model} {rest}"


def conditions(result: dict[str, Any]) -> str:
    """The conditions of a model's figures."""
    c = result["conditions"]
    return f"""
        {c["model"]} was measured on {c["date"]} on an {c["machine"]}, with {c["threads"]}
        threads, Taper {c["versions"]["taper-llm"]}, ggml-python {c["versions"]["ggml-python"]} and Python
        {c["versions"]["python"]}: {c["statistic"]}. llama.cpp is built on the same version of ggml.
    """


def _same_token(figures: Figures) -> tuple[str, str]:
    """How often the likeliest token is that of full depth, over tapered steps, and the interval."""
    assert figures.held_out.tapered_steps is not None
    value, low, high = (f"{100 * share:.0f}" for share in figures.held_out.tapered_steps.agreement)
    return f"{value} %", f"{low} to {high} %"
