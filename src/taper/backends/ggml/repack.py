"""Matrices in the layout that this processor multiplies fastest, for the types that ggml has such a layout for."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ggml
import numpy as np

from ...models.tensors import WEIGHT_TYPES
from .tensors import TensorContext

_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
Kind = tuple[str, tuple[int, ...]]  # type and shape of a matrix


class RepackedMatrices:
    """Copies of those matrices that can be repacked, as ggml tensors by name; freed with this object.

    Args:
        matrices: type and shape of each, by name.
        read: the bytes of one, in its type; called on several threads.
        release: called with the name of each matrix that will be repacked: its pages of a mapped file are not needed
            until it is read.
        on_repacked: called with the name of each matrix that has been repacked.
        threads: matrices to repack at a time.
    """

    def __init__(
        self,
        matrices: dict[str, Kind],
        read: Callable[[str], np.ndarray],
        release: Callable[[str], None],
        on_repacked: Callable[[str], None],
        threads: int,
    ) -> None:
        self._read, self._release, self._on_repacked, self._threads = read, release, on_repacked, threads
        ggml.ggml_log_set(_SILENT, None)  # it logs a line for each matrix
        self.tensors: dict[str, Any] = {}
        self._held: list[tuple[TensorContext, Any]] = []  # contexts and the buffers of their tensors
        for buffer_type in repacking_buffer_types():
            taken = {kind for kind in set(matrices.values()) if _takes(buffer_type, *kind)}
            self._repack(buffer_type, {name: kind for name, kind in matrices.items() if kind in taken})

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            for _, buffer in self._held:
                ggml.ggml_backend_buffer_free(buffer)

    def _repack(self, buffer_type: Any, matrices: dict[str, Kind]) -> None:
        context = TensorContext(len(matrices))
        new = {name: context.new(WEIGHT_TYPES[dtype][0], shape) for name, (dtype, shape) in matrices.items()}
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
        if not buffer:  # there is no memory for a copy: they stay where they are
            return
        self._held.append((context, buffer))

        def copy(name: str) -> str:
            data = self._read(name)
            ggml.ggml_backend_tensor_set(new[name], data.ctypes.data, 0, data.nbytes)
            release_pages(data)
            return name

        for name in matrices:
            self._release(name)
        # The largest first, while there are few copies: so the peak of memory is little above the size of the file.
        largest_first = sorted(matrices, key=lambda name: -math.prod(matrices[name][1]))
        with ThreadPoolExecutor(self._threads) as pool:
            for name in pool.map(copy, largest_first):
                self._on_repacked(name)
        self.tensors |= new


def _takes(buffer_type: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a buffer type has a layout for matrices of this type and shape, as a trial shows."""
    context = TensorContext(1)
    trial = context.new(WEIGHT_TYPES[dtype][0], shape)
    buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
    takes = bool(buffer and trial.contents.extra)
    if buffer:
        ggml.ggml_backend_buffer_free(buffer)
    return takes


def release_pages(data: np.ndarray) -> None:
    """Release the pages of a mapped file; they are read from it again if they are needed."""
    base: Any = data
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (data.ctypes.data + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def features() -> dict[str, bool]:
    """What the loaded library was built with, by ggml's names, such as AVX2, REPACK and LLAMAFILE."""
    registry = ggml.ggml_backend_cpu_reg()
    pointers = _call(registry, b"ggml_backend_get_features", registry, _Feature)
    found: dict[str, bool] = {}
    while pointers and (feature := pointers[len(found)]).name:
        found[feature.name.decode()] = feature.value == b"1"
    return found


def repacking_buffer_types() -> list[Any]:
    """The buffer types that repack what is put into them; none on a processor without such."""
    registry = ggml.ggml_backend_cpu_reg()
    device = ggml.ggml_backend_reg_dev_get(registry, 0)
    pointers = _call(registry, b"ggml_backend_dev_get_extra_bufts", device, ctypes.c_void_p)
    types: list[Any] = []
    while pointers and pointers[len(types)]:
        types.append(pointers[len(types)])
    return types


def _call(registry: Any, name: bytes, argument: Any, kind: Any) -> Any:
    """What a function of a pointer returns, a pointer to `kind`; None if this library has no such function."""
    address = ggml.ggml_backend_reg_get_proc_address(registry, name)
    if not address:
        return None
    function = ctypes.CFUNCTYPE(ctypes.POINTER(kind), ctypes.c_void_p)(ctypes.cast(address, ctypes.c_void_p).value or 0)
    return function(ctypes.cast(argument, ctypes.c_void_p))
