"""Decoding speed of the default model on a CPU: one JSON line, everything alternated, medians.

    python benchmarks/decode.py --out benchmarks/results/decode.json

Leave the machine alone while it runs (about five minutes). llama-bench is used where --llama-bench or PATH has it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from taper import DepthPolicy, SamplingParams
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.loading import LoadedModel, load_model
from taper.models import DEFAULT_MODEL, find_model
from taper.policies import shipped_policies
from taper.sequence import Request

THREADS, ROUNDS, TOKENS = 2, 7, 128
DEPTHS = (30, 28, 26, 24, 22, 20, 15, 10)
STEPS = 120  # of each depth
QUESTION = "Why is the sky blue? Explain it to a child of 7."


def engine_tokens_per_second(engine: Engine, prompt: list[int], policy: DepthPolicy) -> float:
    """(n - 1) tokens over the time from first to last, greedy, sampling included."""
    times = []
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=TOKENS), policy))
    while sequence.finish_reason is None:
        if engine.step():
            times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0])


def against_llama_bench(loaded: LoadedModel, path: Path, program: str | None) -> dict[str, Any]:
    """(a) Full depth from an empty context against llama-bench, a run of each in turn."""
    if program is None:
        return {"skipped": "llama-bench is not installed"}
    engine = Engine(GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS))
    command = [program, "-m", str(path), "-p", "0", "-n", str(TOKENS), "-fa", "1", "-t", str(THREADS), "-r", "1"]
    ours, theirs = [], []
    full = DepthPolicy.full(loaded.config.num_hidden_layers)
    engine_tokens_per_second(engine, [1], full)
    for _ in range(ROUNDS):
        ours.append(engine_tokens_per_second(engine, [1], full))
        out = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True).stdout
        theirs.append(json.loads(out)[0]["avg_ts"])
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"taper_tokens_per_second": median(ours), "llama_bench": median(theirs), "ratio": median(ratios)}


def against_transformers(loaded: LoadedModel, path: Path, prompt: list[int]) -> dict[str, Any]:
    """(b) Full depth against transformers' generate in f32, a run of each in turn."""
    import torch
    from reference import transformers_from_gguf

    torch.set_num_threads(THREADS)
    model = transformers_from_gguf(path)
    ids = torch.tensor([prompt])
    engine = Engine(GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS))
    full = DepthPolicy.full(loaded.config.num_hidden_layers)

    def theirs(tokens: int) -> float:
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - started

    theirs(4)
    a, b = [], []
    for _ in range(ROUNDS):
        a.append(engine_tokens_per_second(engine, prompt, full))
        first = theirs(1)
        b.append(32 / (theirs(33) - first))
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return {"taper_tokens_per_second": median(a), "transformers_f32": median(b), "ratio": median(ratios)}


def against_depth(loaded: LoadedModel, prompt: list[int]) -> dict[str, Any]:
    """(c) One decode step at each depth in turn: a straight line? And whole answers, full against depth 20."""
    layers = loaded.config.num_hidden_layers
    backend = GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS)
    order = next(iter(shipped_policies().values()))[0].skip_order
    active = {d: tuple(int(i not in order[: layers - d]) for i in range(layers)) for d in DEPTHS}
    times: dict[int, list[float]] = {d: [] for d in DEPTHS}
    for step in range(STEPS + 5):
        for depth in DEPTHS:
            at = [np.array([value], np.int32) for value in (11, len(prompt) + step, 0)]
            started = time.perf_counter()
            backend.forward(TokenBatch(*at, active[depth], logits_rows=(0,)))
            times[depth].append((time.perf_counter() - started) * 1e3)
    step_ms = {d: statistics.median(values[5:]) for d, values in times.items()}
    slope, fixed = np.polyfit(DEPTHS, [step_ms[d] for d in DEPTHS], 1)
    left = np.array([step_ms[d] - (fixed + slope * d) for d in DEPTHS])
    spread = np.array(list(step_ms.values()))
    sizes = {name: tensor.data.nbytes for name, tensor in loaded.tensors.items()}
    head = sizes.get("lm_head", sizes["embed_tokens"])
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.")) / layers
    ideal = {d: (head + layers * layer) / (head + d * layer) for d in DEPTHS}
    speedup = {d: step_ms[layers] / step_ms[d] for d in DEPTHS}

    engine = Engine(backend)
    runs: dict[str, list[float]] = {"full": [], "depth 20": []}
    for _ in range(ROUNDS):
        runs["full"].append(engine_tokens_per_second(engine, prompt, DepthPolicy.full(layers)))
        runs["depth 20"].append(engine_tokens_per_second(engine, prompt, DepthPolicy.static(layers, 20, order)))
    whole = [b / a for a, b in zip(*runs.values(), strict=True)]
    return {
        "step_ms": {d: round(ms, 3) for d, ms in step_ms.items()},
        "speedup": {d: round(s, 3) for d, s in speedup.items()},
        "ideal_by_bytes": {d: round(s, 3) for d, s in ideal.items()},
        "realised_fraction_at_20": round((speedup[20] - 1) / (ideal[20] - 1), 3),
        "ms_per_layer": round(float(slope), 4),
        "fixed_ms_per_step": round(float(fixed), 3),
        "r_squared": round(1 - float((left**2).sum() / ((spread - spread.mean()) ** 2).sum()), 5),
        "answers_of_128_speedup_at_20": median(whole),
    }


_START = """
import sys, time
begun = time.perf_counter()
from taper import LLM, SamplingParams
llm = LLM(threads=%d)
loaded = time.perf_counter()
text = "word " * 12 + "and so on"
ids = llm.encode(text)
output = llm.generate(text, SamplingParams(max_tokens=2), mode="full")
print(loaded - begun, output.ttft_s, len(ids), int("torch" in sys.modules))
"""

_MEMORY = """
from pathlib import Path
from taper import LLM, SamplingParams
def peak():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
llm = LLM(threads=%d, context=%d, max_batch_size=1)
llm.generate("word", SamplingParams(max_tokens=64))
first = peak()
for n in range(50):
    llm.generate("word " * (3 + 17 * n), SamplingParams(max_tokens=8))
print(first, peak())
"""


def start_up() -> dict[str, Any]:
    """(d), (e) Load, first token and --help, each in a fresh process."""
    rows = [run_python(_START % THREADS) for _ in range(ROUNDS)]
    helps = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "taper", "--help"], capture_output=True, check=True)
        helps.append(time.perf_counter() - started)
    return {
        "load_with_tokenizer_s": median([row[0] for row in rows]),
        "first_token_s": median([row[1] for row in rows]),
        "prompt_tokens": int(rows[0][2]),
        "torch_imported": bool(rows[0][3]),
        "help_s": median(helps),
    }


def memory(loaded: LoadedModel, path: Path) -> dict[str, Any]:
    """(f) Peak resident memory, mapped weights included, in MiB."""
    context, c = 2048, loaded.config
    first, later = run_python(_MEMORY % (THREADS, context))
    cache = c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * 2 * context / 2**20
    file = path.stat().st_size / 2**20
    return {
        "peak_mib": round(first),
        "peak_after_50_prompt_lengths_mib": round(later),
        "file_mib": round(file),
        "kv_mib": round(cache),
        "limit_mib": round(file + cache + 150),
    }


def run_python(code: str) -> list[float]:
    """Numbers that a fresh interpreter prints."""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [float(word) for word in out.split()]


def median(values: list[float]) -> float:
    """The median, to four digits."""
    return float(f"{statistics.median(values):.4g}")


def conditions(path: Path) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    packages = ("taper-llm", "ggml-python", "numpy", "torch", "transformers", "tokenizers")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "model": path.name,
        "kv_cache": "f16",
        "batch": 1,
        "answer_tokens": TOKENS,
        "rounds": ROUNDS,
        "statistic": "median; ratios are medians of the ratios of neighbouring runs",
    }


def main() -> None:
    """Run all parts and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), help="path of llama.cpp's llama-bench")
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    options = parser.parse_args()
    path = find_model(DEFAULT_MODEL)
    loaded = load_model(path)
    text = loaded.tokenizer.render([{"role": "user", "content": QUESTION}])
    prompt = loaded.tokenizer.encode(text, add_special_tokens=False)
    result: dict[str, Any] = {"conditions": conditions(path) | {"prompt_tokens": len(prompt)}}
    for name, part in [
        ("start_up", start_up),
        ("memory", lambda: memory(loaded, path)),
        ("depth", lambda: against_depth(loaded, prompt)),
        ("llama_bench", lambda: against_llama_bench(loaded, path, options.llama_bench)),
        ("transformers", lambda: against_transformers(loaded, path, prompt)),
    ]:
        print(f"{name} ...", file=sys.stderr)
        result[name] = part()
    line = json.dumps(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
