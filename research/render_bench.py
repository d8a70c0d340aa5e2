"""Tables of what `taper bench` measured beside llama.cpp, for README.md; `render.py` puts them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages import table
from render_calibration import tapered

from taper.calibration.summary import interval

LLAMA = "llama.cpp"
TOKENS = 128


def speeds(result: dict[str, Any], policies: Mapping[str, Any]) -> list[str]:
    """Tokens per second of llama.cpp, of full depth, and of each policy with what it costs."""
    layers = result["conditions"]["num_hidden_layers"]
    rows = {row["name"].removeprefix("Taper, "): row for row in result["phases"][f"peers at {TOKENS}"]["rows"]}
    lines = [(LLAMA, str(layers), f"{rows[LLAMA]['tokens_per_s']:.1f}", "1x", "", "")]
    for name, row in rows.items():
        if "over" in row:
            figures = policies.get(name)
            title = f"Taper, `{name}`" if figures else "Taper, full depth"
            depth = f"{figures.mean_depth:.1f}" if figures else str(layers)
            cost = _cost(figures) if figures else ("", _solved_at_full_depth(policies))
            lines.append((title, depth, f"{row['tokens_per_s']:.1f}", f"{row['over'][LLAMA]:.2f}x", *cost))
    header = ("", f"mean depth of {layers}", "tokens/s", "over llama.cpp", "same likeliest token, %")
    if all(figures.problems is None for figures in policies.values()):
        return table(header, [line[: len(header)] for line in lines])
    return table((*header, "word problems solved, %"), lines)


def command(result: dict[str, Any]) -> str:
    """How a model was measured."""
    c, rows = result["conditions"], result["phases"][f"peers at {TOKENS}"]["rows"]
    rounds = max(row["rounds"] for row in rows)
    measured = f"--lengths {TOKENS} --prompts {TOKENS} --rounds {rounds} --threads {c['threads']} --minutes 60"
    return (
        f"taper bench --model {c['model']} {measured} --llama-bin DIR --json research/results/bench-{c['model']}.json"
    )


def conditions(result: dict[str, Any]) -> str:
    """The conditions of a model's figures."""
    c = result["conditions"]
    return f"""
        {c["model"]} was measured on {c["date"]} on an {c["machine"]}, with {c["threads"]}
        threads, Taper {c["versions"]["taper-llm"]}, ggml-python {c["versions"]["ggml-python"]} and Python
        {c["versions"]["python"]}: {c["statistic"]}. llama.cpp is built on the same version of ggml.
    """


def _cost(figures: Any) -> tuple[str, str]:
    """Over tapered steps, how often the likeliest token is that of full depth; and the problems that are solved."""
    solved = figures.problems and figures.problems.policy
    return interval(tapered(figures).agreement, 100, digits=0), interval(solved, 100, digits=0)


def _solved_at_full_depth(policies: Mapping[str, Any]) -> str:
    """The same figure in every policy's provenance, as the problems are the same."""
    solved = next(iter(policies.values())).problems
    return interval(solved and solved.full, 100, digits=0)
