"""The clock: the time of a step by depth on this machine, and what a policy saves by it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...engine import Engine, Request
from ...policy import DepthPolicy, Gate
from ...sampling import SamplingParams

ROUNDS = 5  # timed runs of a policy
GREEDY = SamplingParams()
_WARM_UP = 4  # steps; the first ones prepare graphs


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a decode step: a straight line in its depth, which includes filling the layers that it skips."""

    fixed_ms: float
    layer_ms: float
    gate_ms: float = 0.0  # more in each step of a policy with gates, which needs the probability of its token

    def step_ms(self, depth: float) -> float:
        """Time of a step at a depth; at a mean depth, the mean time."""
        return self.fixed_ms + self.layer_ms * depth

    def speedup(self, policy: DepthPolicy, mean_depth: float) -> float:
        """Predicted time per token at full depth, over that of a policy whose steps run so many layers on average.

        Without gates, `DepthPolicy.mean_depth` knows how many; with gates, the text decides.
        """
        own = self.step_ms(mean_depth) + self.gate_ms * policy.is_gated
        return self.step_ms(policy.num_hidden_layers) / own


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
    What a gate costs comes from one that is always open, at the least of these depths.
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
    is_open = replace(policies[0].schedule, gates=(Gate(0.0, depths[0]),))
    times = step_times(engine, prompt_ids, [*policies, replace(policies[0], schedule=is_open)], max_tokens)
    *step_ms, gated_ms = (statistics.median(row[_WARM_UP:] or row) for row in times)
    layer_ms, fixed_ms = np.polyfit(depths, step_ms, 1)
    return CostModel(*(max(0.0, float(ms)) for ms in (fixed_ms, layer_ms, gated_ms - step_ms[0])))


def measure_speedup(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policy: DepthPolicy,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> TimedRuns:
    """Time per token at full depth over that of the policy, in `ROUNDS` pairs of outputs, to the prompts in turn."""
    pair = [DepthPolicy.full(policy.num_hidden_layers), policy]
    step_times(engine, prompts[0], pair, max_tokens)  # prepares the graphs of every depth
    times = [step_times(engine, prompts[i % len(prompts)], pair, max_tokens, sampling) for i in range(ROUNDS)]
    ratios = [sum(full) / sum(tapered) for full, tapered in times]
    return TimedRuns(*(round(x, 5) for x in (statistics.median(ratios), min(ratios), max(ratios))))


def step_times(
    engine: Engine,
    prompt_ids: Sequence[int],
    policies: Sequence[DepthPolicy],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> list[list[float]]:
    """Milliseconds of each step from 1 on, one output a policy. Policies take turns at each step, so that whatever
    slows the machine slows them alike."""
    params = replace(sampling, max_tokens=max_tokens, ignore_eos=True)
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
