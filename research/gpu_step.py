"""A decode step of one token on a GPU, in PyTorch's operations and in fused kernels: two JSON documents.

    python research/gpu_step.py --out research/results/gpu_step.json
    python research/gpu_step.py --tiles --out research/results/gpu_tiles.json

Random weights in the shape of Llama 2 7B, bf16, on a GPU that does nothing else (a minute each). A step is timed on the
host, from its batch to its argmax, and the graph alone on the device. Variants take turns. With `--tiles`, each kind of
product tries several tiles, and the whole step says which is best.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from taper.backends import TokenBatch, fused
from taper.backends.fused import Tile
from taper.backends.torch import TorchBackend
from taper.lab.bench.measure import step_bytes
from taper.lab.bench.shapes import SHAPES
from taper.lab.bench.torch_device import copy_bandwidth, random_weights
from taper.policy import DepthPolicy, active_prefixes, middle_first_order

SHAPE, CONTEXT, STEPS, ROUNDS = "llama-2-7b", 2049, 20, 5
CONFIG = SHAPES[SHAPE]
LAYERS = CONFIG.num_hidden_layers
ORDER = middle_first_order(LAYERS)
DEPTHS, POSITIONS = (32, 28, 24, 20, 16), (100, 500, 2000)
TILES = [
    Tile(*tile)
    for tile in (
        (1, 2048, 8), (1, 4096, 4), (1, 4096, 8), (1, 4096, 16), (2, 4096, 8), (2, 4096, 16), (2, 512, 2), (4, 256, 2),
        (4, 512, 4), (8, 256, 2), (8, 512, 2), (8, 512, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 8),
    )
]  # fmt: skip
PRODUCTS = ("QKV_TILE", "GATE_UP_TILE", "TILE")

Weights = Mapping[str, torch.Tensor]


def open_backend(weights: Weights, dtype: str = "bf16", kernels: bool = True) -> TorchBackend:
    """A backend with or without fused kernels; it shares the weights."""
    backend = TorchBackend(CONFIG, weights, context_length=CONTEXT, dtype=dtype, device="cuda")
    assert backend._fused is not None, "Triton does not work here"
    if not kernels:
        backend._fused = None
    return backend


def batch_of(depth: int, position: int) -> TokenBatch:
    """A step of one token."""
    tokens, positions, slots = (np.array([value], np.int32) for value in (1, position, 0))
    active = active_prefixes(ORDER, LAYERS, [depth])
    return TokenBatch(tokens, positions, slots, active, greedy_rows=(0,), fill=True)


def step_ms(backend: TorchBackend, depth: int, position: int) -> float:
    """The median time of a step, after a warm-up, in which PyTorch's operations make keys of states that passed."""
    times, batch = [], batch_of(depth, position)
    for step in range(STEPS + 3):
        started = time.perf_counter()
        backend.forward(batch)
        if step >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def graph_ms(backend: TorchBackend, depth: int, position: int) -> float:
    """The mean time of a step's graph alone, replayed without a pause."""
    backend.forward(batch_of(depth, position))
    replay = next(reversed(backend._graphs.values()))
    cells = (cell.cell_contents for cell in replay.__closure__ or ())
    (graph,) = (value for value in cells if isinstance(value, torch.cuda.CUDAGraph))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def logits_after(backend: TorchBackend, depth: int) -> np.ndarray:
    """The logits of the tenth step after a random prompt of 300 tokens."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 300).astype(np.int32)
    rows = np.arange(300, dtype=np.int32), np.zeros(300, np.int32)
    backend.forward(TokenBatch(tokens, *rows, (300,) * LAYERS, logits_rows=(299,)))
    for position in range(300, 310):
        output = backend.forward(replace(batch_of(depth, position), logits_rows=(0,), greedy_rows=()))
    return output.logits[0]


def errors(weights: Weights) -> list[dict[str, Any]]:
    """How far the logits of both variants in bf16 are from those of PyTorch's operations in f32, relative to these."""
    exact = open_backend({name: weight.float() for name, weight in weights.items()}, "f32", kernels=False)
    variants = {"pytorch": open_backend(weights, kernels=False), "fused": open_backend(weights)}
    rows = []
    for depth in (32, 20):
        true = logits_after(exact, depth)
        by_variant = {name: logits_after(backend, depth) for name, backend in variants.items()}
        relative = {name: np.linalg.norm(logits - true) / np.linalg.norm(true) for name, logits in by_variant.items()}
        rows.append({"depth": depth} | {name: float(f"{value:.3g}") for name, value in relative.items()})
    return rows


def steps(weights: Weights, bandwidth: float) -> list[dict[str, Any]]:
    """Times by position and depth."""
    variants = {"pytorch": open_backend(weights, kernels=False), "fused": open_backend(weights)}
    sizes, rows = variants["fused"].weight_bytes, []
    for position in POSITIONS:
        for depth in DEPTHS:
            read = step_bytes(sizes, DepthPolicy.static(LAYERS, depth, ORDER).retained_at(depth))
            row: dict[str, Any] = {"position": position, "depth": depth, "read_mb": round(read / 1e6)}
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
            for _ in range(ROUNDS):
                for name, backend in variants.items():
                    times[name].append((graph_ms(backend, depth, position), step_ms(backend, depth, position)))
            for name, pairs in times.items():
                graph, step = (statistics.median(column) for column in zip(*pairs, strict=True))
                row[name] = {"graph_ms": round(graph, 4), "step_ms": round(step, 4)}
                row[name]["bandwidth_used"] = round(read / step * 1e3 / bandwidth, 3)
            print(row, flush=True)
            rows.append(row)
    return rows


def tiles(weights: Weights) -> dict[str, dict[str, float]]:
    """Milliseconds of a full step's graph at position 500 by tile, one kind of product after another."""
    backend, timed = open_backend(weights), {}
    for product in PRODUCTS:
        times = {}
        for tile in TILES:
            setattr(fused, product, tile)
            backend._graphs.clear()
            times[tile] = min(graph_ms(backend, LAYERS, 500) for _ in range(2))
        setattr(fused, product, min(times, key=times.__getitem__))
        timed[product] = {" x ".join(map(str, tile)): round(ms, 4) for tile, ms in times.items()}
        print(product, timed[product], flush=True)
    return timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    bandwidth, weights = copy_bandwidth("cuda"), random_weights(CONFIG, "bf16", "cuda")
    conditions = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "shape": SHAPE}
    conditions |= {"torch": torch.__version__, "triton": triton.__version__, "copy_gb_per_s": round(bandwidth / 1e9)}
    result: dict[str, Any] = {"conditions": conditions}
    if options.tiles:
        result["tiles"] = tiles(weights)
    else:
        result |= {"errors": errors(weights), "steps": steps(weights, bandwidth)}
    print(result["conditions"], result.get("errors"))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
