"""Which layout of weights multiplies many tokens fastest, where another one is best for few.

Few tokens wait for memory: the smallest weights are best, repacked where ggml can. Many wait for arithmetic, and then a
library may be faster with weights as they lie in the file (Q4_K, whose tiles newer ones multiply) or with bf16.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...models.tensors import WEIGHT_TYPES, row_bytes
from .. import available_memory
from .library import TYPE_F32, ggml
from .tensors import TensorContext

_SHAPE, _TOKENS, _TRIES = (512, 512), 128, 3
_GAIN = 1.4  # a smaller gain is not worth the memory, and noise should not choose between two that are about as fast
# From how many tokens on, as `research/layouts.py` measures. A copy in bf16 has up to four times the bytes. Reading it
# pays only with enough tokens for each core; how many depends on how many times faster bf16 computes.
_IN_TILES = 16
_IN_BF16, _IN_BF16_PER_CORE = 4, ((4.0, 2), (2.5, 4), (_GAIN, 6))


class Layout(NamedTuple):
    """The type of a matrix in its layout for many tokens, and from how many on that is used."""

    dtype: str
    min_tokens: int


@cache
def layout_for_many(dtype: str, threads: int) -> Layout | None:
    """The layout of weights of this type for many tokens; None where it is the same as for few.

    Measured with a small matrix on one core, once in a process: about ten milliseconds.
    """
    if WEIGHT_TYPES[dtype][1] == 1:  # not quantised: bf16 would lose something
        return None
    backend = ggml.backend_cpu_init()
    ggml.backend_cpu_set_n_threads(backend, 1)
    try:
        plain = ggml.backend_get_default_buffer_type(backend)
        mapped, bf16 = seconds(backend, plain, dtype), seconds(backend, plain, "BF16")
        repacked = min((seconds(backend, place, dtype) for place in ggml.repacking_buffer_types()), default=math.inf)
    finally:
        ggml.backend_free(backend)
    used = mapped if math.isinf(repacked) else repacked
    if used > _GAIN * mapped and mapped < _GAIN * bf16:
        return Layout(dtype, _IN_TILES)
    gain = used / bf16
    per_core = next((tokens for least, tokens in _IN_BF16_PER_CORE if gain >= least), None)
    return None if per_core is None else Layout("BF16", max(_IN_BF16, per_core * threads))


def layouts_for_many(
    shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], threads: int
) -> tuple[dict[str, Layout], str]:
    """The second layouts of matrices of these shapes and types, by name, and all layouts in words.

    There are none if they would take more than half of the memory that is free once the first layouts are there.
    """
    chosen = {name: layout for name in shapes if (layout := layout_for_many(types[name], threads)) is not None}
    if not chosen:
        return {}, "one layout for any number of tokens"
    needed = sum(num_bytes(layout.dtype, shapes[name]) for name, layout in chosen.items())
    free = (available_memory() or 0) - sum(num_bytes(types[name], shape) for name, shape in shapes.items())
    if needed > free / 2:
        return {}, f"one layout: a second takes {needed / 1e9:.1f} GB, more than half of the memory that is free"
    return chosen, f"{in_words({types[name]: layout for name, layout in chosen.items()})}, {needed / 1e6:.0f} MB more"


def in_words(layouts: Mapping[str, Layout]) -> str:
    """The second layouts of types, such as "Q4_1 also in bf16, for 4 tokens or more"."""
    names: dict[tuple[str, int], list[str]] = {}
    for name, layout in sorted(layouts.items()):
        place = "as in the file" if layout.dtype == name else "in bf16"
        names.setdefault((place, layout.min_tokens), []).append(name)
    return "; ".join(
        f"{', '.join(those)} also {place}, for {tokens} tokens or more" for (place, tokens), those in names.items()
    )


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of weights of this type and shape."""
    return math.prod(shape[:-1]) * row_bytes(dtype, shape[-1])


def seconds(
    backend: Any, buffer_type: Any, dtype: str, shape: tuple[int, int] = _SHAPE, tokens: int = _TOKENS
) -> float:
    """The time of multiplying tokens with a matrix that lies in a buffer of this type.

    Infinite if the buffer has no layout for `dtype`. The weights are zeros, which take as long as others.
    """
    plain = ggml.backend_get_default_buffer_type(backend)
    matrices, others = TensorContext(1), TensorContext(2, graph_nodes=4)
    matrix = matrices.new(WEIGHT_TYPES[dtype][0], shape)
    buffers = [ggml.backend_alloc_ctx_tensors_from_buft(matrices.pointer, buffer_type)]
    try:
        if buffer_type != plain and not ggml.is_repacked(matrix):
            return math.inf
        vectors = others.new(TYPE_F32, (tokens, shape[1]))
        graph = ggml.new_graph_custom(others.pointer, 4, False)
        ggml.build_forward_expand(graph, ggml.mul_mat(others.pointer, matrix, vectors))
        buffers.append(ggml.backend_alloc_ctx_tensors_from_buft(others.pointer, plain))
        for tensor in (matrix, vectors):
            zeros = np.zeros(ggml.nbytes(tensor), np.uint8)
            ggml.backend_tensor_set(tensor, zeros.ctypes.data, 0, zeros.nbytes)
        return min(timeit.repeat(partial(ggml.backend_graph_compute, backend, graph), number=1, repeat=_TRIES))
    finally:
        for buffer in buffers:
            ggml.backend_buffer_free(buffer)
