"""Slots of the key-value cache: which sequence has which, what free ones still hold, and what prompts reuse of it.

Only tokens whose keys and values every layer has are ever used again: where they are, if the slot is free, or as a
copy in another slot.
"""

from __future__ import annotations

from itertools import count

from .backends import Backend
from .sequence import Scheduled, Sequence

MIN_SHARED = 16  # tokens; for fewer, copying or waiting takes as long as computing them


class Slots:
    """Gives slots to sequences and takes them back.

    Args:
        backend: the owner of the cache.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.sequences: list[Sequence | None] = [None] * backend.num_slots
        # What each free slot still holds: leading tokens whose keys and values every layer has.
        self.kept: list[list[int]] = [[] for _ in range(backend.num_slots)]
        self._released, self._times = [0] * backend.num_slots, count(1)

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.sequences.count(None)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; what it holds of the prompt is not run again.

        One of which the prompt continues all that it holds comes first, empty ones included; then the one that was
        released longest ago.
        """
        prompt = sequence.token_ids
        free = [slot for slot, running in enumerate(self.sequences) if running is None]
        shared = {slot: common_prefix(self.kept[slot], prompt) for slot in free}

        def cost(slot: int) -> tuple[int, int]:
            return (1, self._released[slot]) if shared[slot] < len(self.kept[slot]) else (0, -shared[slot])

        slot = min(free, key=cost)
        # The last token runs in any case: its logits are what comes next.
        sequence.num_complete_tokens = sequence.num_cached_tokens = min(shared[slot], len(prompt) - 1)
        sequence.slot, self.sequences[slot], self.kept[slot] = slot, sequence, []

    def share(self, sequence: Sequence) -> None:
        """Copy what another slot holds of a prompt, if that is more than its own slot does."""
        own, prompt = sequence.num_complete_tokens, sequence.token_ids[:-1]
        least = prompt[: own + MIN_SHARED]
        if len(least) < own + MIN_SHARED or sequence.slot is None:
            return
        holders = [slot for slot in range(len(self.kept)) if self._held(slot, len(least)) == least]
        shared = {slot: common_prefix(self._held(slot), prompt) for slot in holders}
        if shared:
            source = max(holders, key=lambda slot: shared[slot])
            self._backend.copy(source, sequence.slot, own, shared[source])
            sequence.num_complete_tokens = shared[source]
            sequence.num_cached_tokens += shared[source] - own

    def release(self, sequence: Sequence) -> None:
        """Take back a slot, which goes on holding the leading tokens that every layer has."""
        assert sequence.slot is not None
        self.kept[sequence.slot] = sequence.token_ids[: sequence.num_complete_tokens]
        self._released[sequence.slot] = next(self._times)
        self.sequences[sequence.slot] = None
        sequence.slot = None

    def _held(self, slot: int, length: int | None = None) -> list[int]:
        """The first `length` tokens that a slot has the keys and values of all layers of; by default all of them."""
        sequence = self.sequences[slot]
        if sequence is None:
            return self.kept[slot][:length]
        complete = sequence.num_complete_tokens
        return sequence.token_ids[: complete if length is None else min(length, complete)]


def can_wait(sequence: Sequence, prompts: list[Scheduled]) -> bool:
    """Whether chunks that a step runs anyway compute what this prompt needs next, so that it can be copied then."""
    for other, token_ids, position, _, _ in prompts:
        computed = other.token_ids[: position + len(token_ids)]
        if common_prefix(computed, sequence.token_ids[:-1]) >= sequence.num_complete_tokens + MIN_SHARED:
            return True
    return False


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
