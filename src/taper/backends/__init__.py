"""What a backend is: one forward over a batch of tokens. It knows nothing of alpha, sampling or text."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from ..loading import ModelConfig


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward, deepest first; tokens of one slot in the order of their positions.

    Layer l runs on the first `active[l]` tokens and leaves the hidden states of the rest as they are. A token
    attends to the cells of its slot up to its own position, itself included.

    Forwards of the same tokens that differ only from some layer on can share what comes before: the first one
    `keep`s its hidden states there, the others begin from them at `first_layer`. Keys and values of the layers
    below are then as the cells hold them.
    """

    tokens: np.ndarray  # int32 [N]
    positions: np.ndarray  # int32 [N], index in the sequence
    slots: np.ndarray  # int32 [N], which sequence of the key-value cache
    active: tuple[int, ...]  # [num_hidden_layers], each 0 to N
    logits_rows: tuple[int, ...]  # the tokens whose logits come back, in this order
    first_layer: int = 0  # above 0: begin from hidden[first_layer]
    keep: tuple[int, ...] = ()  # layers before which to leave hidden states in `hidden`; L: after the last
    hidden: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> float32 [N, hidden_size]


class Backend(Protocol):
    """Weights and a key-value cache of `num_slots` sequences of up to `context_length` tokens.

    Cells are addressed by slot and position and keep what was last written to them.
    """

    config: ModelConfig
    num_slots: int
    context_length: int

    def forward(self, batch: TokenBatch) -> np.ndarray:
        """Run the batch: write keys and values, return logits float32 [len(logits_rows), vocab_size]."""
        ...


def runs_by_slot(slots: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """The maximal runs of equal slots as (slot, first, end), end excluded."""
    edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    return tuple((int(slots[first]), first, end) for first, end in pairwise(edges))
