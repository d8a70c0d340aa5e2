"""Which states of recurrent layers a backend holds, and after how many tokens of which slot.

A recurrent layer has a state for each sequence instead of cells, and a state cannot be cut back. So a backend keeps
several: those before and after the last forward of a slot, and snapshots further back. Each layer's states lie in
records. A forward reads one record and writes another, which counts once the forward is done: an interrupt leaves all
as it was. A token that skips a layer leaves its state as it is, so the state after it is in the same record.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..models.config import ModelConfig
from . import TokenBatch

ZEROS = 0  # the record of the state before the first token
SNAPSHOT_BYTES = 256 << 20  # of all slots together
MAX_SNAPSHOTS, SNAPSHOT_TOKENS = 8, 256  # of a slot; while it decodes, there is one in so many tokens
_OTHERS = 4  # records of a slot: before and after a forward, and before and after one that is not for later use


class _State(NamedTuple):
    records: np.ndarray  # int64 [recurrent layers], in which record the state of each layer lies
    is_snapshot: bool


class Passage(NamedTuple):
    """Where the states of a slot lie before and after a forward."""

    slot: int
    start: int  # tokens before the forward, and after it
    end: int
    reads: np.ndarray  # int64 [recurrent layers]: records
    writes: np.ndarray  # the same; equal to `reads` in layers that no token of the slot runs


class StateRecords:
    """The records of a model's recurrent layers for `num_slots` slots; what is in them is the backend's."""

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        assert config.mixer is not None
        self._config, self._layers = config, np.array(list(config.recurrent_layers))
        mixer = config.mixer
        size = mixer.conv_width * (mixer.conv_size - 1) + math.prod(mixer.matrices)
        size *= 4 * len(self._layers)
        self._max_snapshots = min(MAX_SNAPSHOTS, max(1, SNAPSHOT_BYTES // (num_slots * size)))
        self._per_slot = self._max_snapshots + _OTHERS
        self.num_records = 1 + num_slots * self._per_slot
        self._held: list[dict[int, _State]] = [{} for _ in range(num_slots)]  # of each slot, by tokens
        self._passing: list[dict[int, _State]] = [{} for _ in range(num_slots)]  # at most one: not for later use

    def resumable(self, slot: int, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a slot there is a state; 0 if there is none."""
        return max((tokens for tokens in self._held[slot] if tokens <= num_tokens), default=0)

    def passages(self, batch: TokenBatch) -> list[Passage]:
        """Where the states of each slot of a batch lie before and after it, in the order of their first tokens.

        None of a batch for an MTP layer, which has no state.
        """
        if batch.is_mtp(self._config):
            return []
        slots, firsts = np.unique(batch.slots, return_index=True)
        active = np.array(batch.num_active)[self._layers]
        passages = []
        for first, slot in sorted(zip(firsts.tolist(), slots.tolist(), strict=True)):
            positions = batch.positions[batch.slots == slot]
            start, end = int(positions.min()), int(positions.max()) + 1
            reads = self._reads(slot, start, batch.tentative)
            runs = (active > first) & (self._layers >= batch.first_layer)
            passages.append(Passage(slot, start, end, reads, np.where(runs, self._free(slot), reads)))
        return passages

    def _reads(self, slot: int, start: int, tentative: bool) -> np.ndarray:
        if tentative and start in self._passing[slot]:
            return self._passing[slot][start].records
        if start in self._held[slot]:
            return self._held[slot][start].records
        assert start == 0, f"slot {slot} has no state after {start} tokens"
        return np.full(len(self._layers), ZEROS)

    def _free(self, slot: int) -> np.ndarray:
        """A record of a slot that holds nothing, for each layer: int64 [recurrent layers]."""
        first, used = 1 + slot * self._per_slot, np.zeros((len(self._layers), self.num_records), bool)
        for state in (*self._held[slot].values(), *self._passing[slot].values()):
            used[np.arange(len(self._layers)), state.records] = True
        free: np.ndarray = first + used[:, first : first + self._per_slot].argmin(1)
        return free

    def commit(self, passages: list[Passage], tentative: bool) -> None:
        """Count what a forward wrote. All later states of its slots are gone, unless it is not for later use."""
        for slot, start, end, _, writes in passages:
            if tentative:
                self._passing[slot] = {end: _State(writes, False)}
                continue
            many = end - start > 1 or start // SNAPSHOT_TOKENS != end // SNAPSHOT_TOKENS
            held = {
                tokens: state
                for tokens, state in self._held[slot].items()
                if tokens == start or (tokens < start and state.is_snapshot)
            }
            self._held[slot] = self._thinned(held, start) | {end: _State(writes, many)}
            self._passing[slot] = {}

    def _thinned(self, held: dict[int, _State], start: int) -> dict[int, _State]:
        """Not too many snapshots before `start`: without those that save the fewest tokens."""
        while len(places := sorted(tokens for tokens in held if tokens < start)) > self._max_snapshots:
            edges = [0, *places, start]
            held.pop(min(places, key=lambda tokens: edges[edges.index(tokens) + 1] - edges[edges.index(tokens) - 1]))
        return held

    def copied(self, source: int, target: int, first: int, end: int) -> Passage:
        """From and to which records to copy the state of a slot after `end` tokens; the target shares the first ones.

        `commit_copy` counts it.
        """
        reads = self._held[source][end].records
        return Passage(target, first, end, reads, self._free(target))

    def commit_copy(self, passage: Passage) -> None:
        """Count a copied state; the target's later ones are gone."""
        slot, first, end, _, writes = passage
        held = {tokens: s for tokens, s in self._held[slot].items() if tokens <= first and s.is_snapshot}
        self._held[slot] = self._thinned(held, end) | {end: _State(writes, True)}
        self._passing[slot] = {}

    def clear(self, slot: int) -> None:
        """Forget all states of a slot."""
        self._held[slot], self._passing[slot] = {}, {}
