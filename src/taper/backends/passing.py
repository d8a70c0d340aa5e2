"""Hidden states that wait in the key-value cache until somebody reads their keys and values.

Where keys are as wide as hidden states (no grouped queries), filling the cells of skipped layers in each step would
read a tenth more weights. There, a skipped layer stores the input of its attention in place of the key. Before a
forward first reads such cells, the keys and values of all these tokens are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from ..models.config import ModelConfig
from . import TokenBatch

MAX_TOKENS = 512  # whose keys and values are computed together; bounds the memory of activations
S = TypeVar("S")
Read = Callable[[int, int, np.ndarray], S]  # the states at a layer, a slot and positions int64 [n]
Write = Callable[[int, int, np.ndarray, S], None]  # writes their keys and values there


class PassingStates(Generic[S]):
    """Where the cells of a cache hold such states. `S` is the backend's type for states [n, hidden_size].

    `fill` may be interrupted anywhere: `finish`, which comes before anything else that uses the cells, does the rest.
    """

    def __init__(self, config: ModelConfig, num_slots: int, context_length: int) -> None:
        self._held = np.zeros((config.num_hidden_layers, num_slots, context_length), bool)
        self._filling: tuple[int, int, np.ndarray, S] | None = None

    @staticmethod
    def fit(config: ModelConfig) -> bool:
        """Whether the input of attention has the size of a key and, because it is normed, fits the range of f16."""
        if config.mixer is not None or config.num_streams > 1:
            return False
        has_size = all(config.sizes(layer).cell_width == config.hidden_size for layer in range(len(config.layers)))
        return has_size and not config.lenders and all(spec.pre_norm for spec in config.layers)

    def fill(self, batch: TokenBatch, read: Read[S], write: Write[S]) -> None:
        """Turn the states that a batch reads into keys and values; the cells of its own tokens it writes itself."""
        self.finish(write)
        layers = np.flatnonzero(batch.num_active)
        layers = layers[layers >= batch.first_layer]
        for slot in set(batch.slots.tolist()):
            held = self._held[layers, slot, : batch.positions[batch.slots == slot].min()]
            for row in np.flatnonzero(held.any(1)).tolist():
                layer, positions = int(layers[row]), np.flatnonzero(held[row])
                for first in range(0, len(positions), MAX_TOKENS):
                    part = positions[first : first + MAX_TOKENS]
                    self._filling = layer, slot, part, read(layer, slot, part)
                    self.finish(write)

    def finish(self, write: Write[S]) -> None:
        """Complete what an interrupt may have left half done."""
        if self._filling is not None:
            layer, slot, positions, _ = self._filling
            write(*self._filling)
            self._held[layer, slot, positions] = False
            self._filling = None

    def note(self, batch: TokenBatch) -> None:
        """Record what a batch has written."""
        cells = slice(batch.first_layer, len(batch.num_active)), batch.slots, batch.positions
        passed = np.arange(len(batch.tokens)) >= np.array(batch.num_active)[batch.first_layer :, None]
        self._held[cells] = passed if batch.fill else passed & self._held[cells]

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Record that cells were copied: positions `first` to `end`, excluded."""
        self._held[:, target, first:end] = self._held[:, source, first:end]
