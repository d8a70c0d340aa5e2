"""Writes the numbers of benchmarks/results/ into README.md and docs; a test checks that they are current.

python benchmarks/render.py
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import render_claims
import render_methods
import render_quantise

from taper.calibration.statistics import Estimate, LossEstimate
from taper.calibration.summary import MEASURED_ORDER, Comparison, Figures, Summary, from_plain
from taper.calibration.wording import interval, limits, verdict

ROOT = Path(__file__).parent.parent
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
NUMBERS, QUANTISING = (f"<!-- {name}: python benchmarks/render.py -->\n" for name in ("numbers", "quantising"))
END = "<!-- end of numbers -->\n"


def prose(text: str) -> str:
    """A paragraph, in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, one figure in a cell."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def summary(result: dict[str, Any], calibrated: dict[str, Any]) -> list[str]:
    """The tables of the README."""
    depth, start, tokens = result["depth"], result["start_up"], result["conditions"]["answer_tokens"]
    policies = []
    for name, policy in deepest_first(calibrated):
        value, low, high = (f"{100 * share:.0f}" for share in tapered(policy).agreement)
        policies.append((f"`{name}`", f"{policy.mean_depth:.1f}", speed(policy), f"{value} %", f"{low} to {high} %"))
    ratios = [("transformers `generate` in f32", f"{result['transformers']['ratio']:.1f}x")]
    if "ratio" in result["llama_bench"]:
        ratios.insert(0, ("llama.cpp's llama-bench, same file and threads", f"{result['llama_bench']['ratio']:.2f}x"))
    first_token = f"first token of a {start['prompt_tokens']}-token prompt, once loaded"
    times = [("loading the model and its tokenizer", start["load_with_tokenizer_s"])]
    times.append((first_token, start["first_token_s"]))
    return [
        *table(("policy", "mean depth of 30", "speed", "same likeliest token", "95 % interval"), policies),
        "",
        prose(
            f"""
            Depth and speed are over outputs of {tokens} tokens; full depth is 1x. *Same likeliest token* says how
            often, at the steps that run fewer layers, greedy decoding would choose the token that full depth
            chooses. It was measured on prompts that had no part in choosing the policies. For comparison, skipping
            10 of the 30 layers at every step after the first makes such an output
            {depth["answers_of_128_speedup_at_20"]:.2f}x as fast.
            """
        ),
        "",
        *table(("full depth, compared with", "speed"), ratios),
        "",
        *table(("start", "time"), [(title, f"{seconds:.2f} s") for title, seconds in times]),
    ]


def tapered(figures: Figures) -> LossEstimate:
    """The loss over tapered steps, which every published policy has."""
    assert figures.held_out.tapered_steps is not None
    return figures.held_out.tapered_steps


def speed(figures: Figures) -> str:
    """The measured speed, times that of full depth."""
    return f"{figures.speedup.measured.median:.2f}x"


def deepest_first(calibrated: dict[str, Any]) -> list[tuple[str, Figures]]:
    """The shipped policies by name."""
    policies = {name: Figures.from_json(data) for name, data in calibrated["policies"].items()}
    return sorted(policies.items(), key=lambda item: -item[1].mean_depth)


# What is told of a policy, and what it means.
FIGURES: list[tuple[str, Callable[[Figures], str]]] = [
    ("mean depth", lambda p: f"{p.mean_depth:.1f}"),
    ("speed, predicted", lambda p: f"{p.speedup.predicted:.2f}x"),
    ("speed, measured", speed),
    ("KL to full depth, nats", lambda p: interval(tapered(p).kl, digits=2)),
    ("same likeliest token as full depth, %", lambda p: interval(tapered(p).agreement, 100, digits=0)),
    ("rise in NLL of full depth's outputs, %", lambda p: interval(tapered(p).nll_increase, digits=0)),
    ("NLL of the policy's own outputs, nats", lambda p: interval(p.free_running.nll.policy, digits=2)),
    ("NLL of full depth's own outputs, nats", lambda p: interval(p.free_running.nll.full, digits=2)),
    ("repeated 4-grams, policy, %", lambda p: interval(p.free_running.repetition.policy, 100, digits=0)),
    ("repeated 4-grams, full depth, %", lambda p: interval(p.free_running.repetition.full, 100, digits=0)),
]
LEGEND = prose(
    """
    KL, likeliest token and rise in NLL compare the policy with full depth at the steps that run fewer layers, on
    outputs that full depth wrote. The last four rows are about outputs that the policy and full depth wrote freely: how
    unlikely the full model finds them, and how much they repeat themselves. Brackets hold 95 % intervals.
    """
)


def quality(calibrated: dict[str, Any]) -> list[str]:
    """What the shipped policies cost, what calibration takes, and the order of layers beside others'."""
    policies, first = deepest_first(calibrated), calibrated["policies"]["fast"]
    minutes = {name: f"{data['seconds'] / 60:.1f}" for name, data in calibrated["policies"].items()}
    c = first["conditions"]
    lines = [
        prose(
            """
            These figures are from held-out prompts, with outputs of up to 128 tokens; [calibration](calibration.md)
            explains how they are measured. They come from the built-in prompts and this command:
            """
        ),
        "",
        "    python benchmarks/calibration.py --cache FOLDER policies orders growth",
        "",
        *table(
            ("figure", *(f"`{name}`" for name, _ in policies)),
            [(title, *(cell(policy) for _, policy in policies)) for title, cell in FIGURES],
        ),
        "",
        LEGEND,
        "",
        prose(
            """
            All three policies visibly change the text of this small model. There is also a page about a larger one,
            [Qwen2.5-Coder-1.5B-Instruct](results/qwen2.5-coder-1.5b-instruct/README.md). What skipping layers does to
            the answers to GSM8K and BBH, and what became of the paper's claims, is on pages of its own:
            [methods compared](results/methods.md) and [the paper's claims](results/paper.md).
            """
        ),
        "",
        "### How long calibration takes",
        "",
        *table(
            ("policy", "starts from", "minutes"),
            [
                ("`fast`", "an empty cache", minutes["fast"]),
                ("`balanced`", "cached outputs", minutes["balanced"]),
                ("`gentle`", "cached outputs", minutes["gentle"]),
            ],
        ),
        "",
        prose(
            f"""
            Memory peaked at {first["peak_mib_so_far"]} MiB. Measured on {c["date"]} on an {c["machine"]}, with
            {c["threads"]} threads, Taper {c["taper"]} and Python {c["python"]}.
            """
        ),
    ]
    if "growth" in calibrated:
        growth = calibrated["growth"]
        rows = [(str(row["prompts"]), str(row["tokens"]), f"{row['seconds']:.0f}") for row in growth["rows"]]
        lines += [
            "",
            prose(
                """
                Calibration time grows in a straight line with the tokens of prompts and outputs. With outputs of up
                to 24 tokens:
                """
            ),
            "",
            *table(("prompts", "tokens", "seconds"), rows),
            "",
            prose(
                f"""
                That is {growth["seconds_per_1000_tokens"]:.0f} s for each 1000 tokens (R²
                {growth["r_squared"]:.3f}). Above 72 prompts it grows more slowly, because the search then has all
                the prompts that it uses.
                """
            ),
        ]
    return lines + (orders(calibrated["orders"]) if "orders" in calibrated else [])


def orders(measured: dict[str, Any]) -> list[str]:
    """KL by depth, a column for each method, and how it differs from the measured order's."""
    comparison = from_plain(Comparison, measured)
    kl, above = comparison.kl, comparison.kl_above_measured_order
    others = [method for method in kl if method != MEASURED_ORDER]
    include_zero = [
        f"- {method}: {', '.join(by_depth)} layers" for method, by_depth in measured["not_clear_of_zero"].items()
    ]
    values = [(str(depth), *(f"{kl[method][depth].value:.2f}" for method in kl)) for depth in kl[MEASURED_ORDER]]
    differences = [
        (str(depth), *(_difference(above.get(method, {}).get(depth)) for method in others))
        for depth in kl[MEASURED_ORDER]
    ]
    return [
        "",
        "### Which layers to skip: the measured order and others",
        "",
        prose(
            f"""
            These tables compare orders of skipping layers, each at the same depth from step 1 on, by their mean KL
            to full depth over {measured["steps"]} steps of {measured["answers"]} held-out outputs. SkipDecode decays
            linearly and has that depth on average. `first sketch` is the order that an early version of this search
            found on other outputs of the same model.
            """
        ),
        "",
        "Mean KL to full depth, nats:",
        "",
        *table(("layers", *kl), values),
        "",
        prose(
            """
            How much higher that is than with the measured order, as a 95 % interval of the paired difference. A cell
            is empty where both skip the same layers:
            """
        ),
        "",
        *table(("layers", *others), differences),
        "",
        "![Loss against mean depth, with a line for each method](results/frontier.png)",
        "",
        "The picture is from this command:",
        "",
        "    taper calibrate --speedup 1.2 --answer-tokens 128 --baselines --report report",
        "",
        "The 95 % interval of the difference includes zero for:",
        "",
        *(include_zero or ["- no method"]),
        "",
        prose(
            """
            So on this model the measured order is far better than early exit, SkipDecode, evenly spread layers and
            random orders. It cannot be distinguished from ShortGPT's order, nor at most depths from skipping the
            middle first: KL has a heavy tail, and a few outputs account for much of it. Note that ShortGPT's block
            influence was computed on the very outputs that are compared here, and the measured order on others.
            """
        ),
    ]


def _difference(estimate: Estimate | None) -> str:
    """The interval of a difference; nothing where there is none."""
    return "" if estimate is None else f"{estimate.low:+.2f} to {estimate.high:+.2f}"


def model_page(data: dict[str, Any]) -> str:
    """The page of a model that was calibrated once: its summary, and the command and commit that it comes from."""
    summary = Summary.from_json(data)
    model, prompts, c, frontier = summary.model, summary.prompts, summary.conditions, summary.frontier
    budget = ", ".join(asked for asked, _ in limits(summary))
    lines = [
        f"# {model.name}",
        "",
        prose(f"This model was calibrated once. The budget: {budget}. The verdict: {verdict(summary)}."),
        "",
        "- [The report](report/index.html) explains the result, with pictures.",
        "- [`policy.json`](policy.json) is the policy.",
        "- [`summary.json`](summary.json) has every figure.",
        "",
        "All of this was made by",
        "",
        f"    {data['command']}",
        "",
        prose(
            f"""
            on {c.date}, with Taper {c.taper} (commit {data["commit"]}), on an {c.machine}, with {c.threads} threads.
            The weights were used as they are in the file (sha256 {model.sha256[:16]}...).
            """
        ),
        "",
        prose(
            f"""
            The search used {prompts.search} prompts. The figures below are from {prompts.held_out} held-out ones,
            with outputs of up to {summary.answer_tokens} tokens. Full depth is {model.num_hidden_layers} layers.
            """
        ),
        "",
        *table(("figure", "value"), [(title, cell(summary)) for title, cell in FIGURES]),
        "",
        LEGEND,
    ]
    if frontier.prompts == "search":
        order, kls = summary.skip_order[: summary.searched_layers], frontier.kl[MEASURED_ORDER].values()
        skipped = enumerate(zip(order, kls, strict=True), 1)
        lines += [
            "",
            "## Which layers are skipped first",
            "",
            "The mean KL to full depth as one layer after another is skipped, on the prompts of the search:",
            "",
            *table(
                ("layers skipped", "the last of them", "KL, nats"),
                [(str(count), str(layer), f"{kl:.2f}") for count, (layer, kl) in skipped],
            ),
        ]
    return "\n".join([*lines, ""])


def page(result: dict[str, Any], calibrated: dict[str, Any], quantised: dict[str, Any]) -> str:
    """docs/results.md."""
    depth, memory, start = result["depth"], result["memory"], result["start_up"]
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
            This page is written by `python benchmarks/render.py`. Its figures are of the default model on two CPU
            cores. Those of quality come from `benchmarks/results/calibration.json`, and those of speed from
            `benchmarks/results/decode.json`, which this command makes:
            """
        ),
        "",
        "    python benchmarks/decode.py --out benchmarks/results/decode.json",
        "",
        "## In short",
        "",
        *summary(result, calibrated),
        "",
        "## One decode step by depth",
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
        *quality(calibrated),
        "",
        *render_quantise.section(quantised, table, prose),
        "## Conditions",
        "",
        conditions(result["conditions"]),
        "",
    ]
    return "\n".join(lines)


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
            structure of JSON. Each file must be rejected in one line, or load and then generate greedily and sampled.
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


def rendered() -> dict[Path, str]:
    """The files as they should be."""
    names = ("decode", "calibration", "quantise", "fuzz")
    result, calibrated, quantised, report = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    readme, reliability = ROOT / "README.md", ROOT / "docs" / "reliability.md"
    text = between_marks(readme.read_text(), summary(result, calibrated))
    pages = {
        ROOT / "docs" / "results.md": page(result, calibrated, quantised),
        readme: between_marks(text, render_quantise.adding_up(quantised, table), QUANTISING),
        reliability: between_marks(reliability.read_text(), fuzzed(report)),
    }
    for file in sorted(PAGES.glob("*/summary.json")):
        pages[file.with_name("README.md")] = model_page(json.loads(file.read_text()))
    pages |= render_methods.pages(RESULTS, PAGES, table, prose)
    return pages | render_claims.pages(RESULTS, PAGES, table, prose)


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
    render_methods.draw_all(RESULTS, PAGES)
