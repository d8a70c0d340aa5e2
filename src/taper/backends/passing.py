"""Hidden states that wait until somebody reads the keys and values of the layers that they passed.

To fill the cells of skipped layers in each step would read matrices of keys and values for the sake of one token. So a
step only leaves the states that pass, each once for all the layers that it passes unchanged. Before a forward first
reads such cells, or when there is no more room, the keys and values of all these tokens are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..models.config import ModelConfig
from . import TokenBatch

MAX_STATES, MAX_BYTES = 4096, 32 << 20  # whichever is less
MAX_TOKENS = 512  # whose keys and values are computed together; bounds the memory of activations
# Writes the cells of a layer at these slots and positions, for the states at these places: int64 [n] each.
Write = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]


class Passing(NamedTuple):
    """The tokens from `first` to `end`, excluded, leave the states with which they enter a layer."""

    layer: int
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What a forward leaves: which states, and for which layers each of them stands."""

    parts: tuple[Passing, ...]
    tokens: np.ndarray  # int64 [states], that of each state, in the order of the parts
    layers: np.ndarray  # int64 [n], and beside it
    states: np.ndarray  # int64 [n], one of those above that passes this layer


class PassingStates:
    """Which states wait; they lie in a buffer of the backend that has `size` places.

    An interrupt does no harm anywhere: a state stays where it is until its keys and values have been written.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.size = max(1, min(MAX_STATES, MAX_BYTES // (4 * config.hidden_width)))
        # What lends its cells must have them at once: a later layer of the same forward reads them.
        lenders = config.lenders
        self._can_wait = tuple(spec.has_cells and i not in lenders for i, spec in enumerate(config.layers))
        self._slots, self._positions = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        self._count = 0  # places that are taken, the first ones
        self._waiting = np.zeros((len(config.layers), self.size), bool)
        self._may_wait = np.zeros(len(config.layers), bool)  # False where none does

    def plan(self, batch: TokenBatch, write: Write) -> Plan | None:
        """Write the cells that a batch reads, but those of its own tokens, and make room for what it leaves.

        None if it leaves nothing, or more than there is room for at all: then it writes all its cells itself.
        """
        self._fill(batch, write)
        if not batch.fill or min(batch.num_active) == len(batch.tokens):
            return None
        adapted = tuple(batch.adapters.layers) if batch.adapters else ()
        plan = _plan(self._can_wait, batch.num_active, len(batch.tokens), batch.first_layer, adapted)
        if not 0 < len(plan.tokens) <= self.size:
            return None
        if self._count + len(plan.tokens) > self.size:
            self._write(self._waiting[:, : self._count].copy(), write)
            self._count = 0
        return plan

    def places(self, plan: Plan) -> np.ndarray:
        """Where the states of a plan go: int64 [states]."""
        return np.arange(self._count, self._count + len(plan.tokens))

    def note(self, batch: TokenBatch, plan: Plan | None) -> None:
        """Record what a batch has written and left."""
        self._forget_written(batch)
        if plan is None:
            return
        places = self.places(plan)
        self._slots[places], self._positions[places] = batch.slots[plan.tokens], batch.positions[plan.tokens]
        self._waiting[:, places] = False
        self._waiting[plan.layers, self._count + plan.states] = True
        self._may_wait[plan.layers] = True
        self._count += len(places)

    def settle(self, slot: int, first: int, end: int, write: Write) -> None:
        """Write what waits for the cells of a slot at positions `first` to `end`, excluded."""
        self._write(self._waiting[:, : self._count] & self._of(slot, first, end), write)

    def forget(self, slot: int, first: int, end: int) -> None:
        """Let nothing wait for these cells."""
        self._waiting[:, : self._count] &= ~self._of(slot, first, end)

    def _of(self, slot: int, first: int, end: int) -> np.ndarray:
        """Whether each place belongs to one of these positions: bool [places that are taken]."""
        positions = self._positions[: self._count]
        of_these: np.ndarray = (self._slots[: self._count] == slot) & (first <= positions) & (positions < end)
        return of_these

    def _fill(self, batch: TokenBatch, write: Write) -> None:
        active = np.array(batch.num_active) > 0
        active[: batch.first_layer] = False
        layers = np.flatnonzero(active & self._may_wait[: len(active)])
        if len(layers):
            needed = np.zeros((len(self._waiting), self._count), bool)
            for slot in set(batch.slots.tolist()):
                end = int(batch.positions[batch.slots == slot].min())
                needed[layers] |= self._waiting[layers, : self._count] & self._of(slot, 0, end)
            self._write(needed, write)

    def _write(self, needed: np.ndarray, write: Write) -> None:
        """Write cells: needed is a bool for each layer and place that is taken."""
        for layer in np.flatnonzero(needed.any(1)).tolist():
            places = np.flatnonzero(needed[layer])
            for part in np.array_split(places, -(-len(places) // MAX_TOKENS)):
                write(layer, self._slots[part], self._positions[part], part)
                self._waiting[layer, part] = False
        self._may_wait[:] = self._waiting.any(1)
        if not self._may_wait.any():
            self._count = 0

    def _forget_written(self, batch: TokenBatch) -> None:
        """Let nothing wait for cells that a batch has written."""
        if not self._count:
            return
        held, written = (
            (slots.astype(np.int64) << 32) + positions
            for slots, positions in (
                (self._slots[: self._count], self._positions[: self._count]),
                (batch.slots, batch.positions),
            )
        )
        places = np.flatnonzero(np.isin(held, written))
        if len(places):
            order = np.argsort(written)
            tokens = order[np.searchsorted(written, held[places], sorter=order)]
            layers = slice(batch.first_layer, len(batch.num_active))
            keeps = np.array(batch.num_active)[layers, None] <= tokens
            self._waiting[layers, places] &= keeps & (not batch.fill)


@lru_cache(1024)
def _plan(
    can_wait: tuple[bool, ...],
    num_active: tuple[int, ...],
    num_tokens: int,
    first_layer: int,
    adapted: tuple[int, ...],
) -> Plan:
    """What a forward leaves if its batch fills; the last arguments are fields of it, and the layers with adapters."""
    parts, tokens, layers, states = list[Passing](), list[int](), list[int](), list[int]()
    held = [0] * num_tokens  # the state that each token left last
    unchanged = num_tokens  # from this token on, it is still what they have
    for layer in range(first_layer, len(num_active)):
        active = num_active[layer]
        if can_wait[layer]:
            if active < unchanged:
                parts.append(Passing(layer, active, unchanged))
                held[active:unchanged] = range(len(tokens), len(tokens) + unchanged - active)
                tokens += range(active, unchanged)
            layers += [layer] * (num_tokens - active)
            states += held[active:]
            unchanged = active
        unchanged = num_tokens if layer in adapted and active < num_tokens else max(active, unchanged)
    return Plan(tuple(parts), *(np.array(numbers, np.int64) for numbers in (tokens, layers, states)))
