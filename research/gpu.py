"""What a GPU takes for exact mode, for sampling and for healing: a JSON document for each phase, written as it ends.

    python research/gpu.py --out research/results
    python research/gpu.py --tiny --out FOLDER

Random weights in bf16, on a GPU that does nothing else (two minutes each). *exact*: the time of a forward that verifies
1 to 16 tokens, of a token drafted with a third and with half of the layers, and how often drafted tokens must come true
for exact mode to pay. *sampling*: the time of a step and of sampling from its logits, which are of such a spread that
candidates suffice. *healing*: tokens a second of training adapters. With --tiny, a tiny shape on this machine's CPU,
which shows only that the script works.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from decode import write

from taper.backends import TokenBatch
from taper.backends.torch import TorchBackend
from taper.lab.bench.shapes import SHAPES, TINY
from taper.lab.bench.torch_device import device_name, random_weights, synchronize
from taper.lab.calibration.replay import Reference
from taper.lab.healing.student import Student
from taper.lab.healing.train import Training
from taper.models.config import ModelConfig
from taper.policy import DepthPolicy, active_prefixes, middle_first_order
from taper.sampling import SamplingParams, sample

WIDTHS, SHARES = (1, 2, 4, 8, 16), (1 / 3, 1 / 2)
STEPS, CONTEXT, FIRST = 20, 1024, 300
ROWS = (1, 8, 32)
OUTPUT_TOKENS, PROMPT_TOKENS, LESSONS, RANK = 512, 64, 64, 64
LLAMA = SHAPES["llama-3-8b"]
QWEN = replace(
    LLAMA,
    layers=LLAMA.layers[:28],
    hidden_size=1536,
    intermediate_size=8960,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def forward_ms(backend: TorchBackend, num_active: tuple[int, ...], width: int) -> float:
    """The median time of a forward of the next tokens of a sequence, from its batch to its argmaxes."""
    times = []
    for step in range(STEPS + 3):
        positions = FIRST + 16 * step + np.arange(width, dtype=np.int32)
        rows = tuple(range(width))
        batch = TokenBatch(positions % 100, positions, np.zeros(width, np.int32), num_active, greedy_rows=rows)
        started = time.perf_counter()
        backend.forward(batch)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[3:])


def needed_chance(step_ms: float, draft_ms: float, verify_ms: float, count: int) -> float | None:
    """How often a drafted token must come true so that drafting `count` of them and verifying them pays."""

    def gain(chance: float) -> float:
        tokens = sum(chance**number for number in range(count + 1))  # those that come true, and one more
        return tokens * step_ms / (count * draft_ms + verify_ms)

    if gain(1.0) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 1 else (middle, high)
    return round(high, 3)


def exact(config: ModelConfig, device: str) -> dict[str, Any]:
    """Times of verifying and of drafting, and the acceptance that they need."""
    dtype = "bf16" if device == "cuda" else "f32"
    weights = random_weights(config, dtype, device)
    backend = TorchBackend(config, weights, context_length=CONTEXT, dtype=dtype, device=device)
    layers = config.num_hidden_layers
    prompt = np.arange(FIRST, dtype=np.int32)
    backend.forward(TokenBatch(prompt % 100, prompt, np.zeros(FIRST, np.int32), (FIRST,) * layers))
    verify = {width: forward_ms(backend, (width,) * layers, width) for width in WIDTHS}
    drafts = {}
    for share in SHARES:
        depth = max(1, round(share * layers))
        draft = forward_ms(backend, active_prefixes(middle_first_order(layers), layers, [depth]), 1)
        counts = [width - 1 for width in WIDTHS[1:]]
        chances = {count: needed_chance(verify[1], draft, verify[count + 1], count) for count in counts}
        drafts[f"{depth} of {layers} layers"] = {"draft_ms": round(draft, 4), "needed_acceptance": chances}
    ngrams = {width - 1: needed_chance(verify[1], 0.0, verify[width], width - 1) for width in WIDTHS[1:]}
    backend.close()
    return {
        "verify_ms": {width: round(ms, 4) for width, ms in verify.items()},
        "n-grams": {"draft_ms": 0.0, "needed_acceptance": ngrams},
    } | drafts


def sampling(config: ModelConfig, device: str) -> dict[str, Any]:
    """Milliseconds of a step with its tokens: greedily, from all logits, and from candidates; they take turns."""
    dtype = "bf16" if device == "cuda" else "f32"
    config = replace(config, logit_scale=4.0)
    weights, result = random_weights(config, dtype, device), {}
    params, rng = SamplingParams(temperature=0.7, top_k=20, top_p=0.8), np.random.default_rng(0)
    for count in ROWS:
        options = {"num_slots": count, "context_length": CONTEXT, "dtype": dtype, "device": device}
        backend, rows = TorchBackend(config, weights, **options), tuple(range(count))
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"greedy_rows": rows},
            "all logits": {"logits_rows": rows},
            "candidates": {"preview_rows": rows},
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(STEPS + 3):
            slots, positions = np.arange(count, dtype=np.int32), np.full(count, FIRST + step, np.int32)
            for way, asks in ways.items():
                batch = TokenBatch(positions % 100, positions, slots, (count,) * config.num_hidden_layers, **asks)
                started = time.perf_counter()
                output = backend.forward(batch)
                for logits in output.logits:
                    sample(logits, params, rng)
                for few in output.previews:
                    ids, logits = few.shortlist(params.reach(config.vocab_size)) or (None, few.whole())
                    sample(logits, params, rng, ids)
                times[way].append(time.perf_counter() - started)
        backend.close()
        result[f"{count} rows"] = {way: round(1e3 * statistics.median(each[3:]), 4) for way, each in times.items()}
    return result


def healing(config: ModelConfig, device: str) -> dict[str, Any]:
    """Tokens a second of training adapters: of a first pass, which runs full depth too, and of a second."""
    policy = DepthPolicy.middle_first(config.num_hidden_layers, 0.99)
    dtype = "bf16" if device == "cuda" else "f32"
    model = SimpleNamespace(config=config, tensors=random_weights(config, dtype, device))
    student = Student(model, policy.skip_order, PROMPT_TOKENS + OUTPUT_TOKENS, device, dtype)
    training = Training(student, policy, policy.skip_order, RANK, 3600.0, 0)
    rng, pool = np.random.default_rng(0), []
    for _ in range(LESSONS if device == "cuda" else 4):
        ids = rng.integers(0, config.vocab_size, PROMPT_TOKENS + OUTPUT_TOKENS).tolist()
        pool.append(Reference((*ids[:PROMPT_TOKENS],), (*ids[PROMPT_TOKENS:],)))
    speeds = []
    for _ in range(2):
        before, started = training.tokens, time.perf_counter()
        while training.tokens - before < 2 * len(pool) * OUTPUT_TOKENS:
            training._step([pool])
        synchronize(device)
        speeds.append(round((training.tokens - before) / (time.perf_counter() - started)))
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "steps_together": student.together,
        "first_tokens_per_second": speeds[0],
        "tokens_per_second": speeds[1],
        "peak_memory_gb": round(memory / 1e9, 1),
    }


PHASES: Mapping[str, tuple[str, ModelConfig, Callable[[ModelConfig, str], dict[str, Any]]]] = {
    "exact": ("llama-3-8b", LLAMA, exact),
    "sampling": ("llama-3-8b", LLAMA, sampling),
    "healing": ("that of Qwen2.5 1.5B", QWEN, healing),
}


def main() -> None:
    """Run phases, and write the document of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    for phase in options.phases:
        shape, config, measure = PHASES[phase]
        conditions = {
            "date": datetime.date.today().isoformat(),
            "device": device_name(device),
            "shape": "tiny" if options.tiny else shape,
            "torch": torch.__version__,
        }
        result = measure(TINY if options.tiny else config, device)
        write(options.out / f"gpu_{phase}.json", {"conditions": conditions} | result)
        print(phase, result, flush=True)


if __name__ == "__main__":
    main()
