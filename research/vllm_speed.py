"""Speed inside vLLM on a CPU: stock eager, stock compiled and tapered engines, a step of each in turn.

    .venv-vllm/bin/python research/vllm_speed.py --out research/results/vllm_speed.json

Leave the machine alone while it runs (about ten minutes).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before vLLM and torch are imported: engines in this process, so that their steps can take turns.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import numpy as np
from reference import transformers_from_gguf
from vllm import LLM, SamplingParams

from taper import DepthPolicy
from taper.models import load_model
from taper.models.download import DEFAULT_MODEL, PACKAGED_MODELS
from taper.models.policies import find_policy

THREADS = 1
LAYERS, DEPTH, PROMPT_TOKENS, WARM_UP, STEPS = 30, 20, 32, 8, 60
BATCHES = (1, 16)
COST_BATCHES, COST_DEPTHS, COST_STEPS, COST_ROUNDS = (1, 2, 4, 8, 16, 32), (30, 20, 10), 10, 5


def engine(folder: str, **more: Any) -> LLM:
    """An engine of this process, stock or tapered by `more`."""
    fixed = {"dtype": "float32", "enable_prefix_caching": False, "skip_tokenizer_init": True, "block_size": 32}
    return LLM(folder, max_model_len=512, max_num_seqs=32, **(fixed | {"enforce_eager": True} | more))


def tapered(folder: str) -> LLM:
    """An engine with a policy of constant depth for each depth."""
    order = find_policy("fast").skip_order
    policies = {f"depth {d}": json.loads(DepthPolicy.static(LAYERS, d, order).to_json()) for d in range(4, LAYERS)}
    config = {"taper": {"policies": policies}}
    overrides = {"architectures": ["TaperLlamaForCausalLM"]}
    return engine(folder, hf_overrides=overrides, additional_config=config)


class Decoding:
    """A batch of requests in an engine, one step at a time; `depths` has one for each, 30 for every layer."""

    def __init__(self, llm: LLM, depths: list[int], steps: int) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.ids = [f"{time.perf_counter()} {number}" for number in range(len(depths))]
        for number, (name, depth) in enumerate(zip(self.ids, depths, strict=True)):
            extra = None if depth == LAYERS else {"taper_policy": f"depth {depth}"}
            params = SamplingParams(
                temperature=0, max_tokens=steps + 4, ignore_eos=True, detokenize=False, extra_args=extra
            )
            prompt = [1000 + 37 * number + place for place in range(PROMPT_TOKENS)]
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.step()  # the prompts

    def step(self) -> float:
        """Milliseconds of one step of the whole engine: scheduling, model, sampling."""
        started = time.perf_counter()
        self.engine.step()
        return (time.perf_counter() - started) * 1e3

    def end(self) -> None:
        """Abort what still runs."""
        self.engine.abort_request(self.ids)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def alternate(runs: dict[str, tuple[LLM, list[int]]], steps: int, warm_up: int = WARM_UP) -> dict[str, list[float]]:
    """Times by name; a step of each in turn, so that whatever else the machine does slows all alike."""
    decodings = {name: Decoding(llm, depths, steps + warm_up) for name, (llm, depths) in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + warm_up):
        for name, decoding in decodings.items():
            taken = decoding.step()
            if step >= warm_up:
                times[name].append(taken)
    for decoding in decodings.values():
        decoding.end()
    return times


def mixed_depths(batch: int) -> list[int]:
    """Sixteen different depths whose mean is `DEPTH`."""
    depths = [DEPTH + offset for offset in range(-8, 9) if offset]
    assert len(depths) == batch
    return depths


def compare(engines: dict[str, LLM], batch: int, ideal: float) -> dict[str, Any]:
    """One batch size: every row at depth 20, and rows of different depths with that mean."""
    runs = {name: (llm, [LAYERS] * batch) for name, llm in engines.items()}
    runs |= {"same depth": (engines["full depth, tapered"], [DEPTH] * batch)}
    if batch > 1:
        runs |= {"mixed depths": (engines["full depth, tapered"], mixed_depths(batch))}
    # Two runs of one engine would share its steps: each is compared with stock on its own.
    result: dict[str, Any] = {"ideal_speedup": round(ideal, 4)}
    stock = {"stock eager": runs.pop("stock eager")}
    for name, run in runs.items():
        times = alternate(stock | {name: run}, STEPS)
        speedup = statistics.median(a / b for a, b in zip(times["stock eager"], times[name], strict=True))
        entry = {
            "stock_eager_ms": round(statistics.median(times["stock eager"]), 3),
            "ms": round(statistics.median(times[name]), 3),
            "speedup": round(speedup, 4),
        }
        if name in ("same depth", "mixed depths"):
            entry |= {"ratio": round(speedup / ideal, 4), "realised_fraction": round((speedup - 1) / (ideal - 1), 4)}
        result[name] = entry
    return result


def costs(llm: LLM) -> dict[str, Any]:
    """Milliseconds of one more layer, and of everything else, by the number of rows: a line through three depths."""
    result = {}
    for batch in COST_BATCHES:
        ms = {depth: [] for depth in COST_DEPTHS}
        for _ in range(COST_ROUNDS):
            for depth in COST_DEPTHS:
                ms[depth] += alternate({"": (llm, [depth] * batch)}, COST_STEPS, warm_up=2)[""]
        medians = [statistics.median(ms[depth]) for depth in COST_DEPTHS]
        slope, fixed = statistics.linear_regression(COST_DEPTHS, medians)
        result[str(batch)] = {"layer_ms": round(slope, 4), "fixed_ms": round(fixed, 3)}
    return result


def ideal_of_mixed(costs_by_rows: dict[str, Any]) -> float:
    """What rows of mixed depths could gain if gathering were free: each layer at the cost of the rows it has."""
    rows = [0, *map(int, costs_by_rows)]
    layer = [0.0, *(cost["layer_ms"] for cost in costs_by_rows.values())]
    batch = max(BATCHES)
    active = [sum(depth > place for depth in mixed_depths(batch)) for place in range(LAYERS)]
    fixed = costs_by_rows[str(batch)]["fixed_ms"]
    full = fixed + LAYERS * costs_by_rows[str(batch)]["layer_ms"]
    return full / (fixed + float(np.interp(active, rows, layer).sum()))


def ideal_speedup(path: Path) -> float:
    """Multiplications of a token at full depth over those at depth 20, and bytes alike: layers and lm_head."""
    config = load_model(path).config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return (LAYERS * layer + head) / (DEPTH * layer + head)


def conditions(path: Path) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("taper-llm", "vllm-cpu", "torch", "transformers")},
        "model": path.name + ", dequantised",
        "dtype": "float32",
        "num_hidden_layers": LAYERS,
        "mean_depth": DEPTH,
        "prompt_tokens": PROMPT_TOKENS,
        "steps": STEPS,
        "statistic": "median; a speedup is the median of the ratios of neighbouring steps",
    }


def main() -> None:
    """Run all parts and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    parser.add_argument("--no-compiled", action="store_true", help="leave out the compiled engine")
    options = parser.parse_args()
    path = PACKAGED_MODELS[DEFAULT_MODEL].path
    with tempfile.TemporaryDirectory() as folder:
        transformers_from_gguf(path).save_pretrained(folder)
        engines = {"stock eager": engine(folder), "full depth, tapered": tapered(folder)}
        if not options.no_compiled:
            engines["stock compiled"] = engine(folder, enforce_eager=False)
    ideal = ideal_speedup(path)
    result: dict[str, Any] = {"conditions": conditions(path)}
    result["batches"] = {str(batch): compare(engines, batch, ideal) for batch in BATCHES}
    result["costs"] = costs(engines["full depth, tapered"])
    mixed = result["batches"][str(max(BATCHES))]["mixed depths"]
    mixed["ideal_with_rows_as_measured"] = round(ideal_of_mixed(result["costs"]), 4)
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
