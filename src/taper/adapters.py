"""Adapters: what tokens pass through instead of layers that they skip. Their files are in `models.policies`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

EPS = 1e-6  # of their RMS norm


@dataclass(frozen=True, eq=False)
class Adapters:
    """Small stand-ins of skipped layers: a token that skips layer l passes through adapter l, if there is one.

    An adapter computes x + up @ silu(down @ norm(x)); `norm` is RMS norm without gains, with `EPS`. It has no keys and
    values.

    `layers`: by layer, `down` [rank, hidden_size] and `up` [hidden_size, rank], arrays of float16. `file`: where they
    are stored, if they are. Two objects are equal if their arrays are.
    """

    layers: Mapping[int, tuple[Any, Any]]
    file: str = ""

    @property
    def hidden_size(self) -> int:
        """Of the model they were trained for."""
        return int(next(iter(self.layers.values()))[0].shape[1])

    @property
    def rank(self) -> int:
        """Of the largest adapter."""
        return max(len(down) for down, _ in self.layers.values())

    @cached_property
    def digest(self) -> str:
        """A content hash: 32 hex digits."""
        content = hashlib.sha256()
        for layer, (down, up) in sorted(self.layers.items()):
            content.update(f"{layer} {down.shape} ".encode() + down.tobytes() + up.tobytes())
        return content.hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Adapters) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def only(self, layers: Iterable[int]) -> Adapters:
        """The adapters of some layers."""
        return Adapters({layer: self.layers[layer] for layer in layers if layer in self.layers})
