"""The clock: the time of a step by depth on this machine, and what a policy saves by it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...engine import Engine, Request
from ...policy import DepthPolicy
from ...sampling import SamplingParams

ROUNDS = 5  # timed runs of a policy
_WARM_UP = 4  # steps; the first ones prepare graphs


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a decode step: a straight line in its depth."""

    fixed_ms: float
    layer_ms: float

    def step_ms(self, depth: float) -> float:
        """Time of a step at a depth; at a mean depth, the mean time."""
        return self.fixed_ms + self.layer_ms * depth

    def speedup(self, policy: DepthPolicy, max_tokens: int) -> float:
        """Predicted time per token from step 1 on at full depth, over that of the policy."""
        return self.step_ms(policy.num_hidden_layers) / self.step_ms(policy.mean_depth(max_tokens))


class TimedRuns(NamedTuple):
    """The speed in several timed runs, as a multiple of full depth's."""

    median: float
    slowest: float
    fastest: float


def measure_cost(
    engine: Engine, prompt_ids: Sequence[int], max_tokens: int, healed: DepthPolicy | None = None
) -> CostModel:
    """Fit the line to the median steps of outputs of `max_tokens` tokens at several constant depths.

    With a policy that has adapters, its layers are skipped as far as these go; otherwise which ones does not matter.
    """
    layers = engine.backend.config.num_hidden_layers
    if healed is None:
        depths = sorted({layers, layers * 5 // 6, layers * 2 // 3})
        policies = [DepthPolicy.static(layers, depth, range(layers - 1, 0, -1)) for depth in depths]
    else:
        most = len(healed.adapted_layers)
        depths = sorted({layers, layers - (most + 1) // 2, layers - most})
        policies = [DepthPolicy.static(layers, depth, healed.skip_order) for depth in depths]
        policies = [replace(policy, adapters=healed.adapters) for policy in policies]
    times = _alternate(engine, prompt_ids, policies, max_tokens)
    layer_ms, fixed_ms = np.polyfit(depths, [statistics.median(row[_WARM_UP:] or row) for row in times], 1)
    return CostModel(max(0.0, float(fixed_ms)), max(0.0, float(layer_ms)))


def measure_speedup(engine: Engine, prompt_ids: Sequence[int], policy: DepthPolicy, max_tokens: int) -> TimedRuns:
    """Time per token at full depth over that of the policy, in `ROUNDS` pairs of outputs."""
    pair = [DepthPolicy.full(policy.num_hidden_layers), policy]
    _alternate(engine, prompt_ids, pair, max_tokens)  # prepares the graphs of every depth
    times = [_alternate(engine, prompt_ids, pair, max_tokens) for _ in range(ROUNDS)]
    ratios = [sum(full) / sum(tapered) for full, tapered in times]
    return TimedRuns(*(round(x, 5) for x in (statistics.median(ratios), min(ratios), max(ratios))))


def _alternate(
    engine: Engine, prompt_ids: Sequence[int], policies: Sequence[DepthPolicy], max_tokens: int
) -> list[list[float]]:
    """Milliseconds of each step from 1 on, one output a policy. Policies take turns at each step, so that whatever
    slows the machine slows them alike."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sequences = [engine.add(Request(tuple(prompt_ids), params, policy)) for policy in policies]
    times: list[list[float]] = [[] for _ in policies]
    try:
        for sequence in sequences:
            while sequence.step == 0:
                engine.step([sequence])
        for _ in range(1, max_tokens):
            for sequence, spent in zip(sequences, times, strict=True):
                started = time.perf_counter()
                engine.step([sequence])
                spent.append((time.perf_counter() - started) * 1e3)
    finally:
        for sequence in sequences:
            engine.abort(sequence)
    return times
