"""The key-value cache as ggml tensors: a row of cells for each layer, addressed by slot and position."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ModelError
from ...models.config import ModelConfig
from .. import no_room
from .library import ggml
from .tensors import Copies, TensorContext, lazy_zeros, write

BUCKET = 64  # cells; attention reads whole buckets, so that one graph serves that many positions


class KeyValueCache:
    """Keys and values of `num_slots` sequences of up to `context_length` tokens, of the layers that have their own.

    On a CPU it takes memory as it is written. Keys lie by cell. Of values those of one dimension lie side by side, as
    attention sums over cells; they take pages for some thousand tokens of a slot at a time. On a device, where flash
    attention reads them, they lie by cell too, in whole buckets: Vulkan reads masks only from where a driver lets it.

    Raises:
        RequestError: it would take more memory than there is.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, context_length: int, dtype: str, buffer_type: Any = None
    ) -> None:
        self._by_cell = buffer_type is not None  # values
        self._config, self._size = config, _whole_buckets(context_length) if self._by_cell else context_length
        layers = [layer for layer, spec in enumerate(config.layers) if spec.has_cells]
        self._type = np.dtype(np.float32 if dtype == "f32" else np.float16)
        self._context, self._tensors = TensorContext(2 * len(layers), buffer_type=buffer_type), {}
        try:
            for layer in layers:
                cells, width = num_slots * self._size, config.sizes(layer).cell_width
                # In ggml's order: keys [width, cells], and values the same or [1, elements].
                shapes = (cells, width), (cells, width) if self._by_cell else (cells * width, 1)
                keys, values = (self._context.over(lazy_zeros(shape, self._type)) for shape in shapes)
                self._tensors[layer] = keys, values
        except (OSError, OverflowError, ModelError):
            raise no_room(num_slots, context_length) from None

    def __getitem__(self, layer: int) -> tuple[Any, Any]:
        """Keys [width, cells] and values of a layer, for writing at `cells` and `elements`."""
        return self._tensors[layer]

    def cells(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the keys of the tokens at these slots and positions lie: int64 [N]."""
        cells: np.ndarray = slots.astype(np.int64) * self._size + positions
        return cells

    def num_elements(self, width: int) -> int:
        """How many parts of the values of a token lie apart, in layers with cells of a width."""
        return 1 if self._by_cell else width

    def elements(self, slots: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
        """Where each of these parts lies: int64 [N, num_elements]."""
        if self._by_cell:
            return self.cells(slots, positions)[:, None]
        rows = slots.astype(np.int64)[:, None] * width + np.arange(width)
        elements: np.ndarray = rows * self._size + positions[:, None]
        return elements

    def copies(self, source: int, target: int, first: int, end: int) -> Copies:
        """What copies cells of a slot to another: positions `first` to `end`, excluded."""
        copies, size, count = Copies(2 * len(self._tensors)), self._size, end - first
        for layer, (keys, values) in self._tensors.items():
            width = self._config.sizes(layer).cell_width
            a, b = (slot * size * width for slot in (source, target))
            copies.add(keys, a + first * width, b + first * width, count * width)
            if self._by_cell:
                copies.add(values, a + first * width, b + first * width, count * width)
            else:
                copies.add(values, a + first, b + first, count, rows=width, stride=size)
        return copies

    def clear(self, slot: int) -> None:
        """Write zeros to all cells of a slot."""
        for layer, tensors in self._tensors.items():
            zeros = np.zeros(self._size * self._config.sizes(layer).cell_width, self._type)
            for tensor in tensors:
                write(tensor, zeros, slot * zeros.nbytes)

    def bucket(self, num_positions: int) -> int:
        """How many cells of a slot attention reads for sequences of up to `num_positions` tokens."""
        return min(_whole_buckets(num_positions), self._size)

    def slots(self, context: Any, layer: int, first: int, count: int, length: int) -> tuple[Any, Any]:
        """The first `length` cells of neighbouring slots in ggml's order.

        Returns:
            Keys [head_dim, length, key-value heads, count] and values [length, head_dim, key-value heads, count].
        """
        sizes, size = self._config.sizes(layer), self._size
        dim, heads, (keys, values) = sizes.head_dim, sizes.num_key_value_heads, self._tensors[layer]
        item = values.contents.nb[0]
        row, slot = sizes.cell_width * item, size * sizes.cell_width * item
        strides = (row, dim * item, slot, first * slot)
        keys = ggml.view_4d(context, keys, dim, length, heads, count, *strides)
        if self._by_cell:
            values = ggml.view_4d(context, values, dim, length, heads, count, *strides)
            return keys, ggml.permute(context, values, 1, 0, 2, 3)
        strides = (size * item, dim * size * item, slot, first * slot)
        return keys, ggml.view_4d(context, values, length, dim, heads, count, *strides)


def _whole_buckets(cells: int) -> int:
    return -(-cells // BUCKET) * BUCKET
