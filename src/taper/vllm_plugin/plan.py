"""Which tokens of a batch run which layers.

Knows nothing of any engine: policies and whole numbers in, numpy arrays out. The tokens of one request in a batch are
consecutive, so by nesting those that run a layer are a prefix of them, and its length for each request is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..adapters import Adapters
from ..policy import DepthPolicy, least_depths


class RequestTokens(NamedTuple):
    """The tokens of one request in a forward: `num_tokens` of them, starting at `first_position`."""

    policy: DepthPolicy
    first_position: int
    num_tokens: int
    prompt_length: int
    fills: bool = False  # whether its tokens leave keys and values in the layers that they skip

    def depths(self) -> list[int]:
        """The depths of those past the prompt, which are the last ones; prompt tokens run every layer."""
        first_step = self.first_position - self.prompt_length + 1
        return [self.policy.depth(step) for step in range(max(1, first_step), first_step + self.num_tokens)]


class ActiveTokens(NamedTuple):
    """The tokens of a batch that run a layer."""

    counts: np.ndarray  # [requests] how many leading tokens of each request run it
    requests: np.ndarray  # [active requests] indices of the requests with such tokens
    rows: np.ndarray  # [active tokens] indices into the batch's tokens, ascending
    whole_batch: bool


class PassingTokens(NamedTuple):
    """Tokens that skip a layer, and for which something is done there all the same."""

    rows: np.ndarray  # [tokens] indices into the batch's tokens
    adapters: Adapters | None  # what they pass through
    fills: bool  # whether the layer writes their keys and values


class LayerRange(NamedTuple):
    """Consecutive layers that the same tokens run, and other tokens that pass by in the same way."""

    layers: range
    active: ActiveTokens
    passing: tuple[PassingTokens, ...]


class Plan(NamedTuple):
    """One forward: what it runs and what that costs."""

    layer_ranges: tuple[LayerRange, ...]  # in order; layers that do nothing are in none of them
    full: bool  # whether every token runs every layer
    completion_tokens: int  # tokens past the prompt, at step 1 or later
    layers_run: int  # the sum of their depths over the whole model, even if only some layers were planned for


class Planner:
    """Plans forwards over `layers`, some of the model's in a pipeline stage.

    Depths seldom change from one forward to the next, so the last plan is kept.
    """

    def __init__(self, num_hidden_layers: int, layers: range) -> None:
        self._num_hidden_layers = num_hidden_layers
        self._layers = layers
        self._key: object = None  # all that the layer ranges depend on
        self._layer_ranges: tuple[LayerRange, ...] = ()

    def plan(self, requests: Sequence[RequestTokens]) -> Plan:
        """Plan a forward over these requests, whose tokens are in the batch in this order."""
        depths = [request.depths() for request in requests]
        key = [(part.policy.skip_order, part.policy.adapters, part.num_tokens, part.fills) for part in requests], depths
        if key != self._key:
            self._key, self._layer_ranges = key, self._find_layer_ranges(requests, depths)
        completion_tokens, layers_run = sum(map(len, depths)), sum(map(sum, depths))
        full = layers_run == completion_tokens * self._num_hidden_layers
        return Plan(self._layer_ranges, full, completion_tokens, layers_run)

    def _find_layer_ranges(
        self, requests: Sequence[RequestTokens], depths: Sequence[list[int]]
    ) -> tuple[LayerRange, ...]:
        num_tokens = np.array([request.num_tokens for request in requests])
        counts = np.empty((len(requests), len(self._layers)), np.int64)
        for index, (request, request_depths) in enumerate(zip(requests, depths, strict=True)):
            least = least_depths(request.policy.skip_order, self._num_hidden_layers)
            runs_layer = np.array(request_depths)[:, None] >= least[self._layers.start : self._layers.stop]
            counts[index] = request.num_tokens - len(request_depths) + runs_layer.sum(axis=0)
        columns = [column.tobytes() for column in counts.T]
        active = {column: _active_tokens(np.frombuffer(column, np.int64), num_tokens) for column in set(columns)}
        passing = {column: _passing_tokens(requests, active[column], num_tokens) for column in active}
        ranges = []
        for column, group in groupby(zip(self._layers, columns, strict=True), key=itemgetter(1)):
            layers = [layer for layer, _ in group]
            if len(active[column].rows) or passing[column]:
                ranges.append(LayerRange(range(layers[0], layers[-1] + 1), active[column], passing[column]))
        return tuple(ranges)


def _active_tokens(counts: np.ndarray, num_tokens: np.ndarray) -> ActiveTokens:
    first_rows = np.cumsum(num_tokens) - num_tokens
    active_before = np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(first_rows - active_before, counts)
    return ActiveTokens(counts, np.flatnonzero(counts), rows, bool((counts == num_tokens).all()))


def _passing_tokens(
    requests: Sequence[RequestTokens], active: ActiveTokens, num_tokens: np.ndarray
) -> tuple[PassingTokens, ...]:
    rows: dict[tuple[Adapters | None, bool], list[int]] = {}
    ends = np.cumsum(num_tokens)
    for request, count, end in zip(requests, active.counts.tolist(), ends.tolist(), strict=True):
        kind = request.policy.adapters, request.fills
        if kind != (None, False) and count < request.num_tokens:
            rows.setdefault(kind, []).extend(range(end - request.num_tokens + count, end))
    return tuple(PassingTokens(np.array(indices), *kind) for kind, indices in rows.items())
