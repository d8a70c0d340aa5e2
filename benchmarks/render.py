"""Writes the numbers of benchmarks/results/ into README.md and docs/results.md; a test checks that they are current.

python benchmarks/render.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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


def summary(result: dict[str, Any], calibrated: dict[str, Any]) -> list[str]:
    """The table of the README."""
    depth, start = result["depth"], result["start_up"]
    rows = []
    if "ratio" in result["llama_bench"]:
        bench = result["llama_bench"]
        rows.append(("full depth against llama.cpp's llama-bench, same file and threads", f"{bench['ratio']:.2f}x"))
    rows += [
        ("full depth against transformers `generate`, f32", f"{result['transformers']['ratio']:.1f}x"),
        ("20 of 30 layers from step 1 on, whole answer of 128 tokens", f"{depth['answers_of_128_speedup_at_20']:.2f}x"),
        ("load with tokenizer; first token of a 45-token prompt after that", f"{times(start)}"),
    ]
    for name, policy in deepest_first(calibrated):
        agreement = interval(policy["held_out"]["tapered steps"]["agreement"], 100, ".0f")
        what = f"policy `{name}`, answers of 128 tokens: speed; same likeliest token as full depth, held-out prompts"
        rows.append((what, f"{policy['speedup']['measured'][0]:.2f}x; {agreement} %"))
    return ["| default model on two CPU cores | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)]


def interval(estimate: list[float], factor: float, digits: str) -> str:
    """A figure with its 95 % interval."""
    value, low, high = (format(x * factor, digits) for x in estimate)
    return f"{value} ({low} to {high})"


# What is told of a policy, each from the summary of its calibration.
FIGURES: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("mean depth", lambda p: f"{p['mean_depth']:.1f}"),
    ("speed predicted", lambda p: f"{p['speedup']['predicted']:.2f}x"),
    ("speed measured", lambda p: f"{p['speedup']['measured'][0]:.2f}x"),
    ("KL to full depth, nats", lambda p: interval(p["held_out"]["tapered steps"]["kl"], 1, ".2f")),
    ("same likeliest token, %", lambda p: interval(p["held_out"]["tapered steps"]["agreement"], 100, ".0f")),
    ("NLL of full depth's answers, + %", lambda p: interval(p["held_out"]["tapered steps"]["nll_increase"], 1, ".0f")),
    ("own answers: NLL at full depth, nats", lambda p: interval(p["free_running"]["nll"]["policy"], 1, ".2f")),
    ("full depth's own answers: the same", lambda p: interval(p["free_running"]["nll"]["full"], 1, ".2f")),
    ("own answers: repeated 4-grams, %", lambda p: interval(p["free_running"]["repetition"]["policy"], 100, ".0f")),
    ("full depth's own answers: the same", lambda p: interval(p["free_running"]["repetition"]["full"], 100, ".0f")),
]


def deepest_first(calibrated: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The shipped policies by name."""
    return sorted(calibrated["policies"].items(), key=lambda item: -item[1]["mean_depth"])


def quality(calibrated: dict[str, Any]) -> list[str]:
    """What the shipped policies cost, and the order of layers beside others'."""
    lines = [
        "On held-out prompts, answers of up to 128 tokens, 95 % intervals; how: [calibration](calibration.md). Made by",
        "`python benchmarks/calibration.py --cache FOLDER policies orders growth` from the built-in prompts.",
        "",
        "| | " + " | ".join(f"`{name}`" for name, _ in deepest_first(calibrated)) + " |",
        "| --- |" + " --- |" * len(calibrated["policies"]),
    ]
    for what, cell in FIGURES:
        lines.append(f"| {what} | " + " | ".join(cell(p) for _, p in deepest_first(calibrated)) + " |")
    took = {name: p["seconds"] / 60 for name, p in calibrated["policies"].items()}
    first = calibrated["policies"]["fast"]
    lines += [
        "",
        "These three visibly change this small model's text. The NLL rises over steps that ran fewer layers. A larger",
        "model: [Qwen2.5-Coder-1.5B-Instruct](results/qwen2.5-coder-1.5b-instruct/README.md).",
        "",
        f"A whole calibration from an empty cache (`fast`) took {took['fast']:.1f} minutes and "
        f"{first['peak_mib_so_far']} MiB; then `balanced`, from "
        f"cached answers, {took['balanced']:.1f} and `gentle` {took['gentle']:.1f} minutes.",
    ]
    c = first["conditions"]
    lines.append(f"{c['date']}, {c['machine']}, {c['threads']} threads, Taper {c['taper']}, Python {c['python']}.")
    if "growth" in calibrated:
        growth = calibrated["growth"]
        sizes = ", ".join(f"{row['prompts']} prompts {row['seconds']:.0f} s" for row in growth["rows"])
        lines.append(
            "It grows in a straight line with the tokens of prompts and answers (answers of up to 24 tokens: "
            f"{sizes}; {growth['seconds_per_1000_tokens']:.0f} s per 1000 tokens, R² {growth['r_squared']:.3f}); "
            "above 72 prompts more slowly, as the search then has all it takes."
        )
    return lines + (orders(calibrated["orders"]) if "orders" in calibrated else [])


def orders(found: dict[str, Any]) -> list[str]:
    """KL by depth, a column a method."""
    methods = list(found["kl"])
    depths = list(found["kl"]["measured order"])
    lines = [
        "",
        "### Which layers: the measured order beside others'",
        "",
        "Mean KL to full depth, nats, at constant depth from step 1 on (SkipDecode: linear decay of that mean depth), "
        f"over {found['steps']} steps of {found['answers']} held-out answers; in brackets the 95 % interval "
        "of the paired difference to the measured order.",
        "",
        "| layers | " + " | ".join(methods) + " |",
        "| --- |" + " --- |" * len(methods),
    ]
    for depth in depths:
        cells = []
        for method in methods:
            text = f"{found['kl'][method][depth][0]:.2f}"
            above = found["kl_above_measured_order"].get(method, {}).get(depth)
            cells.append(text + (f" ({above[1]:+.2f} to {above[2]:+.2f})" if above else ""))
        lines.append(f"| {depth} | " + " | ".join(cells) + " |")
    lines += ["", "![Loss against mean depth, a line a method](results/frontier.png)"]
    lines += ["", "The picture is of `taper calibrate --speedup 1.2 --answer-tokens 128 --baselines --report report`."]
    unclear = [f"{name} at {', '.join(by_depth)}" for name, by_depth in found["not_clear_of_zero"].items()]
    lines += [
        "",
        "Differences whose interval is not clear of zero: " + ("; ".join(unclear) or "none") + ".",
        "",
        "So on this model the measured order beats early exit, SkipDecode, evenly spread and random layers by",
        "far, and is not told apart from ShortGPT's, nor at most depths from the middle first: KL has a heavy",
        "tail, a few answers carry much of it. ShortGPT's block influence was taken on the very answers",
        "compared here, the measured order on others. `first sketch` is the order that a sketch of this",
        "search found on other answers of the same model.",
    ]
    return lines


def model_page(found: dict[str, Any]) -> str:
    """The page of a model that was calibrated once."""
    model, prompts, c = found["model"], found["prompts"], found["conditions"]
    budget = ", ".join(f"{name} {value}" for name, value in found["budget"].items())
    verdict = "kept" if found["budget_met"] else "kept by no policy that was found, this is the nearest"
    lines = [
        f"# {model['name']}",
        "",
        f"Calibrated once, budget {budget}: {verdict}. [The report](report/index.html) has the pictures, `policy.json`",
        "the policy, `summary.json` every figure. Made by",
        "",
        f"    {found['command']}",
        "",
        "| | on held-out prompts, tapered steps, 95 % intervals |",
        "| --- | --- |",
        f"| layers | {model['num_hidden_layers']} |",
        *(f"| {what} | {cell(found)} |" for what, cell in FIGURES),
        f"| first layers to go | {' '.join(map(str, found['skip_order'][: found['searched_layers']]))} |",
        f"| KL on search prompts as they go | {' '.join(f'{kl:.2f}' for kl in kls(found))} |",
        "",
        f"{prompts['search']} prompts searched on, {prompts['held_out']} held out, answers of up to "
        f"{found['answer_tokens']} tokens. {c['date']}, Taper {c['taper']}, {c['machine']}, {c['threads']} thread(s), "
        f"weights as they are in the file (sha256 {model['sha256'][:16]}...), commit {found['commit']}.",
        "",
    ]
    return "\n".join(lines)


def kls(found: dict[str, Any]) -> list[float]:
    """Mean KL of the order found by how many layers are skipped, where it was measured on search prompts."""
    return list(found["frontier"]["kl"]["measured order"].values()) if found["frontier"]["prompts"] == "search" else []


def times(start: dict[str, Any]) -> str:
    """Load and first token."""
    return f"{start['load_with_tokenizer_s']:.2f} s; {start['first_token_s']:.2f} s"


def page(result: dict[str, Any], calibrated: dict[str, Any]) -> str:
    """docs/results.md."""
    depth, memory = result["depth"], result["memory"]
    table = [
        f"| {d} | {ms:.2f} | {depth['speedup'][d]:.2f}x | {depth['ideal_by_bytes'][d]:.2f}x |"
        for d, ms in depth["step_ms"].items()
    ]
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/render.py`. Speed comes from `benchmarks/results/decode.json`, made by",
        "`python benchmarks/decode.py --out benchmarks/results/decode.json`; quality from",
        "`benchmarks/results/calibration.json`.",
        "",
        *summary(result, calibrated),
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
        *quality(calibrated),
        "",
        "## Conditions",
        "",
        conditions(result["conditions"]),
        "",
    ]
    return "\n".join(lines)


def rendered() -> dict[Path, str]:
    """The files as they should be."""
    result, calibrated = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("decode", "calibration"))
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    block = "\n".join(summary(result, calibrated)) + "\n"
    pages = {
        ROOT / "docs" / "results.md": page(result, calibrated),
        readme: before + MARKS[0] + block + MARKS[1] + after,
    }
    for file in sorted((ROOT / "docs" / "results").glob("*/summary.json")):
        pages[file.with_name("README.md")] = model_page(json.loads(file.read_text()))
    return pages


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
