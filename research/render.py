"""Writes the numbers of research/results/ into README.md and docs; a test checks that they are current.

python research/render.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import render_bench
import render_claims
import render_formats
import render_harness
import render_methods
import render_quantise
import render_repack
import render_serve
import render_signals
import render_tasks
from pages import prose, table
from render_calibration import fewer_solved, model_page, quality, shipped

from taper.models.download import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
RESULTS, PAGES = ROOT / "research" / "results", ROOT / "research" / "pages"
LARGER = ("qwen2.5-coder-1.5b-instruct",)  # besides the default model
NUMBERS, PAPER, QUANTISING = (
    f"<!-- {name}: python research/render.py -->\n" for name in ("numbers", "paper", "quantising")
)
END = "<!-- end of numbers -->\n"


def summary(result: dict[str, Any], benches: dict[str, dict[str, Any]]) -> list[str]:
    """The tables of the README."""
    depth, start = result["depth"], result["start_up"]
    first_token = f"first token of a {start['prompt_tokens']}-token prompt, once loaded"
    times = [("loading the model and its tokenizer", start["load_with_tokenizer_s"])]
    times.append((first_token, start["first_token_s"]))
    lines = []
    for name, bench in benches.items():
        layers = bench["conditions"]["num_hidden_layers"]
        lines += [f"{name}, {layers} layers:", "", *render_bench.speeds(bench, shipped(name)), ""]
    return [
        *lines,
        prose(
            f"""
            Speed and depth are over outputs of {render_bench.TOKENS} tokens, one at a time; llama.cpp runs the same
            file with the same threads. *Same likeliest token* says how often, at the steps that run fewer layers,
            greedy decoding would choose the token that full depth chooses. It was measured on prompts that had no part
            in choosing the policies. For comparison, skipping 10 of the 30 layers of the default model at every step
            after the first makes such an output {depth["answers_of_128_speedup_at_20"]:.2f}x as fast. transformers'
            `generate` in f32 takes {result["transformers"]["ratio"]:.1f} times as long as Taper's full depth.
            """
        ),
        "",
        prose(fewer_solved(benches)),
        "",
        *table(("start of the default model", "time"), [(title, f"{seconds:.2f} s") for title, seconds in times]),
    ]


def page(
    result: dict[str, Any],
    benches: dict[str, dict[str, Any]],
    calibrated: dict[str, Any],
    quantised: dict[str, Any],
    formats: dict[str, Any],
) -> str:
    """docs/results.md."""
    depth, memory, start = result["depth"], result["memory"], result["start_up"]
    repacked, served, loaded = (_read_if_there(name) for name in ("repack", "serve_speed", "serve_load"))
    steps = [
        (d, f"{ms:.2f}", f"{depth['speedup'][d]:.2f}x", f"{depth['ideal_by_bytes'][d]:.2f}x")
        for d, ms in depth["step_ms"].items()
    ]
    used = [
        ("time of `taper --help`", f"{start['help_s']:.3f} s"),
        ("PyTorch is imported", "yes" if start["torch_imported"] else "no"),
        ("peak resident memory", f"{memory['peak_mib']} MiB"),
        ("the same after 50 different prompt lengths", f"{memory['peak_after_50_prompt_lengths_mib']} MiB"),
        ("the model file, which is mapped and so counts", f"{memory['file_mib']} MiB"),
        ("the key-value cache when it is full", f"{memory['kv_mib']} MiB"),
    ]
    lines = [
        "# Results",
        "",
        prose(
            """
            This page is written by `python research/render.py`, from the files in `research/results/`. Unless it
            says otherwise, figures are of the default model on two CPU cores. More pages are written in the same way:
            the [paper's claims, one by one](paper.md), the [published rules of skipping layers,
            compared](methods.md) on GSM8K and BBH, the [layers that GSM8K can spare](tasks.md), and the
            [figures that predict](signals.md) how well a task will go.
            """
        ),
        "",
        "## In short",
        "",
        *summary(result, benches),
        "",
        "The speeds of this table come from:",
        "",
        *(f"    {render_bench.command(bench)}" for bench in benches.values()),
        "",
        *(line for bench in benches.values() for line in (prose(render_bench.conditions(bench)), "")),
        "",
        "## One decode step by depth",
        "",
        "This and what follows, up to quality, comes from:",
        "",
        "    python research/decode.py --out research/results/decode.json",
        "",
        *table(("layers run", "ms", "speedup", "ideal by bytes read"), steps),
        "",
        prose(
            f"""
            The time is a straight line (R² {depth["r_squared"]:.4f}): {depth["ms_per_layer"]:.3f} ms for each layer,
            and {depth["fixed_ms_per_step"]:.2f} ms for the lm_head and everything else that is fixed. The realised
            fraction at depth 20, (speedup - 1) / (ideal - 1), is {depth["realised_fraction_at_20"]:.2f}. It is above
            1 because a q4_1 layer takes more time for each byte than the q8_0 lm_head, so bytes understate what a
            skipped layer saves.
            """
        ),
        "",
        "## Start and memory",
        "",
        *table(("figure", "value"), used),
        "",
        "## Quality",
        "",
        prose(
            """
            The kernels themselves cost little: Q4_1 decoding has a mean KL below 0.005 for each token, compared with
            the same weights in f32. With f32 weights, 64 greedy tokens equal those of transformers, both at full
            depth and tapered (`tests/test_default_model.py`).
            """
        ),
        "",
        *(gemma(measured) if (measured := _read_if_there("gemma")) else []),
        *quality(calibrated),
        "",
        *render_quantise.section(quantised),
        *render_formats.section(formats, _read_if_there("experts")),
        *(render_repack.section(repacked) if repacked else []),
        *render_serve.section(served, loaded),
        *render_harness.section(_read_if_there(f"harness-{DEFAULT_MODEL}")),
        "## Conditions",
        "",
        conditions(result["conditions"]),
        "",
    ]
    return "\n".join(lines)


def gemma(result: dict[str, Any]) -> list[str]:
    """The real weights of another family, beside transformers."""
    plain, exact, c = result["auto"], result["f32"], result["conditions"]
    equal = all(result[name]["equal"] for name in ("full", "tapered"))
    return [
        prose(
            f"""
            The same with the real weights of another family, Gemma 3 270M in Q4_K_M, by `research/gemma.py` on
            {c["date"]} at commit {c["commit"]}: against transformers, which dequantises the file to f32, the mean KL
            over {result["text_tokens"]} tokens of a text, longer than the windows of {result["window"]} tokens, is
            {plain["kl"]:.2g} nats, and {100 * plain["agreement"]:.0f} % of the likeliest tokens are the same. With
            `--dtype f32` it is {exact["kl"]:.0e}, {100 * exact["agreement"]:.0f} % are the same, and
            {result["full"]["tokens"]} greedy tokens at full depth and tapered {"are" if equal else "are not all"} the
            same.
            """
        ),
        "",
    ]


def conditions(c: dict[str, Any]) -> str:
    """The conditions of the speed measurements."""
    versions = [f"{name} {number}" for name, number in c["versions"].items()]
    return prose(
        f"""
        The speeds were measured on {c["date"]} at commit {c["commit"]}, on an {c["cpu"]} with {c["cores"]} cores and
        {c["threads"]} threads, with Python {c["python"]}, {", ".join(versions[:-1])} and {versions[-1]}. The model
        is {c["model"]}, with an {c["kv_cache"]} key-value cache, batch size {c["batch"]}, a prompt of
        {c["prompt_tokens"]} tokens and outputs of {c["answer_tokens"]}. There were {c["rounds"]} rounds, in which
        everything alternated. Figures are the {c["statistic"]}. The machine is shared, so read the ratios rather
        than the absolute times.
        """
    )


def fuzzed(report: dict[str, Any]) -> list[str]:
    """What became of the mutated files of each kind."""
    titles = {"gguf": "GGUF header", "safetensors": "safetensors", "policy": "policy"}
    columns = {"rejected": "refused", "loaded": "loaded", "generated": "ran", "output not a number": "not a number"}
    rows = [
        (titles.get(kind, f"`{kind}.json`"), *(f"{counts.get(column, 0):,}" for column in columns.values()))
        for kind, counts in report["counts"].items()
    ]
    return [
        prose(
            f"""
            `{report["command"]}` changes files at random, {report["count"]:,} times for each kind: bytes, and the
            structure of JSON. GGUF headers and `config.json` are of every family of models. Each file must be rejected
            in one line, or load and then generate greedily and sampled.
            On {report["date"]}, {len(report["failures"])} of {report["count"] * len(rows):,} failed:
            """
        ),
        "",
        *table(("file", *columns), rows),
    ]


def between_marks(text: str, lines: Sequence[str], mark: str = NUMBERS) -> str:
    """A page with these lines between a mark and the next end."""
    before, rest = text.split(mark)
    _, end, after = rest.partition(END)
    return "".join((before, mark, *(f"{line}\n" for line in lines), end, after))


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def _read_if_there(name: str) -> dict[str, Any] | None:
    return _read(name) if (RESULTS / f"{name}.json").exists() else None


def rendered() -> dict[Path, str]:
    """The files as they should be."""
    names = ("decode", f"calibration-{DEFAULT_MODEL}", "quantise", "formats", "fuzz")
    result, calibrated, quantised, formats, report = (_read(name) for name in names)
    benches = {name: _read(f"bench-{name}") for name in (DEFAULT_MODEL, *LARGER)}
    readme, reliability = ROOT / "README.md", ROOT / "docs" / "reliability.md"
    text = between_marks(readme.read_text(), summary(result, benches))
    text = between_marks(text, render_claims.in_short(_read(f"claims-{LARGER[0]}")), PAPER)
    written = {
        PAGES / "results.md": page(result, benches, calibrated, quantised, formats),
        readme: between_marks(text, render_quantise.adding_up(quantised), QUANTISING),
        reliability: between_marks(reliability.read_text(), fuzzed(report)),
    }
    for model in LARGER:
        written[PAGES / model / "README.md"] = model_page(model, _read(f"calibration-{model}"))
    for pages in (render_methods.pages, render_claims.pages, render_signals.pages, render_tasks.pages):
        written |= pages(RESULTS, PAGES)
    return written


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
    render_methods.draw_all(RESULTS, PAGES)
