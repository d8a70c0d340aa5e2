"""One model in many formats on a CPU, against llama.cpp: prompts, decoding after some context, and batches.

    python benchmarks/formats.py --source MODEL.gguf --folder FOLDER --llama-bin DIR --out FILE

llama-quantize makes a file of each format in FOLDER, unless it is there already. Everything is alternated; figures are
medians. This takes hours: results are written after each format. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode import THREADS, conditions, side_by_side, write

from taper import DepthPolicy
from taper.backends.ggml import GgmlBackend
from taper.bench.llama_cpp import LlamaBench, find_llama_bench
from taper.bench.measure import measure
from taper.engine import Engine
from taper.loading import load_model

FORMATS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_NL", "F16")
PREFILLS, CONTEXTS, BATCHES = (128, 512, 2048), (0, 1024, 4096), (1, 4, 8)
ROUNDS, TOKENS, BATCH_PROMPT = 5, 64, 16


def against_llama_cpp(path: Path, llama: LlamaBench) -> dict[str, Any]:
    """One file against llama-bench and llama-batched-bench: prompts, decoding after some context, and batches."""
    loaded = load_model(path)
    full = DepthPolicy.full(loaded.config.num_hidden_layers)
    context_length = max(*PREFILLS, *CONTEXTS) + TOKENS + 1
    backend = GgmlBackend(
        loaded.config, loaded.tensors, context_length=context_length, num_slots=max(BATCHES), threads=THREADS
    )
    engine, seeds = Engine(backend), iter(range(1, 1 << 30))

    def prefill(tokens: int) -> dict[str, Any]:
        def ours() -> float:  # a new prompt each time, or the cache would hold it
            return measure(engine, full, prompt_tokens=tokens, seed=next(seeds)).prefill_tokens_per_second

        return side_by_side(ours, "llama_bench", lambda: llama.measure(prompt_tokens=tokens), ROUNDS)

    def decode(context: int) -> dict[str, Any]:
        def ours() -> float:
            run = measure(engine, full, prompt_tokens=context + 1, max_tokens=TOKENS)
            return run.tokens_per_second

        def theirs() -> float:
            return llama.measure(max_tokens=TOKENS, context=context)

        return side_by_side(ours, "llama_bench", theirs, ROUNDS)

    def batched(batch: int) -> dict[str, Any]:
        def ours() -> float:
            run = measure(engine, full, prompt_tokens=BATCH_PROMPT, max_tokens=TOKENS, batch=batch)
            return run.tokens_per_second

        def theirs() -> float:
            lengths = {"prompt_tokens": BATCH_PROMPT, "max_tokens": TOKENS}
            return llama.measure_batch(**lengths, batch=batch)[1]

        return side_by_side(ours, "llama_batched_bench", theirs, ROUNDS)

    return {
        "file_mib": round(path.stat().st_size / 2**20),
        "prefill": {str(tokens): prefill(tokens) for tokens in PREFILLS},
        "decode_after_context": {str(context): decode(context) for context in CONTEXTS},
        "decode_in_batch": {str(batch): batched(batch) for batch in BATCHES},
    }


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
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs; default: PATH")
    parser.add_argument("--format", action="append", metavar="NAME", help="one format; may be repeated; default: all")
    parser.add_argument("--out", type=Path, help="also write the document to this file, format by format")
    options = parser.parse_args()
    programs = find_llama_bench(options.llama_bin)
    if programs is None:
        parser.error("llama.cpp's programs are neither in --llama-bin nor on PATH")
    lengths = {"answer_tokens": TOKENS, "batch_prompt_tokens": BATCH_PROMPT, "rounds": ROUNDS, "batch": BATCHES}
    result: dict[str, Any] = {"conditions": conditions(options.source) | lengths, "formats": {}}
    for name in options.format or FORMATS:
        print(f"{name} ...", file=sys.stderr)
        path = quantised(options.folder, options.source, name, programs)
        result["formats"][name] = against_llama_cpp(path, LlamaBench(programs, path, THREADS))
        write(options.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
