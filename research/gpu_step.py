"""A decode step on a GPU, in PyTorch's operations and in fused kernels: JSON documents.

    python research/gpu_step.py --out research/results/gpu_step.json
    python research/gpu_step.py --rows 1 8 32 --out research/results/gpu_rows.json
    python research/gpu_step.py --tiles --out research/results/gpu_tiles.json
    python research/gpu_step.py --dtype q4_k_m --out research/results/gpu_step_q4_k_m.json
    TRITON_INTERPRET=1 python research/gpu_step.py --tiny --rows 1 2 --out tiny.json

Random weights in the shape of Llama 2 7B, or of another with `--shape`, bf16, on a GPU that does nothing else (a minute
each). A step is timed on the host, from its batch to its argmax, and the graph alone on the device. Variants take
turns. With `--rows`, steps are those of so many rows, at full depth and at mixed depths. With `--tiles`, each kind of
product tries several tiles, and the whole step says which is best. With `--dtype`, matrices are random blocks of a
quantised type that keep their bits, and steps are compared with those of the kernels with bf16; `q4_k_m` is Q4_K with
Q6_K for the head and for values and down projections of every second layer. `--tiny` tries all this on a tiny model,
but these two types, and where there is no GPU in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from interpreted import Interpreted

from taper.backends import TokenBatch, fused
from taper.backends.fused import RowsTile, Tile
from taper.backends.torch import TorchBackend
from taper.lab.bench.measure import step_bytes
from taper.lab.bench.shapes import SHAPES, TINY
from taper.lab.bench.torch_device import copy_bandwidth, device_name, random_weights, synchronize
from taper.models.config import ModelConfig, expected_shapes
from taper.models.tensors import WEIGHT_TYPES, Tensor, row_bytes
from taper.policy import DepthPolicy, active_prefixes, middle_first_order

TILES = [
    Tile(*tile)
    for tile in (
        (1, 2048, 8), (1, 4096, 4), (1, 4096, 8), (1, 4096, 16), (2, 4096, 8), (2, 4096, 16), (2, 512, 2), (4, 256, 2),
        (4, 512, 4), (8, 256, 2), (8, 512, 2), (8, 512, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 8),
    )
]  # fmt: skip
PACKED_TILES = [
    Tile(*tile)
    for tile in (
        (1, 4096, 4), (2, 2048, 2), (2, 4096, 2), (2, 4096, 4), (2, 4096, 8), (4, 1024, 1), (4, 2048, 2), (4, 4096, 4),
        (4, 4096, 8), (8, 1024, 1), (8, 2048, 2), (8, 2048, 4), (8, 4096, 4), (8, 4096, 8), (16, 2048, 4),
    )
]  # fmt: skip
ROWS_TILES = [
    RowsTile(*tile)
    for tile in (
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 3),
        (128, 64, 8, 4), (32, 64, 4, 4), (32, 128, 4, 4), (16, 128, 4, 4), (16, 256, 4, 3),
    )
]  # fmt: skip
PRODUCTS = {"QKV_TILE": TILES, "GATE_UP_TILE": TILES, "TILE": TILES}
PACKED_PRODUCTS = {f"PACKED_{name}": PACKED_TILES for name in PRODUCTS}
ROWS_PRODUCTS = {"ROWS_TILE": ROWS_TILES, "ROWS_GATE_UP_TILE": ROWS_TILES}
PACKED_ROWS_PRODUCTS = {"PACKED_ROWS_TILE": ROWS_TILES}

Weights = Mapping[str, Any]  # PyTorch's tensors, or ours


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    config: ModelConfig
    device: str = "cuda"
    dtype: str = "bf16"
    context: int = 2049
    depths: tuple[int, ...] = (32, 28, 24, 20, 16)
    positions: tuple[int, ...] = (100, 500, 2000)
    rows_position: int = 500  # in the middle of those of several rows
    steps: int = 20
    warm_up: int = 3
    rounds: int = 5
    num_tiles: int | None = None  # all

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.config.num_hidden_layers

    def active(self, depths: Sequence[int]) -> tuple[int, ...]:
        """How many of the rows run each layer, deepest first."""
        return active_prefixes(middle_first_order(self.layers), self.layers, depths)

    def mixed(self, count: int) -> list[int]:
        """Depths from full to the third of these, deepest first; of one row, the second."""
        return [self.depths[1]] if count == 1 else np.linspace(self.layers, self.depths[2], count).astype(int).tolist()


def tiny_settings() -> Settings:
    """Those for a tiny model, on a GPU or without."""
    place = ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "f16")  # the interpreter's products lack bf16
    few = {"steps": 1, "warm_up": 0, "rounds": 1, "num_tiles": 2}
    return Settings(TINY, *place, 129, (6, 4, 3), (10,), rows_position=70, **few)


def random_blocks(config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    """Weights of a shape: matrices that repeat a pattern of random blocks of a type, norms of ones.

    Scales, which stand first in a block but in Q6_K, give matrices a spread of 0.02, and a mean of 0.
    """
    by_type = {"Q8_0": [0.00027], "Q4_0": [0.0043], "Q4_K": [0.00008, 0.0006], "Q6_K": [1.46e-5]}

    @cache
    def pattern(dtype: str) -> np.ndarray:
        blocks = np.random.default_rng(0).integers(0, 256, (1 << 20, WEIGHT_TYPES[dtype][2]), np.uint8)
        scales = np.array(by_type[dtype], np.float16).view(np.uint8)
        blocks[:, slice(-2, None) if dtype == "Q6_K" else slice(len(scales))] = scales
        return blocks

    def type_of(name: str) -> str:
        if dtype != "Q4_K_M":
            return dtype
        layer, _, part = name.removeprefix("layers.").partition(".")
        is_wide = part in ("v_proj", "down_proj") and int(layer) % 2 == 0
        return "Q6_K" if is_wide or name == "lm_head" else "Q4_K"

    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) > 1:
            kind = type_of(name)
            tensors[name] = Tensor(kind, shape, np.resize(pattern(kind), shape[0] * row_bytes(kind, shape[1])))
        else:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
    return tensors


def open_backend(
    settings: Settings, weights: Weights, dtype: str = "", kernels: bool = True, num_slots: int = 1
) -> TorchBackend:
    """A backend with or without fused kernels; it shares the weights. With them, quantised ones keep their bits."""
    sizes = {"num_slots": num_slots, "context_length": settings.context}
    options = {"dtype": dtype or settings.dtype, "device": settings.device, "keep_bits": kernels}
    make = Interpreted if settings.device == "cpu" else TorchBackend
    backend = make(settings.config, weights, **options, **sizes)
    assert backend._fused is not None, "Triton does not work here"
    if not kernels:
        backend._fused = None
    return backend


def batch_of(settings: Settings, depths: Sequence[int], position: int) -> TokenBatch:
    """A step of a token for each depth, deepest first; their positions lie around this one."""
    count = len(depths)
    positions = np.linspace(position * 0.8, position * 1.2, count) if count > 1 else [position]
    rows = (np.array(values, np.int32) for values in (range(1, count + 1), positions, range(count)))
    return TokenBatch(*rows, settings.active(depths), greedy_rows=tuple(range(count)), fill=True)


def step_ms(settings: Settings, backend: TorchBackend, batch: TokenBatch) -> float:
    """The median time of a step, after a warm-up, in which PyTorch's operations make keys of states that passed."""
    times = []
    for step in range(settings.steps + settings.warm_up):
        started = time.perf_counter()
        backend.forward(batch)
        if step >= settings.warm_up:
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def graph_ms(settings: Settings, backend: TorchBackend, batch: TokenBatch) -> float:
    """The mean time of a step's graph alone, replayed without a pause; of the whole step where it has no graph."""
    backend._graphs.clear()
    backend.forward(batch)
    if settings.device == "cpu" or not backend._graphs:
        return step_ms(settings, backend, batch)
    replay = next(reversed(backend._graphs.values()))
    cells = (cell.cell_contents for cell in replay.__closure__ or ())
    (graph,) = (value for value in cells if isinstance(value, torch.cuda.CUDAGraph))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(settings.steps):
        graph.replay()
    end.record()
    synchronize(settings.device)
    return begin.elapsed_time(end) / settings.steps


def logits_after(settings: Settings, backend: TorchBackend, depth: int) -> np.ndarray:
    """The logits of the tenth step after a random prompt."""
    length = min(300, settings.context // 2)
    tokens = np.random.default_rng(0).integers(0, settings.config.vocab_size, length).astype(np.int32)
    rows = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    backend.forward(TokenBatch(tokens, *rows, (length,) * settings.layers, logits_rows=(length - 1,)))
    for position in range(length, length + 10):
        output = backend.forward(replace(batch_of(settings, [depth], position), logits_rows=(0,), greedy_rows=()))
    return output.logits[0]


def relative(logits: np.ndarray, true: np.ndarray) -> float:
    """How far logits are from true ones, relative to these."""
    return float(f"{np.linalg.norm(logits - true) / np.linalg.norm(true):.3g}")


def errors(settings: Settings, weights: Weights) -> list[dict[str, Any]]:
    """How far the logits of both variants are from those of PyTorch's operations in f32."""
    in_f32 = {name: weight.float() if isinstance(weight, torch.Tensor) else weight for name, weight in weights.items()}
    exact = open_backend(settings, in_f32, "f32", kernels=False)
    variants = {"pytorch": open_backend(settings, weights, kernels=False), "fused": open_backend(settings, weights)}
    rows = []
    for depth in (settings.layers, settings.mixed(2)[-1]):
        true = logits_after(settings, exact, depth)
        of_variants = {name: relative(logits_after(settings, each, depth), true) for name, each in variants.items()}
        rows.append({"depth": depth} | of_variants)
    return rows


def timed(
    settings: Settings, variants: Mapping[str, TorchBackend], batch: TokenBatch, bandwidth: float
) -> dict[str, Any]:
    """The times of a step in each variant, and what it reads: weights of the layers that run, and cells."""
    order, deepest = middle_first_order(settings.layers), sum(n > 0 for n in batch.num_active)
    retained = DepthPolicy.static(settings.layers, deepest, order).retained_at(deepest)
    weights = {name: step_bytes(backend.weight_bytes, retained) for name, backend in variants.items()}
    cells = sum(int(batch.positions[:n].sum()) for n in batch.num_active)
    cells *= 2 * 2 * settings.config.num_key_value_heads * settings.config.head_dim  # keys and values of two bytes each
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(settings.rounds):
        for name, backend in variants.items():
            times[name].append((graph_ms(settings, backend, batch), step_ms(settings, backend, batch)))
    row: dict[str, Any] = {"cells_mb": round(cells / 1e6)}
    for name, pairs in times.items():
        graph, step = (statistics.median(column) for column in zip(*pairs, strict=True))
        row[name] = {"read_mb": round(weights[name] / 1e6), "graph_ms": round(graph, 4), "step_ms": round(step, 4)}
        row[name]["bandwidth_used"] = round((weights[name] + cells) / step * 1e3 / bandwidth, 3)
    return row


def steps(settings: Settings, variants: Mapping[str, TorchBackend], bandwidth: float) -> list[dict[str, Any]]:
    """Times of steps of one token, by position and depth."""
    rows = []
    for position in settings.positions:
        for depth in settings.depths:
            row = {"position": position, "depth": depth}
            row |= timed(settings, variants, batch_of(settings, [depth], position), bandwidth)
            print(row, flush=True)
            rows.append(row)
    return rows


def steps_of_rows(
    settings: Settings, weights: Weights, counts: Sequence[int], bandwidth: float
) -> list[dict[str, Any]]:
    """Times of steps of several rows at full depth and at mixed depths, and how far apart the variants' logits are."""
    rows = []
    for count in counts:
        variants = {
            name: open_backend(settings, weights, kernels=name == "fused", num_slots=count)
            for name in ("pytorch", "fused")
        }
        variants["fused"]._cache.normal_(0, 1)
        variants["pytorch"]._cache.copy_(variants["fused"]._cache)
        for depths in ([settings.layers] * count, settings.mixed(count)):
            batch = batch_of(settings, depths, settings.rows_position)
            asks = replace(batch, logits_rows=tuple(range(count)))
            exact, found = (backend.forward(asks).logits for backend in variants.values())
            row = {"rows": count, "depths": sorted(set(depths)), "difference": relative(found, exact)}
            row |= timed(settings, variants, batch, bandwidth)
            print(row, flush=True)
            rows.append(row)
    return rows


def tiles(settings: Settings, weights: Weights, count: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a full step's graph by tile, one kind of product after another."""
    backend, times_by_product = open_backend(settings, weights, num_slots=count), {}
    batch = batch_of(settings, [settings.layers] * count, settings.rows_position)
    kinds = (PACKED_PRODUCTS, PACKED_ROWS_PRODUCTS) if backend._packed else (PRODUCTS, ROWS_PRODUCTS)
    for product, choices in kinds[count > 1].items():
        times = {}
        for tile in choices[: settings.num_tiles]:
            setattr(fused, product, tile)
            backend._fused = backend._open_fused()
            try:
                times[tile] = min(graph_ms(settings, backend, batch) for _ in range(2))
            except triton.runtime.errors.OutOfResources:
                continue
        setattr(fused, product, min(times, key=times.__getitem__))
        times_by_product[product] = {" x ".join(map(str, tile)): round(ms, 4) for tile, ms in times.items()}
        print(count, product, times_by_product[product], flush=True)
    return times_by_product


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--dtype", choices=("q8_0", "q4_0", "q4_k", "q6_k", "q4_k_m"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    settings = tiny_settings() if options.tiny else Settings(SHAPES[options.shape])
    if settings.device == "cpu":  # the interpreter takes milliseconds for each program
        for product in (*PRODUCTS, *PACKED_PRODUCTS):
            setattr(fused, product, Tile(64, 64, 4))
        fused.PACKED_ROWS_TILE = RowsTile(64, 64, 4, 3)
    bandwidth, weights = (
        copy_bandwidth(settings.device),
        random_weights(settings.config, settings.dtype, settings.device),
    )
    dense = weights
    if options.dtype:
        weights = random_blocks(settings.config, options.dtype.upper())
    shape = "tiny" if options.tiny else options.shape
    conditions = {"date": datetime.date.today().isoformat(), "gpu": device_name(settings.device), "shape": shape}
    conditions |= {"dtype": options.dtype or settings.dtype}
    conditions |= {"torch": torch.__version__, "triton": triton.__version__, "copy_gb_per_s": round(bandwidth / 1e9)}
    result: dict[str, Any] = {"conditions": conditions}
    if options.tiles:
        by_count = {count: tiles(settings, weights, count) for count in options.rows or [1]}
        result["tiles"] = by_count if options.rows else by_count[1]
    elif options.rows:
        result["rows"] = steps_of_rows(settings, weights, options.rows, bandwidth)
    else:
        beside = "bf16" if options.dtype else "pytorch"
        variants = {beside: open_backend(settings, dense, kernels=bool(options.dtype))}
        variants["fused"] = open_backend(settings, weights)
        result |= {"errors": errors(settings, weights), "steps": steps(settings, variants, bandwidth)}
    print(result["conditions"], result.get("errors"))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
