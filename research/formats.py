"""One model in many formats on a CPU, against llama.cpp: decoding after some context, prompts, and batches.

    python research/formats.py --source MODEL.gguf --folder FOLDER --llama NAME=DIR --out FILE

llama-quantize makes a file of each format in FOLDER, unless it is there already. Everything is alternated; figures are
medians. All of it takes hours. Results are written one by one, and a second run measures only what FILE lacks. Leave
the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from decode import THREADS, conditions, median, write

from taper import DepthPolicy
from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.lab.bench.measure import alternate, measure
from taper.lab.bench.peers import LlamaBench
from taper.models import load_model

FORMATS = ("Q4_K_M", "Q4_0", "Q8_0", "Q6_K", "Q5_K_M", "IQ4_NL", "F16")
# The most telling ones first.
TESTS = [
    *(("decode", 0), ("prefill", 512), ("batch", 4), ("prefill", 128), ("batch", 8), ("batch", 1)),
    *(("decode", 1024), ("prefill", 2048), ("decode", 4096)),
]
ROUNDS, TOKENS, BATCH_PROMPT = 5, 64, 16
TAPER = "Taper"


def compare(path: Path, programs: dict[str, Path], kind: str, size: int) -> dict[str, Any]:
    """Tokens per second of one file on Taper and on each llama.cpp, and Taper's over theirs.

    `size` is the tokens of a prompt ("prefill"), the tokens of context before decoding ("decode") or the sequences
    that are decoded side by side ("batch").
    """
    loaded = load_model(path)
    full = DepthPolicy.full(loaded.config.num_hidden_layers)
    batch = size if kind == "batch" else 1
    length = (BATCH_PROMPT if kind == "batch" else size) + TOKENS + 1
    config, tensors = loaded.config, loaded.tensors
    engine = Engine(GgmlBackend(config, tensors, context_length=length, num_slots=batch, threads=THREADS))
    seeds = count(1)

    def ours() -> float:
        """After a warm-up, as llama-bench has one: while others run, the system takes back memory of who waits."""
        if kind == "prefill":  # a new prompt each time, or the cache would hold it
            times = [measure(engine, full, prompt_tokens=size, seed=next(seeds)).ttft_s for _ in range(2)]
            return size / times[-1]
        prompt = BATCH_PROMPT if kind == "batch" else size + 1
        measure(engine, full, prompt_tokens=prompt, max_tokens=TOKENS // 2, batch=batch)
        return batch / measure(engine, full, prompt_tokens=prompt, max_tokens=TOKENS, batch=batch).tpot_s

    def theirs(folder: Path) -> float:
        llama = LlamaBench(folder, path, THREADS)
        if kind == "prefill":
            return llama.measure(prompt_tokens=size)
        if kind == "decode":
            return llama.measure(max_tokens=TOKENS, context=size)
        return batched(llama, batch, TOKENS)

    runs = {TAPER: ours} | {name: partial(theirs, folder) for name, folder in programs.items()}
    speeds = alternate(runs, ROUNDS)
    ratios = {name: median([a / b for a, b in zip(speeds[TAPER], speeds[name], strict=True)]) for name in programs}
    return {"tokens_per_second": {name: median(values) for name, values in speeds.items()}, "ratio": ratios}


def batched(llama: LlamaBench, batch: int, tokens: int) -> float:
    """llama.cpp's tokens per second with so many sequences side by side."""
    cells = batch * (BATCH_PROMPT + tokens + 256)  # each sequence's share is rounded up
    arguments = ["-npp", BATCH_PROMPT, "-ntg", tokens, "-npl", batch, "-c", cells, "-fa", "on"]
    output = llama.run("llama-batched-bench", [*arguments, "--output-format", "jsonl"])
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    return float(json.loads(line)["speed_tg"])


def quantised(folder: Path, source: Path, name: str, programs: Path) -> Path:
    """The source model in a format, made by llama-quantize unless it is there already."""
    path = folder / f"{source.stem}.{name.lower()}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        quantize = [programs / "llama-quantize", "--allow-requantize", source, part, name, str(THREADS)]
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL)
        part.rename(path)
    return path


def main() -> None:
    """Run every format and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="the model to convert")
    parser.add_argument("--folder", type=Path, required=True, help="where the files of all formats are kept")
    parser.add_argument(
        "--llama",
        action="append",
        required=True,
        metavar="NAME=DIR",
        help="a llama.cpp and its programs; the last makes files",
    )
    parser.add_argument("--out", type=Path, required=True, help="the file of results; it grows")
    options = parser.parse_args()
    programs = {name: Path(folder) for name, _, folder in (text.partition("=") for text in options.llama)}
    about = conditions(options.source) | {
        "answer_tokens": TOKENS,
        "batch_prompt_tokens": BATCH_PROMPT,
        "rounds": ROUNDS,
    }
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"formats": {}}
    result["conditions"] = about
    for kind, size in TESTS:
        test = f"{kind} {size}"
        for name in FORMATS:
            path = quantised(options.folder, options.source, name, list(programs.values())[-1])
            cells = result["formats"].setdefault(name, {"file_mib": round(path.stat().st_size / 2**20)})
            if not programs.keys() <= cells.get(test, {"ratio": {}})["ratio"].keys():
                print(f"{name} {test} ...", file=sys.stderr, end=" ", flush=True)
                cells[test] = compare(path, programs, kind, size) | {
                    "commit": about["commit"],
                    "cpu": about["cpu"],
                }
                print(cells[test]["tokens_per_second"], file=sys.stderr)
                write(options.out, result)


if __name__ == "__main__":
    main()
