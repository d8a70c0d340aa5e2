"""The tables of research/results/harness-*.json, for docs/results.md; `render.py` puts them there."""

from __future__ import annotations

from typing import Any

from pages import measured, prose, table

from taper.calibration.statistics import Estimate
from taper.calibration.summary import interval

Json = dict[str, Any]
_NAMES = {
    ("hf", "f32"): "the harness's class for transformers, f32",
    ("taper", "f32"): "`taper`, f32",
    ("taper", "auto"): "`taper`, weights as they are in the file",
}


def section(result: Json | None) -> list[str]:
    """The section of docs/results.md; it has what was measured."""
    parts = {"equality": _equality, "batching": _batching}
    lines = [line for name, part in parts.items() if result and name in result for line in part(result[name])]
    return ["## Evaluation", "", *lines] if lines else []


def _equality(f: Json) -> list[str]:
    rows = [
        (
            _NAMES[row["model"], row["dtype"]],
            interval(Estimate(*row["solved"]), 100, digits=1),
            *(str(row[key]) if key in row else "" for key in ("identical", "scored_alike")),
        )
        for row in f["rows"]
    ]
    return [
        prose(
            f"""
            `taper eval` at full depth beside lm-evaluation-harness's own class, on the first {f["problems"]} problems
            of GSM8K, asked in a chat without examples, with outputs of up to {f["conditions"]["max_tokens"]} tokens in
            batches of {f["batch"]}. The class is given Taper's tokenizer, as transformers makes one of this file that
            does not split digits. In f32 the same text is expected, but for near ties: sums are added up in another
            order. Brackets hold 95 % intervals.
            """
        ),
        "",
        "    python research/harness.py --data-dir DATA equality",
        "",
        *table(("model class", "solved, %", f"same text, of {f['problems']}", "scored alike"), rows),
        "",
        prose(f"Measured {measured(f['conditions'])}."),
        "",
    ]


def _batching(f: Json) -> list[str]:
    size = str(f["batch"])
    rows = [
        (title, f"{f['seconds'][key]:.0f}", f"{60 * f['problems'] / f['seconds'][key]:.1f}", f"{f['tokens'][key]:,}")
        for key, title in (("1", "one by one"), (size, f"{size} at a time"))
    ]
    return [
        prose(
            f"""
            {f["problems"]} problems of GSM8K, asked in the same way, are answered
            {interval(Estimate(*f["speedup"]), unit="x", digits=2)} as fast in batches as one by one: the median of
            {f["rounds"]} rounds in which both took turns, with the slowest and the fastest. {f["identical"]} of
            {f["problems"]} texts are the same; kernels for more rows round in other places.
            """
        ),
        "",
        "    python research/harness.py --data-dir DATA batching",
        "",
        *table(("outputs", "seconds", "problems a minute", "tokens written"), rows),
        "",
        prose(f"Measured {measured(f['conditions'])}."),
        "",
    ]
