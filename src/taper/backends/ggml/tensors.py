"""ggml tensors: over memory that numpy owns or sees, or in a device's, to which contents are sent."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from typing import Any

import numpy as np

from ...errors import ModelError
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
    """A ggml context with room for `num_tensors`; freed with this object, as are its tensors' places on a device.

    `buffer_type`: of the device on which tensors made of arrays lie; None leaves them where the arrays are.
    """

    def __init__(self, num_tensors: int, graph_nodes: int = 0, buffer_type: Any = None) -> None:
        size = num_tensors * ggml.tensor_overhead()
        if graph_nodes:
            size += ggml.graph_overhead_custom(graph_nodes, False)
        self.pointer = ggml.init(library.InitParams(mem_size=size, no_alloc=True))
        weakref.finalize(self, ggml.free, self.pointer).atexit = False
        self._buffer_type = buffer_type
        self._memory: list[np.ndarray] = []  # keeps alive what the tensors point to

    def new(self, type_id: int, shape: tuple[int, ...]) -> Any:
        """A tensor without data, of a shape in numpy's order."""
        sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
        return ggml.new_tensor(self.pointer, type_id, len(shape), sizes)

    def over(self, data: np.ndarray, type_id: int | None = None, shape: tuple[int, ...] | None = None) -> Any:
        """A tensor over an array's memory, or a copy on the device.

        It has the array's own type and shape or those given.

        Raises:
            ModelError: there is not enough memory on the device.
        """
        type_id = _TYPES[data.dtype] if type_id is None else type_id
        tensor = self.new(type_id, data.shape if shape is None else shape)
        if self._buffer_type is None:
            tensor.contents.data = data.ctypes.data
            self._memory.append(data)
        else:
            self.allocate(self._buffer_type)
            write(tensor, data)
        return tensor

    def allocate(self, buffer_type: Any) -> None:
        """Let the tensors that have no memory yet lie in a buffer of this type.

        Raises:
            ModelError: there is not enough memory.
        """
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(self.pointer, buffer_type)
        if not buffer:
            raise ModelError("there is not enough memory on the device", "use a smaller model, or --device cpu")
        weakref.finalize(self, ggml.backend_buffer_free, buffer).atexit = False


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


def in_host_memory(tensor: Any) -> bool:
    """Whether numpy sees a tensor's memory."""
    buffer = tensor.contents.buffer
    return not buffer or ggml.backend_buffer_is_host(buffer)


def write(tensor: Any, data: np.ndarray, offset: int = 0) -> None:
    """Write a contiguous array's bytes into a tensor, from a byte on."""
    if in_host_memory(tensor):
        ctypes.memmove(tensor.contents.data + offset, data.ctypes.data, data.nbytes)
    else:
        ggml.backend_tensor_set(tensor, data.ctypes.data, offset, data.nbytes)


def read(tensor: Any, data: np.ndarray, offset: int = 0) -> None:
    """Fill a contiguous array with bytes of a tensor, from a byte on."""
    if in_host_memory(tensor):
        ctypes.memmove(data.ctypes.data, tensor.contents.data + offset, data.nbytes)
    else:
        ggml.backend_tensor_get(tensor, data.ctypes.data, offset, data.nbytes)


class Computation:
    """A graph to compute, at `pointer`.

    `sent`, `fetched`: what goes to a device before it is computed there, and comes back afterwards: a tensor and the
    array for it. Both are empty where numpy sees the tensors' memory.
    """

    pointer: Any

    def __init__(self) -> None:
        self.sent, self.fetched = list[tuple[Any, np.ndarray]](), list[tuple[Any, np.ndarray]]()


class Copies(Computation):
    """A graph that copies parts of tensors to other places in them, up to `number`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        nodes = max(1, 3 * number)
        self._context = TensorContext(nodes, graph_nodes=nodes)
        self.pointer = ggml.new_graph_custom(self._context.pointer, nodes, False)

    def add(self, tensor: Any, source: int, target: int, count: int, rows: int = 1, stride: int = 0) -> None:
        """Copy `count` elements of each of some rows, `stride` elements apart; `source` and `target` are elements."""
        context, item = self._context.pointer, tensor.contents.nb[0]
        parts = (
            ggml.view_2d(context, tensor, count, rows, (stride or count) * item, first * item)
            for first in (source, target)
        )
        ggml.build_forward_expand(self.pointer, ggml.cpy(context, *parts))


def array_of(tensor: Any, shape: tuple[int, ...], dtype: type, travelling: list[tuple[Any, np.ndarray]]) -> np.ndarray:
    """A numpy view of a tensor's memory, or if that is a device's, an array that is added to what travels."""
    if in_host_memory(tensor):
        return view(tensor, shape, dtype)
    travelling.append((tensor, np.empty(shape, dtype)))
    return travelling[-1][1]


def lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that take memory as they are written, in small pages; numpy's own ask for pages of 2 MiB."""
    size = math.prod(shape) * dtype.itemsize
    if sys.platform == "win32":
        pages = mmap.mmap(-1, size)
    else:  # private: a forked process must not write into its parent's
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def aligned(size: int) -> np.ndarray:
    """Uninitialised bytes at an address that ggml's kernels accept."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]
