"""What the layouts of weights change: logits, memory and the time of loading, of one or more GGUF files.

    python research/repack.py --out research/results/repack.json FILE...

Each file's own answers are those that its logits are compared on. Leave the machine alone while it runs (about five
minutes for each file of 1 GB).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from quantise import conditions, log_probabilities
from task_options import compared

from taper import LLM, DepthPolicy, SamplingParams
from taper.engine import Request
from taper.errors import REPACK
from taper.lab.bench.measure import alternate
from taper.lab.calibration.prompts import builtin_prompts, encode_prompts
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.run import MAX_PROMPTS
from taper.lab.calibration.statistics import over_steps
from taper.lab.calibration.summary import to_plain

THREADS, ROUNDS, PROMPTS, ANSWER_TOKENS, CONTEXT = 2, 7, 20, 128, 1024

_LOAD = """
import sys, time
from pathlib import Path
begun = time.perf_counter()
from taper import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", threads=int(sys.argv[2]), context=int(sys.argv[3]), max_batch_size=1,
          repack=sys.argv[4])
loaded = time.perf_counter()
if sys.argv[5] == "True":
    llm.generate("word " * (llm.engine.backend.context_length - 200), SamplingParams(max_tokens=8), mode="full")
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
print(loaded - begun, peak)
"""


def answers(path: Path) -> list[Reference]:
    """Greedy answers of a model at full depth to some of the built-in prompts."""
    llm = LLM(path, device="cpu", context=CONTEXT, threads=THREADS, max_batch_size=PROMPTS)
    full = DepthPolicy.full(llm.config.num_hidden_layers)
    prompts = list(encode_prompts(llm, builtin_prompts(), 0, MAX_PROMPTS))[:PROMPTS]
    params, stops = SamplingParams(max_tokens=ANSWER_TOKENS), llm.tokenizer.eos_token_ids
    completed = llm.engine.complete(Request(prompt, params, full, stops) for prompt in prompts)
    return [Reference(prompt, tuple(answer)) for prompt, answer in zip(prompts, completed, strict=True)]


def quality(path: Path, references: list[Reference]) -> dict[str, Any]:
    """KL of other layouts' logits to those of the mapped file, and how often the likeliest token is the same."""
    layouts = [how for how in REPACK if how != "never"]
    mapped, *others = (
        LLM(path, device="cpu", context=CONTEXT, threads=THREADS, max_batch_size=1, repack=how)
        for how in ("never", *layouts)
    )
    full = DepthPolicy.full(mapped.config.num_hidden_layers)
    parts: dict[str, list[Scores]] = {how: [] for how in layouts}
    for index, reference in enumerate(references):
        p = log_probabilities(mapped, reference, full)
        for how, llm in zip(layouts, others, strict=True):
            parts[how].append(compared(index, reference, p, log_probabilities(llm, reference, full)))
    steps = sum(len(reference.completion_ids) for reference in references)
    loss = {how: to_plain(over_steps(Scores.joined(scores)).all_steps) for how, scores in parts.items()}
    return {"answers": len(references), "steps": steps, "loss": loss, "layouts": others[0].engine.backend.layouts}


def memory(path: Path) -> dict[str, Any]:
    """Seconds of loading and peak resident MiB once the key-value cache is full, each in a process of its own."""

    def run(repack: str, fill: bool) -> list[float]:
        arguments = [str(word) for word in (path, THREADS, CONTEXT, repack, fill)]
        out = subprocess.run([sys.executable, "-c", _LOAD, *arguments], capture_output=True, text=True, check=True)
        return [float(word) for word in out.stdout.split()]

    loads = alternate({how: partial(run, how, False) for how in REPACK}, ROUNDS)
    config = LLM(path, device="cpu", context=64, threads=THREADS, max_batch_size=1).config
    cache = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2 * CONTEXT / 2**20
    return {
        "file_mib": round(path.stat().st_size / 2**20),
        "kv_mib": round(cache),
        "load_s": {name: round(statistics.median(run[0] for run in runs), 3) for name, runs in loads.items()},
        "peak_mib": {how: round(run(how, True)[1]) for how in REPACK},
    }


def main() -> None:
    """Measure each file; it is written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="models of GGUF")
    options = parser.parse_args()
    about = {"prompts": PROMPTS, "context": CONTEXT, "answer_tokens": ANSWER_TOKENS, "rounds": ROUNDS}
    result: dict[str, Any] = {"conditions": conditions(options.files[0]) | about, "files": {}}
    for path in options.files:
        print(path.name, file=sys.stderr)
        result["files"][path.name] = memory(path) | quality(path, answers(path))
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
