"""The key-value cache as ggml tensors: a row of cells for each layer, addressed by slot and position."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import numpy as np

from ...models.config import ModelConfig
from .. import no_room
from .library import ggml
from .tensors import TensorContext

BUCKET = 64  # cells; attention reads whole buckets, so that one graph serves that many positions


class KeyValueCache:
    """Keys and values of `num_slots` sequences of up to `context_length` tokens, of the layers that have their own.

    Takes memory as it is written. Keys lie by cell. Of values those of one dimension lie side by side, as attention
    sums over cells; they take pages for some thousand tokens of a slot at a time.

    Raises:
        RequestError: it would take more memory than there is.
    """

    def __init__(self, config: ModelConfig, num_slots: int, context_length: int, dtype: str) -> None:
        self._config, self._context_length = config, context_length
        layers = [layer for layer, spec in enumerate(config.layers) if spec.has_cells]
        item = np.dtype(np.float32 if dtype == "f32" else np.float16)
        self._keys, self._values = dict[int, np.ndarray](), dict[int, np.ndarray]()
        try:
            for layer in layers:
                width = config.sizes(layer).cell_width
                self._keys[layer] = _lazy_zeros((num_slots * context_length, width), item)
                self._values[layer] = _lazy_zeros((num_slots, width, context_length), item)
        except (OSError, OverflowError):
            raise no_room(num_slots, context_length) from None
        self._context = TensorContext(2 * len(layers))
        # In ggml's order: keys [width, cells], and values [1, elements], so that each can be written.
        self._tensors = {
            layer: (self._context.over(keys), self._context.over(self._values[layer], shape=(keys.size, 1)))
            for layer, keys in self._keys.items()
        }

    def __getitem__(self, layer: int) -> tuple[Any, Any]:
        """Keys [width, cells] and values [1, elements] of a layer, for writing at `cells` and `elements`."""
        return self._tensors[layer]

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the keys of the tokens at these slots and positions lie: int64 [N]."""
        cells: np.ndarray = slots.astype(np.int64) * self._context_length + positions
        return cells

    def elements(self, slots: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
        """Where each number of their values lies, in layers with cells of a width: int64 [N, width]."""
        rows = slots.astype(np.int64)[:, None] * width + np.arange(width)
        elements: np.ndarray = rows * self._context_length + positions[:, None]
        return elements

    def states(self, layer: int, slot: int, positions: np.ndarray) -> np.ndarray:
        """What a layer's keys hold at these positions of a slot: float32 [n, width], a copy."""
        states: np.ndarray = self._keys[layer][slot * self._context_length + positions].astype(np.float32)
        return states

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy cells of a slot to another: positions `first` to `end`, excluded."""
        a, b = source * self._context_length, target * self._context_length
        for keys, values in zip(self._keys.values(), self._values.values(), strict=True):
            keys[b + first : b + end] = keys[a + first : a + end]
            values[target, :, first:end] = values[source, :, first:end]

    def clear(self, slot: int) -> None:
        """Write zeros to all cells of a slot."""
        for keys, values in zip(self._keys.values(), self._values.values(), strict=True):
            keys[slot * self._context_length : (slot + 1) * self._context_length] = 0
            values[slot] = 0

    def bucket(self, num_positions: int) -> int:
        """How many cells of a slot attention reads for sequences of up to `num_positions` tokens."""
        return min(-(-num_positions // BUCKET) * BUCKET, self._context_length)

    def slots(self, context: Any, layer: int, first: int, count: int, length: int) -> tuple[Any, Any]:
        """The first `length` cells of neighbouring slots in ggml's order.

        Returns:
            Keys [head_dim, length, key-value heads, count] and values [length, head_dim, key-value heads, count].
        """
        sizes, size = self._config.sizes(layer), self._context_length
        dim, heads, (keys, values) = sizes.head_dim, sizes.num_key_value_heads, self._tensors[layer]
        item = values.contents.nb[0]
        row, slot = sizes.cell_width * item, size * sizes.cell_width * item
        strides = (row, dim * item, slot, first * slot)
        keys = ggml.view_4d(context, keys, dim, length, heads, count, *strides)
        strides = (size * item, dim * size * item, slot, first * slot)
        return keys, ggml.view_4d(context, values, length, dim, heads, count, *strides)


def _lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that take memory as they are written, in small pages; numpy's own ask for pages of 2 MiB."""
    size = math.prod(shape) * dtype.itemsize
    if sys.platform == "win32":
        pages = mmap.mmap(-1, size)
    else:  # private: a forked process must not write into its parent's cells
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
