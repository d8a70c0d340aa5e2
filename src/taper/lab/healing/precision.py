"""The type of the factors of matrix products while adapters are trained: bf16 where that is faster on this machine."""

from __future__ import annotations

import time

import torch

_ROWS, _SIZE, _TRIES = 512, 1024, 3
_GAIN = 1.2  # the least speedup that is worth the rounding


def fastest_dtype(device: str) -> str:
    """`bf16` or `f32`, by a trial of some milliseconds: not every processor has fast products of bf16."""
    x, matrix = torch.ones(_ROWS, _SIZE, device=device), torch.ones(_SIZE, _SIZE, device=device)
    f32, bf16 = (
        min(_seconds(x, matrix.to(dtype)) for _ in range(1 + _TRIES)) for dtype in (torch.float32, torch.bfloat16)
    )
    return "bf16" if f32 > _GAIN * bf16 else "f32"


def _seconds(x: torch.Tensor, matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    float((x.to(matrix.dtype) @ matrix)[0, 0])  # waits for a GPU
    return time.perf_counter() - started
