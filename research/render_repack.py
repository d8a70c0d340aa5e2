"""The tables of research/results/repack.json, for docs/results.md; `render.py` puts them there."""

from __future__ import annotations

from typing import Any

from pages import prose, table

from taper.calibration.statistics import Estimate
from taper.calibration.summary import interval


def section(result: dict[str, Any]) -> list[str]:
    """The section of docs/results.md."""
    c, files = result["conditions"], result["files"]
    logits = [
        (
            _format(name),
            interval(Estimate(*file["loss"]["kl"])),
            interval(Estimate(*file["loss"]["agreement"]), 100),
            f"{file['steps']:,}",
        )
        for name, file in files.items()
    ]
    sizes = [
        (
            _format(name),
            *(f"{file['load_s'][kind]:.2f}" for kind in ("repacked", "mapped")),
            *(f"{file[size]:,}" for size in ("file_mib", "kv_mib")),
            *(f"{file['peak_mib'][kind]:,}" for kind in ("repacked", "mapped")),
        )
        for name, file in files.items()
    ]
    return [
        "## What repacking changes",
        "",
        prose(
            """
            When it loads a file, Taper rearranges the matrices that ggml has faster kernels for; `--no-repack` leaves
            them as they are in the file. These kernels add up in another order, and round activations in other places,
            so logits differ a little. These figures come from `research/results/repack.json`, which this command
            makes:
            """
        ),
        "",
        "    python research/repack.py --out research/results/repack.json FILE...",
        "",
        "Logits of the repacked weights beside those of the mapped ones, at full depth:",
        "",
        *table(("format", "KL, nats", "same likeliest token, %", "steps"), logits),
        "",
        "Loading, with the file in the page cache, and peak memory in MiB once the key-value cache is full:",
        "",
        *table(("format", "load, s", "mapped only, s", "file", "key-value cache", "peak memory", "mapped only"), sizes),
        "",
        prose(
            f"""
            Measured on {c["date"]} on an {c["machine"]}, with {c["threads"]} threads and a context of {c["context"]}
            tokens, Taper {c["taper"]} (commit {c["commit"]}), {c["kernels"]} and Python {c["python"]}. Times are
            medians of {c["rounds"]} rounds, in which both alternated, each in a process of its own.
            """
        ),
        "",
    ]


def _format(name: str) -> str:
    """The format of a file that `formats.py` made: the last word before its suffix."""
    return name.removesuffix(".gguf").rsplit(".", 1)[-1].upper()
