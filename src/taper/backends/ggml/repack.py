"""Copies of weights: as this processor multiplies them fastest, for the types with such a layout, or on a device."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...errors import ModelError
from ...models.tensors import WEIGHT_TYPES, Tensor
from .layouts import num_bytes
from .library import ggml
from .tensors import TensorContext


class CopiedTensors:
    """Copies of weights as ggml tensors by name: of those that can be repacked, or on a device of all.

    Freed with this object.

    Args:
        matrices: in the mapped file, by name.
        types: the type in which each is used.
        read: the bytes of one in that type; called on several threads.
        on_copied: called with the name of each matrix that has been copied.
        threads: matrices to copy at a time.
        kept: names of those whose original bytes are still needed afterwards.
        buffer_type: of the device; None repacks for the processor.

    Raises:
        ModelError: there is not enough memory on the device.
    """

    def __init__(
        self,
        matrices: dict[str, Tensor],
        types: dict[str, str],
        read: Callable[[str], np.ndarray],
        on_copied: Callable[[str], None],
        threads: int,
        kept: Container[str],
        buffer_type: Any = None,
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self._contexts: list[TensorContext] = []

        def copy(name: str) -> str:
            data = read(name)
            ggml.backend_tensor_set(self.tensors[name], data.ctypes.data, 0, data.nbytes)
            if name not in kept:
                release_pages(data)
            return name

        for target in ggml.repacking_buffer_types() if buffer_type is None else [buffer_type]:
            kinds = {name: (types[name], matrix.shape) for name, matrix in matrices.items()}
            taken = {kind for kind in set(kinds.values()) if buffer_type is not None or _repacks(target, *kind)}
            names = [name for name, kind in kinds.items() if kind in taken]
            context = TensorContext(len(names))
            tensors = {name: context.new(WEIGHT_TYPES[types[name]][0], matrices[name].shape) for name in names}
            try:
                context.allocate(target)
            except ModelError:
                if buffer_type is None:
                    continue  # there is no memory for a copy: they stay where they are
                needed = sum(num_bytes(types[name], matrix.shape) for name, matrix in matrices.items())
                message = f"the device has not enough memory for {needed / 1e9:.1f} GB of weights"
                hint = "lower --gpu-layers, take a file of fewer bits, or use --device cpu"
                raise ModelError(message, hint) from None
            self._contexts.append(context)
            self.tensors |= tensors
            for name in names:
                release_pages(matrices[name].data)  # not needed until it is read
            # The largest first, while there are few copies: so the peak of memory is little above the size of the file.
            names.sort(key=lambda name: -math.prod(matrices[name].shape))
            with ThreadPoolExecutor(threads) as pool:
                for name in pool.map(copy, names):
                    on_copied(name)


def _repacks(buffer_type: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a buffer type has a layout for matrices of this type and shape, found out by allocating one."""
    context = TensorContext(1)
    trial = context.new(WEIGHT_TYPES[dtype][0], shape)
    buffer = ggml.backend_alloc_ctx_tensors_from_buft(context.pointer, buffer_type)
    takes = bool(buffer and ggml.is_repacked(trial))
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
