"""What keys and values of skipped layers add to a step of one token, at the least depth of policies.

    python research/fill_cost.py --out research/results/fill_cost.json

Three kinds of steps take turns, after a context of 128 tokens: those that leave no keys and values, those that let the
states that pass wait, as Taper does, and those that compute them at once. Then what waits is computed together, as a
later turn would. Besides the named models, it measures random Q4_0 weights in the shape of Llama-2-7B, whose keys and
values are as wide as its hidden states: the most that filling can cost. Leave the machine alone while it runs (about
five minutes).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, write

from taper import DepthPolicy
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.lab.bench.shapes import SHAPES
from taper.models import find_model, load_model
from taper.models.config import ModelConfig, expected_shapes
from taper.models.policies import fitting_policies
from taper.models.tensors import WEIGHT_TYPES, Tensor, row_bytes
from taper.policy import active_prefixes

MODELS = ("qwen2.5-coder-1.5b-instruct", "smollm2-135m-instruct")
THREADS, CONTEXT, FILLED_TOKENS = 2, 512, 128
STEPS = 200  # of each kind; a quarter of them for the large shape
KINDS, LATER_TOKENS = ("none", "waiting", "at once"), 256
SHAPE, PAPER_DEPTH = "llama-2-7b", 20


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Q4_0 weights for a shape: random quants, and scales that keep hidden states finite."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
            continue
        blocks = rng.bytes(shape[0] * row_bytes("Q4_0", shape[1]))
        data = np.frombuffer(bytearray(blocks), np.uint8).reshape(-1, WEIGHT_TYPES["Q4_0"][2])
        data[:, :2] = np.array([shape[1] ** -0.5 / 8], np.float16).view(np.uint8)
        tensors[name] = Tensor("Q4_0", shape, data.reshape(-1))
    return tensors


def targets() -> Iterator[tuple[str, GgmlBackend, dict[str, DepthPolicy], Path | None]]:
    """Models on their backends, one at a time, with the policies to measure."""
    for name in MODELS:
        path = find_model(name)
        loaded = load_model(path)
        backend = GgmlBackend(loaded.config, loaded.tensors, context_length=CONTEXT, threads=THREADS)
        yield name, backend, fitting_policies(loaded.config.num_hidden_layers, loaded.config.identity), path
        backend.close()
    config = SHAPES[SHAPE]
    backend = GgmlBackend(config, random_tensors(config), context_length=CONTEXT, threads=THREADS)
    policy = DepthPolicy.middle_first(config.num_hidden_layers, 0.99, min_depth=PAPER_DEPTH)
    yield f"{SHAPE}, random Q4_0", backend, {f"depth {PAPER_DEPTH}": policy}, None


def step_s(backend: GgmlBackend, num_active: tuple[int, ...], position: int, kind: str) -> float:
    """Seconds of a forward of one token."""
    batch = TokenBatch(
        np.array([position % backend.config.vocab_size], np.int32),
        np.array([position], np.int32),
        np.zeros(1, np.int32),
        num_active,
        greedy_rows=(0,),
        fill=kind != "none",
    )
    room = backend._passing.size
    backend._passing.size = 0 if kind == "at once" else room  # without room, nothing waits
    try:
        started = time.perf_counter()
        backend.forward(batch)
        return time.perf_counter() - started
    finally:
        backend._passing.size = room


def later_s(backend: GgmlBackend) -> tuple[float, int]:
    """Seconds to compute all that waits, and how many tokens these are."""
    passing = backend._passing
    tokens = len({*zip(passing._slots[: passing._count], passing._positions[: passing._count], strict=True)})
    started = time.perf_counter()
    passing.settle(0, 0, backend.context_length, backend._write_cells)
    return time.perf_counter() - started, tokens


def cost(backend: GgmlBackend, policy: DepthPolicy, steps: int) -> dict[str, Any]:
    """Milliseconds of steps of each kind, in turn; what waiting and filling at once add; and what comes later."""
    layers, depth = backend.config.num_hidden_layers, policy.min_depth
    num_active = active_prefixes(policy.skip_order, layers, [depth])
    start = np.arange(FILLED_TOKENS, dtype=np.int32)
    tokens = start % backend.config.vocab_size
    backend.forward(TokenBatch(tokens, start, start * 0, (FILLED_TOKENS,) * layers, greedy_rows=(0,)))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(-4, steps):
        for kind in KINDS[:: 1 if step % 2 else -1]:
            taken = step_s(backend, num_active, FILLED_TOKENS + step % 64, kind)
            if step >= 0:
                seconds[kind].append(taken)
    step_ms = {kind: round(1e3 * statistics.median(taken), 3) for kind, taken in seconds.items()}
    added = {
        kind: round(statistics.median(a / b - 1 for a, b in zip(seconds[kind], seconds["none"], strict=True)), 4)
        for kind in KINDS[1:]
    }
    for position in range(FILLED_TOKENS, FILLED_TOKENS + LATER_TOKENS):
        step_s(backend, num_active, position, "waiting")
    later, tokens = later_s(backend)
    return {
        "depth": depth,
        "num_hidden_layers": layers,
        "step_ms": step_ms,
        "added": added,
        "later_ms_a_token": round(1e3 * later / tokens, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"models": {}}
    for name, backend, policies, path in targets():
        steps = STEPS if path else STEPS // 4
        result["conditions"] = conditions(path or find_model(MODELS[0])) | {"threads": THREADS, "steps": STEPS}
        result["models"][name] = {label: cost(backend, policy, steps) for label, policy in policies.items()}
        write(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
