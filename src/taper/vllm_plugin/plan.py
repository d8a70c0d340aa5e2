"""Which tokens of a batch run which layers.

Knows nothing of any engine: policies and whole numbers in, numpy arrays out. The tokens of one request in a batch are
consecutive, so by nesting those that run a layer are the first ones, and one count for each request is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..policy import DepthPolicy, least_depths


class RequestTokens(NamedTuple):
    """The tokens of one request in a forward: `num_tokens` of them, starting at `first_position`."""

    policy: DepthPolicy
    first_position: int
    num_tokens: int
    prompt_length: int


class ActiveTokens(NamedTuple):
    """The tokens of a batch that run a layer."""

    counts: np.ndarray  # [requests] how many tokens of each request run it, always the first ones
    requests: np.ndarray  # [active requests] indices of the requests that have any
    rows: np.ndarray  # [active tokens] indices into the batch's tokens, ascending
    whole_batch: bool


class LayerRange(NamedTuple):
    """Consecutive layers that the same tokens run."""

    layers: range
    active: ActiveTokens


class Plan(NamedTuple):
    """One forward: what it runs and what that costs."""

    layer_ranges: tuple[LayerRange, ...]  # in order; layers that no token runs are in none of them
    full: bool  # whether every token runs every layer
    completion_tokens: int  # how many tokens are past the prompt, at step 1 or later
    layers_run: int  # the sum of their depths over the whole model, even if only some layers were planned for


class Planner:
    """Plans forwards over `layers`, some of the model's in a pipeline stage.

    Depths seldom change from one forward to the next, so the last plan is kept.
    """

    def __init__(self, num_hidden_layers: int, layers: range) -> None:
        self._num_hidden_layers = num_hidden_layers
        self._layers = layers
        self._key: list[object] = []
        self._layer_ranges: tuple[LayerRange, ...] = ()

    def plan(self, requests: Sequence[RequestTokens]) -> Plan:
        """Plan a forward over these requests, whose tokens are in the batch in this order."""
        key: list[object] = []  # all that the layer ranges depend on
        depths: list[list[int]] = []  # of each request's completion tokens; its prompt tokens run every layer
        completion_tokens = layers_run = 0
        for policy, first_position, num_tokens, prompt_length in requests:
            first_step = first_position - prompt_length + 1
            steps = range(max(1, first_step), first_step + num_tokens)
            depths.append([policy.depth(step) for step in steps])
            completion_tokens += len(depths[-1])
            layers_run += sum(depths[-1])
            key += (policy.skip_order, num_tokens, depths[-1])
        if key != self._key:
            self._key, self._layer_ranges = key, self._find_layer_ranges(requests, depths)
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
        ranges: list[LayerRange] = []
        distinct: dict[bytes, ActiveTokens] = {}
        for layer, column in zip(self._layers, counts.T, strict=True):
            if not column.any():
                continue
            active = distinct.setdefault(column.tobytes(), _active_tokens(column.copy(), num_tokens))
            if ranges and ranges[-1].active is active and ranges[-1].layers.stop == layer:
                ranges[-1] = LayerRange(range(ranges[-1].layers.start, layer + 1), active)
            else:
                ranges.append(LayerRange(range(layer, layer + 1), active))
        return tuple(ranges)


def _active_tokens(counts: np.ndarray, num_tokens: np.ndarray) -> ActiveTokens:
    first_rows = np.cumsum(num_tokens) - num_tokens
    active_before = np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(first_rows - active_before, counts)
    return ActiveTokens(counts, np.flatnonzero(counts), rows, bool((counts == num_tokens).all()))
