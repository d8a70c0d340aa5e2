"""The clock: the time of a step by depth on this machine, and what a policy saves by it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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
    """Milliseconds of a decode step: a sum over its layers.

    The first `layers_on_cpu` of them, if the others are on a device, take `on_cpu_ms` more each.
    """

    fixed_ms: float
    layer_ms: float
    on_cpu_ms: float = 0.0
    layers_on_cpu: int = 0

    def saved_ms(self, layer: int) -> float:
        """What a step saves by skipping a layer."""
        return self.layer_ms + (self.on_cpu_ms if layer < self.layers_on_cpu else 0.0)

    def step_ms(self, retained: Iterable[int]) -> float:
        """Time of a step that runs these layers."""
        return self.fixed_ms + sum(map(self.saved_ms, retained))

    def speedup(self, policy: DepthPolicy, max_tokens: int) -> float:
        """Predicted time per token from step 1 on at full depth, over that of the policy."""
        steps = Counter(map(policy.depth, range(1, max_tokens)))
        tapered = sum(count * self.step_ms(policy.retained_at(depth)) for depth, count in steps.items())
        return steps.total() * self.step_ms(range(policy.num_hidden_layers)) / tapered if tapered else 1.0


class TimedRuns(NamedTuple):
    """The speed in several timed runs, as a multiple of full depth's."""

    median: float
    slowest: float
    fastest: float


def measure_cost(
    engine: Engine, prompt_ids: Sequence[int], max_tokens: int, healed: DepthPolicy | None = None
) -> CostModel:
    """Fit the times to the median steps of outputs of `max_tokens` tokens at several constant depths.

    With a policy that has adapters, its layers are skipped as far as these go; otherwise which ones does not matter.
    """
    layers, on_cpu = engine.backend.config.num_hidden_layers, engine.backend.layers_on_cpu
    if healed is None:
        depths = sorted({layers, layers * 5 // 6, layers * 2 // 3})
        orders = [range(layers - 1, 0, -1), *([range(layers - 1)] if on_cpu else [])]
        policies = [DepthPolicy.static(layers, depth, order) for order in orders for depth in depths]
    else:
        most = len(healed.adapted_layers)
        depths = sorted({layers, layers - (most + 1) // 2, layers - most})
        policies = [DepthPolicy.static(layers, depth, healed.skip_order) for depth in depths]
        policies = [replace(policy, adapters=healed.adapters) for policy in policies]
    times = _alternate(engine, prompt_ids, policies, max_tokens)
    retained = [policy.retained_layers(1) for policy in policies]
    counts = [(1, len(layers), sum(layer < on_cpu for layer in layers)) for layers in retained]
    medians = [statistics.median(row[_WARM_UP:] or row) for row in times]
    fixed_ms, layer_ms, on_cpu_ms = np.linalg.lstsq(np.array(counts, float), np.array(medians), rcond=None)[0].tolist()
    return CostModel(max(0.0, fixed_ms), max(0.0, layer_ms), max(0.0, on_cpu_ms), on_cpu)


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
