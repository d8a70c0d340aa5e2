"""Writes the numbers of benchmarks/results/ into README.md and docs/results.md; a test checks that they are current.

python benchmarks/render.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decode.json"
MARKS = ("<!-- numbers: python benchmarks/render.py -->\n", "<!-- end of numbers -->\n")


def conditions(c: dict[str, Any]) -> str:
    """The conditions, one sentence each."""
    versions = ", ".join(f"{name} {number}" for name, number in c["versions"].items())
    return (
        f"{c['date']}, commit {c['commit']}. {c['cpu']}, {c['cores']} cores, {c['threads']} threads, "
        f"Python {c['python']}; "
        f"{versions}. Model {c['model']}, key-value cache {c['kv_cache']}, batch {c['batch']}, "
        f"prompt {c['prompt_tokens']} tokens, answers of {c['answer_tokens']}. {c['rounds']} rounds, everything "
        f"alternated; {c['statistic']}. These machines are shared: read the ratios, not the absolute times."
    )


def summary(result: dict[str, Any]) -> list[str]:
    """The table of the README."""
    depth, start = result["depth"], result["start_up"]
    shipped = depth["answers_of_128_speedup_of_shipped_policies"]
    rows = []
    if "ratio" in result["llama_bench"]:
        bench = result["llama_bench"]
        rows.append(("full depth against llama.cpp's llama-bench, same file and threads", f"{bench['ratio']:.2f}x"))
    rows += [
        ("full depth against transformers `generate`, f32", f"{result['transformers']['ratio']:.1f}x"),
        ("20 of 30 layers from step 1 on, whole answer of 128 tokens", f"{depth['answers_of_128_speedup_at_20']:.2f}x"),
        *((f"policy `{name}`, whole answer of 128 tokens", f"{ratio:.2f}x") for name, ratio in shipped.items()),
        ("load with tokenizer; first token of a 45-token prompt after that", f"{times(start)}"),
    ]
    return ["| default model on two CPU cores | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)]


def times(start: dict[str, Any]) -> str:
    """Load and first token."""
    return f"{start['load_with_tokenizer_s']:.2f} s; {start['first_token_s']:.2f} s"


def page(result: dict[str, Any]) -> str:
    """docs/results.md."""
    depth, memory = result["depth"], result["memory"]
    table = [
        f"| {d} | {ms:.2f} | {depth['speedup'][d]:.2f}x | {depth['ideal_by_bytes'][d]:.2f}x |"
        for d, ms in depth["step_ms"].items()
    ]
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/render.py` from `benchmarks/results/decode.json`, which comes from",
        "`python benchmarks/decode.py --out benchmarks/results/decode.json`.",
        "",
        *summary(result),
        "",
        "## One decode step by depth",
        "",
        "| layers run | ms | speedup | ideal by bytes read |",
        "| --- | --- | --- | --- |",
        *table,
        "",
        f"A straight line: {depth['ms_per_layer']:.3f} ms a layer and {depth['fixed_ms_per_step']:.2f} ms a step "
        f"besides (lm_head and everything fixed), R² {depth['r_squared']:.4f}. Realised fraction at depth 20: "
        f"{depth['realised_fraction_at_20']:.2f}. It is above 1 because a q4_1 layer takes more time per byte than the "
        "q8_0 lm_head, so bytes understate what a skipped layer saves.",
        "",
        "## Start and memory",
        "",
        f"`taper --help` {result['start_up']['help_s']:.3f} s. PyTorch imported on the CPU path: "
        f"{'yes' if result['start_up']['torch_imported'] else 'no'}. Peak resident memory {memory['peak_mib']} MiB, "
        f"{memory['peak_after_50_prompt_lengths_mib']} MiB after 50 different prompt lengths, with a file of "
        f"{memory['file_mib']} MiB (mapped, so counted) and a cache of {memory['kv_mib']} MiB.",
        "",
        "## Quality",
        "",
        "The kernels: against the same weights in f32, Q4_1 decoding has a mean KL below 0.005 per token; with f32",
        "weights 64 greedy tokens equal transformers', at full depth and tapered (`tests/test_default_model.py`).",
        "",
        "The policies: `gentle`, `balanced` and `fast` visibly change this small model's text. Their quality is not",
        "yet calibrated, so no figure is given here.",
        "",
        "## Conditions",
        "",
        conditions(result["conditions"]),
        "",
    ]
    return "\n".join(lines)


def rendered() -> dict[Path, str]:
    """The files as they should be."""
    result = json.loads(RESULTS.read_text())
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    block = "\n".join(summary(result)) + "\n"
    return {ROOT / "docs" / "results.md": page(result), readme: before + MARKS[0] + block + MARKS[1] + after}


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
