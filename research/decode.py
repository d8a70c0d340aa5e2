"""Speed of the default model on a CPU: one JSON document, everything alternated, medians.

    python research/decode.py --out research/results/decode.json

Leave the machine alone while it runs (about five minutes). `taper bench` compares it with llama.cpp.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from taper import DepthPolicy
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.library import ggml
from taper.engine import Engine
from taper.lab.bench.measure import alternate, measure, step_bytes, step_ms_by_depth
from taper.models import find_model, load_model
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import find_policy
from taper.models.tensors import LoadedModel

THREADS, ROUNDS, TOKENS = 2, 7, 128
DEPTHS = (30, 28, 26, 24, 22, 20, 15, 10)
STEPS = 120  # of each depth
QUESTION = "Why is the sky blue? Explain it to a child of 7."


def against_transformers(loaded: LoadedModel, path: Path, prompt_tokens: int) -> dict[str, Any]:
    """(a) Full depth against transformers' generate in f32."""
    import torch
    from reference import transformers_from_gguf

    torch.set_num_threads(THREADS)
    model = transformers_from_gguf(path)
    ids = torch.ones((1, prompt_tokens), dtype=torch.int64)
    engine = Engine(GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS))
    full = DepthPolicy.full(loaded.config.num_hidden_layers)

    def ours() -> float:
        return 1 / measure(engine, full, prompt_tokens=prompt_tokens, max_tokens=TOKENS).tpot_s

    def seconds(tokens: int) -> float:
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - started

    def theirs() -> float:
        first = seconds(1)
        return 32 / (seconds(33) - first)

    speeds = alternate({"taper_tokens_per_second": ours, "transformers_f32": theirs}, ROUNDS)
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    return {name: median(values) for name, values in speeds.items()} | {"ratio": median(ratios)}


def against_depth(loaded: LoadedModel, prompt_tokens: int) -> dict[str, Any]:
    """(b) One decode step at each depth in turn: a straight line? And whole answers, full against depth 20."""
    layers = loaded.config.num_hidden_layers
    backend = GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS)
    order = find_policy("fast").skip_order
    step_ms = step_ms_by_depth(backend, order, DEPTHS, STEPS, prompt_tokens)
    slope, fixed = np.polyfit(DEPTHS, list(step_ms.values()), 1)
    left = np.array([step_ms[d] - (fixed + slope * d) for d in DEPTHS])
    spread = np.array(list(step_ms.values()))
    policies = {d: DepthPolicy.static(layers, d, order) for d in DEPTHS}
    read = {d: step_bytes(backend.weight_bytes, policy.retained_at(d)) for d, policy in policies.items()}
    ideal = {d: read[layers] / read[d] for d in DEPTHS}
    speedup = {d: step_ms[layers] / step_ms[d] for d in DEPTHS}

    engine = Engine(backend)

    def run(policy: DepthPolicy) -> float:
        return 1 / measure(engine, policy, prompt_tokens=prompt_tokens, max_tokens=TOKENS).tpot_s

    full = DepthPolicy.full(layers)
    runs = alternate({"full": lambda: run(full), "depth 20": lambda: run(policies[20])}, ROUNDS)
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
    """(c), (d) Load, first token and --help, each in a fresh process."""
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
    """(e) Peak resident memory, mapped weights included, in MiB."""
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


def write(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write the document, whole or not at all."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(result) + "\n")
        part.replace(out)


def median(values: list[float]) -> float:
    """The median, to four digits."""
    return float(f"{statistics.median(values):.4g}")


def commit(folder: Path = Path()) -> str:
    """The commit of the repository that a folder is in; empty if it is in none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def conditions(path: Path) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    packages = ("taper-llm", "numpy", "torch", "transformers", "tokenizers")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "kernels": str(ggml),
        "model": path.name,
        "kv_cache": "f16",
        "batch": 1,
        "rounds": ROUNDS,
        "statistic": "median; ratios are medians of the ratios of neighbouring runs",
    }


def main() -> None:
    """Run all parts and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the document to this file, part by part")
    options = parser.parse_args()
    path = find_model(DEFAULT_MODEL)
    loaded = load_model(path)
    text = loaded.tokenizer.render([{"role": "user", "content": QUESTION}])
    prompt_tokens = len(loaded.tokenizer.encode(text, add_special_tokens=False))
    result: dict[str, Any] = {
        "conditions": conditions(path) | {"prompt_tokens": prompt_tokens, "answer_tokens": TOKENS}
    }
    for name, part in [
        ("start_up", start_up),
        ("memory", lambda: memory(loaded, path)),
        ("depth", lambda: against_depth(loaded, prompt_tokens)),
        ("transformers", lambda: against_transformers(loaded, path, prompt_tokens)),
    ]:
        print(f"{name} ...", file=sys.stderr)
        result[name] = part()
        write(options.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
