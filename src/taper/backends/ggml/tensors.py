"""ggml tensors over memory that numpy owns or sees."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np

from . import library
from .library import ggml

ALIGNMENT = 32
_TYPES = {
    np.dtype(np.float32): library.TYPE_F32,
    np.dtype(np.float16): library.TYPE_F16,
    np.dtype(np.int32): library.TYPE_I32,
    np.dtype(np.int64): library.TYPE_I64,
}


class TensorContext:
    """A ggml context with room for `num_tensors`, which owns no tensor data; freed with this object."""

    def __init__(self, num_tensors: int, graph_nodes: int = 0) -> None:
        size = num_tensors * ggml.tensor_overhead()
        if graph_nodes:
            size += ggml.graph_overhead_custom(graph_nodes, False)
        self.pointer = ggml.init(library.InitParams(mem_size=size, no_alloc=True))
        weakref.finalize(self, ggml.free, self.pointer).atexit = False
        self._memory: list[np.ndarray] = []  # keeps alive what the tensors point to

    def new(self, type_id: int, shape: tuple[int, ...]) -> Any:
        """A tensor without data, of a shape in numpy's order."""
        sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
        return ggml.new_tensor(self.pointer, type_id, len(shape), sizes)

    def over(self, data: np.ndarray, type_id: int | None = None, shape: tuple[int, ...] | None = None) -> Any:
        """A tensor over an array's memory, of the array's own type and shape or of those given."""
        type_id = _TYPES[data.dtype] if type_id is None else type_id
        tensor = self.new(type_id, data.shape if shape is None else shape)
        tensor.contents.data = data.ctypes.data
        self._memory.append(data)
        return tensor


def capped(context: Any, x: Any, scale: float, cap: float | None) -> Any:
    """x times `scale`, brought between -cap and cap by tanh where there is a cap."""
    if cap is not None:
        return ggml.scale(context, ggml.tanh(context, ggml.scale(context, x, scale / cap)), cap)
    return x if scale == 1.0 else ggml.scale(context, x, scale)


def new_input(context: TensorContext, shape: tuple[int, ...], dtype: type) -> Any:
    """An input of a graph; `view` shows its memory once the graph has been allocated."""
    tensor = context.new(_TYPES[np.dtype(dtype)], shape)
    ggml.set_input(tensor)
    return tensor


def view(tensor: Any, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A numpy view of a tensor's memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * size).from_address(tensor.contents.data)
    return np.frombuffer(memory, dtype).reshape(shape)


def aligned(size: int) -> np.ndarray:
    """Uninitialised bytes at an address that ggml's kernels accept."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]
