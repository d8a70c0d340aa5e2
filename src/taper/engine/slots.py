"""The slots of the key-value cache, and which tokens of earlier prompts and outputs they offer to later prompts."""

from __future__ import annotations

from itertools import count

from ..backends import Backend
from .sequence import Request, Sequence, Tokens

MIN_SHARED = 16  # tokens; copying fewer, or waiting for them, takes as long as computing them


class Slots:
    """The slots of the key-value cache: which sequence owns each one, and what the free ones still hold.

    Only tokens with keys and values in every layer are used again: in place if the slot is free, or as a copy in
    another slot. A request that must not see filled ones takes only the leading exact ones of them.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.sequences: list[Sequence | None] = [None] * backend.num_slots
        # What each free slot still holds: leading tokens with keys and values in every layer, so many of them exact.
        self.kept: list[list[int]] = [[] for _ in range(backend.num_slots)]
        self.num_exact = [0] * backend.num_slots
        self._released, self._times = [0] * backend.num_slots, count(1)

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.sequences.count(None)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a free slot, and keep the prefix of its prompt that the slot holds.

        Prefer a slot that loses nothing, then one that loses no more than it shares, such as a conversation whose last
        output comes back in other tokens, then the least recently used.
        """
        prompt = sequence.request.prompt_ids
        free = [slot for slot, owner in enumerate(self.sequences) if owner is None]
        shared = {slot: common_prefix(self._held(slot, sequence.request), prompt) for slot in free}

        def cost(slot: int) -> tuple[int, int]:
            lost = len(self.kept[slot]) - shared[slot]
            return (2, self._released[slot]) if lost > shared[slot] else (bool(lost), -shared[slot])

        slot = min(free, key=cost)
        # The last token runs in any case: its logits predict the first token of the completion.
        reused = self._backend.resumable(slot, min(shared[slot], len(prompt) - 1))
        sequence.num_computed_tokens = sequence.num_cached_tokens = reused
        sequence.num_exact_tokens = min(sequence.num_computed_tokens, self.num_exact[slot])
        sequence.slot = slot
        self.sequences[slot] = sequence

    def share(self, sequence: Sequence) -> None:
        """Copy the prefix of a prompt that another slot holds, if it is longer than that of its own slot."""
        own, prompt = sequence.num_computed_tokens, list(sequence.request.prompt_ids[:-1])
        least = prompt[: own + MIN_SHARED]
        if len(least) < own + MIN_SHARED or sequence.slot is None:
            return
        slots = range(len(self.kept))
        holders = [slot for slot in slots if self._held(slot, sequence.request, len(least)) == least]
        shared = {
            slot: self._backend.resumable(slot, common_prefix(self._held(slot, sequence.request), prompt))
            for slot in holders
        }
        source = max(holders, key=lambda slot: shared[slot], default=0)
        if shared.get(source, own) > own:
            self._backend.copy(source, sequence.slot, own, shared[source])
            sequence.num_cached_tokens += shared[source] - own
            if sequence.num_exact_tokens == own:
                sequence.num_exact_tokens = max(own, min(shared[source], self._num_exact(source)))
            sequence.num_computed_tokens = shared[source]

    def release(self, sequence: Sequence) -> None:
        """Take back the slot of a sequence, if it has one; it goes on holding the tokens that can be used again."""
        slot = sequence.slot
        if slot is not None and self.sequences[slot] is sequence:
            self.kept[slot] = sequence.leading(sequence.num_computed_tokens)
            self.num_exact[slot] = sequence.num_exact_tokens
            if sequence.finish_reason == "error":
                self.kept[slot], self.num_exact[slot] = [], 0
                self._backend.clear(slot)
            self._released[slot] = next(self._times)
            self.sequences[slot] = None
        sequence.slot = None

    def _num_exact(self, slot: int) -> int:
        owner = self.sequences[slot]
        return self.num_exact[slot] if owner is None else owner.num_exact_tokens

    def _held(self, slot: int, request: Request, length: int | None = None) -> list[int]:
        """The first `length` tokens that a request may take from a slot; by default all of them."""
        if request.scores_prompt:
            return []
        owner, limit = self.sequences[slot], self._num_exact(slot)
        if request.takes_filled:
            limit = len(self.kept[slot]) if owner is None else owner.num_computed_tokens
        limit = limit if length is None else min(length, limit)
        return self.kept[slot][:limit] if owner is None else owner.leading(limit)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
