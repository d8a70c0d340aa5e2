"""Matrices in the layout that this processor multiplies fastest, for the types with such a layout in ggml."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...models.tensors import WEIGHT_TYPES, Tensor
from .library import ggml
from .tensors import TensorContext


class RepackedMatrices:
    """Copies of those matrices that can be repacked, as ggml tensors by name; freed with this object.

    Args:
        matrices: in the mapped file, by name.
        types: the type in which each is used.
        read: the bytes of one in that type; called on several threads.
        on_repacked: called with the name of each matrix that has been repacked.
        threads: matrices to repack at a time.
        kept: names of those whose original bytes are still needed afterwards.
    """

    def __init__(
        self,
        matrices: dict[str, Tensor],
        types: dict[str, str],
        read: Callable[[str], np.ndarray],
        on_repacked: Callable[[str], None],
        threads: int,
        kept: Container[str],
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self._contexts: list[TensorContext] = []

        def repack(name: str) -> str:
            data = read(name)
            ggml.backend_tensor_set(self.tensors[name], data.ctypes.data, 0, data.nbytes)
            if name not in kept:
                release_pages(data)
            return name

        for buffer_type in ggml.repacking_buffer_types():
            kinds = {name: (types[name], matrix.shape) for name, matrix in matrices.items()}
            taken = {kind for kind in set(kinds.values()) if _takes(buffer_type, *kind)}
            names = [name for name, kind in kinds.items() if kind in taken]
            context = TensorContext(len(names))
            tensors = {name: context.new(WEIGHT_TYPES[types[name]][0], matrices[name].shape) for name in names}
            buffer = ggml.backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
            if not buffer:
                continue  # there is no memory for a copy: they stay where they are
            weakref.finalize(self, ggml.backend_buffer_free, buffer).atexit = False
            self._contexts.append(context)
            self.tensors |= tensors
            for name in names:
                release_pages(matrices[name].data)  # not needed until it is read
            # The largest first, while there are few copies: so the peak of memory is little above the size of the file.
            names.sort(key=lambda name: -math.prod(matrices[name].shape))
            with ThreadPoolExecutor(threads) as pool:
                for name in pool.map(repack, names):
                    on_repacked(name)


def _takes(buffer_type: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a buffer type has a layout for matrices of this type and shape, found out by allocating one."""
    context = TensorContext(1)
    trial = context.new(WEIGHT_TYPES[dtype][0], shape)
    buffer = ggml.backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
    takes = bool(buffer and trial.contents.extra)
    if buffer:
        ggml.backend_buffer_free(buffer)
    return takes


def release_pages(data: np.ndarray) -> None:
    """Release the pages of a mapped file; they are read from it again if they are needed.

    Windows has no call for that: there, they are released when memory is short.
    """
    base: Any = data
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (data.ctypes.data + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
