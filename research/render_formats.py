"""The tables of research/results/formats.json, for docs/results.md; `render.py` puts them there.

The picture of them is drawn by hand:

    python research/render_formats.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from formats import FORMATS, TAPER, TESTS
from pages import prose, table

TITLES = {
    "decode": ("Decoding", "context, tokens", "decoding, after as many tokens of context as the second column says"),
    "prefill": ("Prompts", "prompt, tokens", "reading a prompt of as many tokens as the second column says"),
    "batch": ("Batches", "outputs side by side", "decoding several outputs at a time, all of them together"),
}
PICTURE = Path(__file__).parent / "pages" / "formats.png"


def section(result: dict[str, Any], experts: dict[str, Any] | None) -> list[str]:
    """The section of docs/results.md."""
    c, peers = result["conditions"], _peers(result)
    same, newest = peers[0], peers[-1]
    lines = [
        "## Beside llama.cpp, by format and length",
        "",
        prose(
            f"""
            A larger model, Qwen2.5-Coder-1.5B-Instruct, in the formats that people use, at full depth. `llama-quantize`
            made the files. Taper takes turns with llama.cpp's own `llama-bench` and `llama-batched-bench`, once built
            on the version of ggml that Taper uses, {same.removeprefix("ggml ")}, and once on a new one,
            {newest.removeprefix("ggml ")}. Speeds are tokens per second. A ratio is Taper's speed over llama.cpp's, so
            above 1 Taper is faster. These figures come from `research/results/formats.json`, which this command
            makes:
            """
        ),
        "",
        '    python research/formats.py --source MODEL.gguf --folder FOLDER --llama "ggml 0.15.3=DIR" '
        '--llama "ggml 0.26=DIR" --out research/results/formats.json',
        "",
        "![Taper's speed over llama.cpp's, by format: decoding, prompts and batches](formats.png)",
        "",
    ]
    for kind, (title, column, what) in TITLES.items():
        rows = [
            (name, str(size), f"{cell['tokens_per_second'][TAPER]:.1f}", *_peer_cells(cell, peers))
            for name in FORMATS
            for size, cell in _cells(result, name, kind)
        ]
        header = ["format", column, "Taper", *(text for peer in peers for text in (f"llama.cpp, {peer}", "ratio"))]
        lines += [f"### {title}", "", f"Speed of {what}:", "", *table(header, rows), ""]
    gains = {kind: _gain(result, kind, same, newest) for kind in TITLES}
    commits = sorted({cell["commit"] for _, cell in _all_cells(result)})
    return [
        *lines,
        *(_experts(experts) if experts else []),
        prose(
            f"""
            Taper is bound to the version of ggml that its Python binding, ggml-python, builds. What a newer one would
            bring can be read from llama.cpp: with ggml {newest.removeprefix("ggml ")} it is, as the median over these
            formats and lengths, {gains["decode"]:.2f}x as fast in decoding, {gains["prefill"]:.2f}x in prompts and
            {gains["batch"]:.2f}x in batches. The other packages cannot take the binding's place: ggml-py 0.10.1 has an
            older ggml, libggml-python 0.20.2 is a library without a binding, built without AVX-512, and
            llama-cpp-python offers llama.cpp's functions rather than ggml's graphs.
            """
        ),
        "",
        prose(
            f"""
            Measured on {c["date"]} at commits {", ".join(commits)}, on an {c["cpu"]} with {c["cores"]} cores and
            {c["threads"]} threads, with an {c["kv_cache"]} key-value cache. Decoding is over {c["answer_tokens"]}
            tokens, and batches start from prompts of {c["batch_prompt_tokens"]} tokens. Figures are the
            {c["statistic"]}, of {c["rounds"]} rounds, in which the programs took turns. The machine is shared, so read
            the ratios rather than the absolute times.
            """
        ),
        "",
    ]


def _experts(result: dict[str, Any]) -> list[str]:
    """The mixture of experts, beside the same version of ggml."""
    c, tests = result["conditions"], {name: cell for name, cell in result.items() if name != "conditions"}
    (peer,) = tests["decode 0"]["ratio"]
    rows = [
        (title, *(f"{tests[name]['tokens_per_second'][who]:.1f}" for who in (TAPER, peer)), _ratio(tests[name], peer))
        for name, title in (("decode 0", "decoding"), ("prefill 128", "a prompt of 128 tokens"))
    ]
    return [
        "### A mixture of experts",
        "",
        prose(
            f"""
            8 of 64 experts, random weights, {c["file_mib"]} MiB in Q4_K_M; made and measured on {c["date"]} at commit
            {c["commit"]} by `research/experts.py`:
            """
        ),
        "",
        *table(("", "Taper", f"llama.cpp, {peer}", "ratio"), rows),
        "",
    ]


def _ratio(cell: dict[str, Any], peer: str) -> str:
    return f"{cell['ratio'][peer]:.2f}x"


def _peers(result: dict[str, Any]) -> list[str]:
    """The names of the llama.cpp's, in the order in which they were measured."""
    cells = [cell["tokens_per_second"] for _, cell in _all_cells(result)]
    return [name for name in max(cells, key=len) if name != TAPER]


def _all_cells(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, cells[f"{kind} {size}"])
        for name, cells in result["formats"].items()
        for kind, size in TESTS
        if f"{kind} {size}" in cells
    ]


def _cells(result: dict[str, Any], name: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """The sizes of a kind of test that were measured in a format, ascending, and their cells."""
    cells = result["formats"].get(name, {})
    sizes = sorted(size for other, size in TESTS if other == kind)
    return [(size, cells[f"{kind} {size}"]) for size in sizes if f"{kind} {size}" in cells]


def _peer_cells(cell: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """A speed and a ratio for each llama.cpp; empty where it was not measured."""
    speeds, ratios = cell["tokens_per_second"], cell["ratio"]
    return [
        text
        for peer in peers
        for text in ((f"{speeds[peer]:.1f}", f"{ratios[peer]:.2f}x") if peer in ratios else ("", ""))
    ]


def _gain(result: dict[str, Any], kind: str, same: str, newest: str) -> float:
    """How much faster the newest llama.cpp is than that of the same ggml: the median over the cells of a kind."""
    speeds = [cell["tokens_per_second"] for name in FORMATS for _, cell in _cells(result, name, kind)]
    return median(speed[newest] / speed[same] for speed in speeds if newest in speed)


def draw(result: dict[str, Any], path: Path) -> None:
    """The ratios as bars: a panel for each kind of test, a group for each format, a shade for each size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peer = _peers(result)[0]
    figure, panels = plt.subplots(len(TITLES), 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    for panel, (kind, (title, column, _)) in zip(panels, TITLES.items(), strict=True):
        sizes = sorted(size for other, size in TESTS if other == kind)
        for index, size in enumerate(sizes):
            found = {name: dict(_cells(result, name, kind)).get(size) for name in FORMATS}
            bars = [(at, cell["ratio"][peer]) for at, cell in enumerate(found.values()) if cell]
            if not bars:
                continue
            places = [at + (index - (len(sizes) - 1) / 2) * 0.27 for at, _ in bars]
            shade = plt.get_cmap("viridis")(0.2 + 0.6 * index / max(1, len(sizes) - 1))
            panel.bar(places, [ratio for _, ratio in bars], 0.25, label=f"{size:,}", color=shade)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_ylabel(f"{title}: ratio")
        panel.legend(title=column, fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    panels[-1].set_xticks(range(len(FORMATS)), FORMATS)
    panels[0].set_title(f"Taper's speed over llama.cpp's ({peer}), full depth, higher is better for Taper", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    results = Path(__file__).parent / "results" / "formats.json"
    draw(json.loads(results.read_text()), PICTURE)
