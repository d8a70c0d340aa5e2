"""The key-value cache as ggml tensors: a row of cells for each layer, addressed by slot and position."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from ...models.config import ModelConfig
from .. import no_room
from .library import ggml
from .tensors import TensorContext

BUCKET = 256  # cells; attention reads whole buckets, so that one graph serves that many positions


class KeyValueCache:
    """Keys and values of `num_slots` sequences of up to `context_length` tokens. Takes memory as it is written.

    Raises:
        RequestError: it would take more memory than there is.
    """

    def __init__(self, config: ModelConfig, num_slots: int, context_length: int, dtype: str) -> None:
        self._config, self._context_length = config, context_length
        width = config.num_key_value_heads * config.head_dim
        shape = (config.num_hidden_layers, 2, num_slots * context_length, width)
        try:
            # [num_hidden_layers, 2, cells, heads * head_dim]
            self._cells = _lazy_zeros(shape, np.dtype(np.float32 if dtype == "f32" else np.float16))
        except (OSError, OverflowError):
            raise no_room(num_slots, context_length) from None
        self._context = TensorContext(2 * config.num_hidden_layers)
        self._layers = [(self._context.over(keys), self._context.over(values)) for keys, values in self._cells]

    def __getitem__(self, layer: int) -> tuple[Any, Any]:
        """Keys and values of a layer, each [cells, heads * head_dim]."""
        return self._layers[layer]

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the tokens at these slots and positions lie: int64 [N]."""
        cells: np.ndarray = slots.astype(np.int64) * self._context_length + positions
        return cells

    def states(self, layer: int, slot: int, positions: np.ndarray) -> np.ndarray:
        """What a layer's keys hold at these positions of a slot: float32 [n, heads * head_dim], a copy."""
        states: np.ndarray = self._cells[layer, 0, slot * self._context_length + positions].astype(np.float32)
        return states

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy cells of a slot to another: positions `first` to `end`, excluded."""
        a, b = source * self._context_length, target * self._context_length
        self._cells[:, :, b + first : b + end] = self._cells[:, :, a + first : a + end]

    def bucket(self, num_positions: int) -> int:
        """How many cells of a slot attention reads for sequences of up to `num_positions` tokens."""
        return min(-(-num_positions // BUCKET) * BUCKET, self._context_length)

    def slot(self, context: Any, tensor: Any, slot: int, length: int) -> Any:
        """The first `length` cells of a slot in ggml's order: [head_dim, length, key-value heads]."""
        config, (item, row) = self._config, tensor.contents.nb[:2]
        first = slot * self._context_length * row
        sizes, strides = (config.head_dim, length, config.num_key_value_heads), (row, config.head_dim * item)
        return ggml.view_3d(context, tensor, *sizes, *strides, first)


def _lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that take memory as they are written, in small pages; numpy's own ask for pages of 2 MiB."""
    # Private: a forked process must not write into its parent's cells.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
