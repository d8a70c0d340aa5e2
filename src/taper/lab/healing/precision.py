"""The precision of matrix products in f32 while adapters are trained: whichever is fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("highest", "high", "medium")  # of a product's factors: f32, TF32, bf16; sums are always in f32
_ROWS, _SIZE, _TRIES = 512, 1024, 3
_GAIN = 1.2  # the least speedup that is worth the rounding


@contextmanager
def fast_products() -> Iterator[None]:
    """Compute products with factors of fewer bits where that is faster, until the `with` block ends."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(fastest_precision())
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fastest_precision() -> str:
    """The fastest precision in a trial of some milliseconds; a processor may have no fast products of fewer bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, matrix = torch.ones(_ROWS, _SIZE, device=device), torch.ones(_SIZE, _SIZE, device=device)
    before, seconds = torch.get_float32_matmul_precision(), {}
    try:
        for precision in PRECISIONS:
            torch.set_float32_matmul_precision(precision)
            seconds[precision] = min(_seconds(x, matrix) for _ in range(1 + _TRIES))
    finally:
        torch.set_float32_matmul_precision(before)
    best = min(PRECISIONS, key=lambda precision: seconds[precision])
    return best if seconds[PRECISIONS[0]] > _GAIN * seconds[best] else PRECISIONS[0]


def _seconds(x: torch.Tensor, matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    float((x @ matrix)[0, 0])  # waits for a GPU
    return time.perf_counter() - started
