"""Weights from one of ggml's types to another, by way of f32, a few rows at a time."""

from __future__ import annotations

import ctypes
from concurrent.futures import Executor

import ggml
import numpy as np

from ...loading import Tensor
from ...loading.model import WEIGHT_TYPES, row_bytes
from .tensors import aligned

CHUNK = 1 << 20  # weights converted at a time: 4 MB of f32 for each thread

# From this size on, values become infinite: those of the type itself, or else the scale of a block, which is f16.
# IQ4_NL, Q4_K and Q6_K fit their scales to the block, so theirs are a little lower than need be.
_INFINITE = 65520.0  # in f16
_TOO_LARGE = {"F16": _INFINITE, "BF16": 3.3961775e38} | {
    dtype: factor * _INFINITE
    for dtype, factor in {"Q8_0": 127, "Q6_K": 4000, "Q5_0": 16, "Q4_K": 60, "IQ4_NL": 112, "Q4_0": 8}.items()
}


class OutOfRangeError(ValueError):
    """A value that a type cannot hold; it is the only argument."""


def convert(tensor: Tensor, dtype: str, pool: Executor | None = None) -> np.ndarray:
    """The bytes of a tensor as another of ggml's types; uint8 [bytes], aligned.

    Args:
        tensor: what to convert.
        dtype: a name in `WEIGHT_TYPES` whose blocks fit the rows.
        pool: threads that share the rows; None converts on this one.

    Raises:
        OutOfRangeError: a value that the type cannot hold.
    """
    columns = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    width, source_width = row_bytes(dtype, columns), row_bytes(tensor.dtype, columns)
    target, source = aligned(rows * width), np.ascontiguousarray(tensor.data)
    step = max(1, CHUNK // columns)

    def convert_rows(first: int) -> None:
        count = min(step, rows - first)
        floats = _as_floats(source[first * source_width : (first + count) * source_width], tensor.dtype)
        _check_range(floats, _TOO_LARGE.get(dtype))
        pointer = floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        destination = target.ctypes.data + first * width
        ggml.ggml_quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, destination, 0, count, columns, None)

    for _ in (pool.map if pool else map)(convert_rows, range(0, rows, step)):
        pass
    return target


def _as_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """Whole blocks, uint8 [bytes], as float32 [weights]."""
    type_id, block, size = WEIGHT_TYPES[dtype]
    floats = np.empty(len(data) // size * block, np.float32)
    if dtype == "F32":
        floats.view(np.uint8)[:] = data
    else:
        to_float = ggml.ggml_get_type_traits(type_id).contents.to_float
        to_float(data.ctypes.data, floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(floats))
    return floats


def _check_range(values: np.ndarray, too_large: float | None) -> None:
    if too_large is not None:
        for value in (float(values.min()), float(values.max())):  # NaN, if there is one
            if not abs(value) < too_large:
                raise OutOfRangeError(value)
