"""Matrices in the layout that this processor multiplies fastest, for the types that ggml has such a layout for."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ggml
import numpy as np

from ...loading import Tensor
from ...loading.model import WEIGHT_TYPES
from .features import repacking_buffer_types
from .tensors import TensorContext

_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class RepackedMatrices:
    """Copies of those matrices that can be repacked, as ggml tensors by name; freed with this object."""

    def __init__(self, matrices: dict[str, Tensor], threads: int) -> None:
        self._threads = threads
        ggml.ggml_log_set(_SILENT, None)  # it has a line for each matrix
        self.tensors: dict[str, Any] = {}
        self._held: list[tuple[TensorContext, Any]] = []  # contexts and the buffers of their tensors
        for buffer_type in repacking_buffer_types():
            kinds = {(tensor.dtype, tensor.shape) for tensor in matrices.values()}
            taken = {kind for kind in kinds if _takes(buffer_type, *kind)}
            self._repack(buffer_type, {name: t for name, t in matrices.items() if (t.dtype, t.shape) in taken})

    def __del__(self) -> None:
        for _, buffer in self._held:
            ggml.ggml_backend_buffer_free(buffer)

    def _repack(self, buffer_type: Any, matrices: dict[str, Tensor]) -> None:
        context = TensorContext(len(matrices))
        new = {name: context.new(WEIGHT_TYPES[tensor.dtype][0], tensor.shape) for name, tensor in matrices.items()}
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
        if not buffer:  # none was taken, or there is no memory for a copy: they stay where they are
            return
        self._held.append((context, buffer))

        def copy(name: str) -> None:
            data = np.ascontiguousarray(matrices[name].data)
            ggml.ggml_backend_tensor_set(new[name], data.ctypes.data, 0, data.nbytes)
            _give_back(matrices[name].data)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(copy, matrices))
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


def _give_back(data: np.ndarray) -> None:
    """Let go of the pages of a mapped file; they come back from it if anybody reads them."""
    if data.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (data.ctypes.data + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
