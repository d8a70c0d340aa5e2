"""Which tokens of a batch run which layers, and for how many layers in a row that stays the same.

Knows nothing of any engine: policies and whole numbers in, numpy arrays out. A request's tokens in a batch are
consecutive positions; by nesting those that run a layer are the first ones, so a count for each request says it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..policy import DepthPolicy

_MOST_POLICIES = 1024


class Chunk(NamedTuple):
    """The tokens of one request in a batch: `num_tokens` of them, from the position `first_position` on."""

    policy: DepthPolicy
    first_position: int
    num_tokens: int
    prompt_length: int


class ActiveSet(NamedTuple):
    """The tokens that run a layer.

    counts: [chunks] how many of each chunk's tokens, the first ones.
    chunks: [active chunks] those with any.
    tokens: [active tokens] their rows in the batch, ascending.
    everyone: whether that is the whole batch.
    """

    counts: np.ndarray
    chunks: np.ndarray
    tokens: np.ndarray
    everyone: bool


class Run(NamedTuple):
    """Layers in a row that the same tokens run."""

    layers: range
    active: ActiveSet


class Plan(NamedTuple):
    """One forward: its runs in order (layers that nobody runs are in none), and what it costs.

    `answer_tokens` are those past the prompt (step 1 and later); `layers_run` is the sum of their depths over the
    whole model, whatever part of it was planned for.
    """

    runs: tuple[Run, ...]
    full: bool
    answer_tokens: int
    layers_run: int


class Planner:
    """Plans forwards over some layers of a model; the last plan is kept, as depths change seldom.

    Args:
        num_hidden_layers: layers of the whole model.
        layers: those planned for, in ascending order; a pipeline stage has only some.
    """

    def __init__(self, num_hidden_layers: int, layers: range) -> None:
        self._num_hidden_layers = num_hidden_layers
        self._layers = layers
        self._curves: dict[int, _Curve] = {}
        self._key: list[object] = []
        self._runs: tuple[Run, ...] = ()

    def plan(self, chunks: Sequence[Chunk]) -> Plan:
        """The runs of a forward over these chunks, whose tokens lie in the batch in this order."""
        key: list[object] = []
        depths: list[int | list[int]] = []
        answer_tokens = layers_run = 0
        full = True
        for policy, first_position, num_tokens, prompt_length in chunks:
            first_step = first_position - prompt_length + 1
            last_step = first_step + num_tokens - 1
            depth: int | list[int] = self._num_hidden_layers
            if last_step > 0:
                curve = self._curve(policy)
                if num_tokens == 1:
                    depth = curve.depth(last_step)
                    answer_tokens += 1
                    layers_run += depth
                    full = full and depth == self._num_hidden_layers
                else:
                    depth = [curve.depth(max(0, step)) for step in range(first_step, last_step + 1)]
                    answer = depth[max(0, 1 - first_step) :]
                    answer_tokens += len(answer)
                    layers_run += sum(answer)
                    full = full and depth[-1] == self._num_hidden_layers
            depths.append(depth)
            key += (id(policy), num_tokens, depth)
        if key != self._key:
            self._key, self._runs = key, self._find_runs(chunks, depths)
        return Plan(self._runs, full, answer_tokens, layers_run)

    def _curve(self, policy: DepthPolicy) -> _Curve:
        curve = self._curves.get(id(policy))
        if curve is None:
            if len(self._curves) >= _MOST_POLICIES:
                self._curves.clear()
                self._key = []  # an id may come back for another policy
            curve = self._curves[id(policy)] = _Curve(policy)
        return curve

    def _find_runs(self, chunks: Sequence[Chunk], depths: Sequence[int | list[int]]) -> tuple[Run, ...]:
        sizes = np.array([chunk.num_tokens for chunk in chunks])
        counts = np.empty((len(chunks), len(self._layers)), np.int64)
        for row, (chunk, depth) in enumerate(zip(chunks, depths, strict=True)):
            least = self._curve(chunk.policy).least_depth[self._layers.start : self._layers.stop]
            if isinstance(depth, int):
                counts[row] = (depth >= least) * chunk.num_tokens
            else:
                counts[row] = (np.array(depth)[:, None] >= least).sum(axis=0)
        runs: list[Run] = []
        sets: dict[bytes, ActiveSet] = {}
        for layer, column in zip(self._layers, counts.T, strict=True):
            if not column.any():
                continue
            active = sets.setdefault(column.tobytes(), _active_set(column.copy(), sizes))
            if runs and runs[-1].active is active and runs[-1].layers.stop == layer:
                runs[-1] = Run(range(runs[-1].layers.start, layer + 1), active)
            else:
                runs.append(Run(range(layer, layer + 1), active))
        return tuple(runs)


class _Curve:
    """A policy's depths by step, and by layer the least depth that runs it; found as they are needed."""

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy = policy  # held, so that its id stays its own
        self.least_depth = np.zeros(policy.num_hidden_layers, np.int64)
        for rank, layer in enumerate(policy.skip_order):
            self.least_depth[layer] = policy.num_hidden_layers - rank
        self._depths: list[int] = []

    def depth(self, step: int) -> int:
        known = len(self._depths)
        if step >= known:
            self._depths += (self.policy.depth(later) for later in range(known, max(step + 1, 2 * known)))
        return self._depths[step]


def _active_set(counts: np.ndarray, sizes: np.ndarray) -> ActiveSet:
    starts = np.cumsum(sizes) - sizes
    first = np.cumsum(counts) - counts
    tokens = np.arange(counts.sum()) + np.repeat(starts - first, counts)
    return ActiveSet(counts, np.flatnonzero(counts), tokens, bool((counts == sizes).all()))
