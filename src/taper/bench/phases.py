"""What a benchmark measures, phase by phase: each function returns one phase as JSON data.

Rates are per second; a realised fraction is (measured speedup - 1) / (ideal speedup - 1), the ideal by bytes read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ..engine import Engine
from ..policy import DepthPolicy, middle_first_order
from .measure import (
    Clock,
    OutOfTimeError,
    Run,
    alternate,
    mean_step_bytes,
    measure,
    read_bandwidth,
    step_bytes,
    step_ms_by_depth,
)
from .options import Options
from .peers import Peer, Speeds, guarded, open_peers, taper
from .target import Target

STEPS = 48  # of each depth
_DEPTHS = (1.0, 7 / 8, 3 / 4, 5 / 8, 1 / 2)  # of all layers
_LEAST_GAIN = 1.05  # as an ideal speedup: below it, a realised fraction is noise
_PEER_START_S = 90.0  # what starting and compiling a peer may take

Json = dict[str, Any]


class Phases:
    """The phases on one model; the later ones use what the earlier ones measured.

    Args:
        target: the model.
        options: lengths and rounds.
        clock: the time budget.
    """

    def __init__(self, target: Target, options: Options, clock: Clock) -> None:
        self._target, self._options, self._clock = target, options, clock
        self._engine = Engine(target.backend)
        self._bandwidth: float | None = None
        self._seeds = count(1)
        self._peers: dict[str, Peer] | None = None
        self._unavailable: dict[str, str] = {}

    def all(self) -> dict[str, Callable[[], Json]]:
        """The phases by name, in the order in which they are measured: short outputs first."""
        phases: dict[str, Callable[[], Json]] = {}
        if self._target.on_torch:
            phases["graphs equal eager steps"] = self.check_graphs
            phases["graphs equal the reference implementation"] = self.check_reference
        phases |= {"bandwidth": self.bandwidth, "depth": self.depth, "prompts": self.prompts}
        for length in self._options.lengths:
            phases[f"outputs of {length}"] = partial(self.outputs, length)
            if not self._options.no_peers:
                phases[f"peers at {length}"] = partial(self.compare, length)
        return phases

    def check_graphs(self) -> Json:
        """Captured graphs and eager steps on a tiny model: the same tokens?"""
        from .torch_device import check_graphs

        return {"equal": check_graphs(self._target.device)}

    def check_reference(self) -> Json:
        """Captured graphs and the reference implementation on a tiny model: the same tokens?"""
        try:
            from .torch_device import check_reference

            return {"equal": check_reference(self._target.device)}
        except ImportError as error:
            return {"equal": {}, "left_out": f"the reference implementation needs transformers: {error}"}

    def bandwidth(self) -> Json:
        """What the memory gives: a copy on a GPU, counted twice, or a read on a CPU."""
        if self._target.on_torch:
            from .torch_device import copy_bandwidth

            kind, self._bandwidth = "copy", copy_bandwidth(self._target.device)
        else:
            kind, self._bandwidth = "read", read_bandwidth(self._target.threads)
        return {"kind": kind, "gb_per_s": rounded(self._bandwidth / 1e9)}

    def depth(self) -> Json:
        """One decode step at several depths in turn, and the straight line through them."""
        layers, sizes = self._target.config.num_hidden_layers, self._target.backend.weight_bytes
        order = middle_first_order(layers)
        depths = sorted({max(layers - len(order), round(part * layers), 1) for part in _DEPTHS}, reverse=True)
        ms = step_ms_by_depth(self._target.backend, order, depths, STEPS, clock=self._clock)
        read = {d: step_bytes(sizes, DepthPolicy.static(layers, d, order).retained_at(d)) for d in depths}
        layer_ms, fixed_ms = np.polyfit(depths, list(ms.values()), 1) if len(depths) > 1 else (0.0, ms[layers])
        rows = [
            {"depth": d, "step_ms": rounded(ms[d])}
            | self._memory(read[d], ms[d] / 1e3)
            | _gain(ms[layers] / ms[d], read[layers] / read[d])
            for d in depths
        ]
        return {"rows": rows, "ms_per_layer": rounded(layer_ms), "fixed_ms": rounded(fixed_ms), "steps": STEPS}

    def prompts(self) -> Json:
        """Prompts of each length, until the first token; a new prompt each time."""
        full = DepthPolicy.full(self._target.config.num_hidden_layers)

        def run(length: int) -> Run:
            return measure(self._engine, full, prompt_tokens=length, seed=next(self._seeds), clock=self._clock)

        runs = {str(length): partial(run, length) for length in self._options.prompts}
        rows = []
        for name, results in self._rounds(runs).items():
            ttft = statistics.median(result.ttft_s for result in results)
            rows.append(
                {"prompt_tokens": int(name), "ttft_s": rounded(ttft), "tokens_per_s": rounded(int(name) / ttft)}
            )
            rows[-1]["rounds"] = len(results)
        return {"rows": rows}

    def outputs(self, length: int) -> Json:
        """Outputs of one length under each policy, from a prompt of one token."""
        policies, sizes = self._target.policies, self._target.backend.weight_bytes
        runs = {
            name: partial(measure, self._engine, policy, max_tokens=length, clock=self._clock)
            for name, policy in policies.items()
        }
        results = self._rounds(runs)
        read = {name: mean_step_bytes(sizes, policy, length) for name, policy in policies.items()}
        rows = []
        for name, policy in policies.items():
            tpot = statistics.median(result.tpot_s for result in results[name])
            pairs = zip(results["full"], results[name], strict=True)
            speedup = statistics.median(full.tpot_s / tapered.tpot_s for full, tapered in pairs)
            row: Json = {"policy": name, "mean_depth": rounded(policy.mean_depth(length))}
            row |= {"tpot_ms": rounded(tpot * 1e3), "tokens_per_s": rounded(1 / tpot)}
            row |= self._memory(read[name], tpot) | _gain(speedup, read["full"] / read[name])
            rows.append(row | {"rounds": len(results[name])})
        return {"output_tokens": length, "rows": rows}

    def compare(self, length: int) -> Json:
        """Other programs in turn with Taper: a prompt of one length, and an output of it from a prompt of one token."""
        ours = {f"Taper, {name}": taper(self._engine, policy) for name, policy in self._target.policies.items()}
        others = self._open_peers()
        if not others:
            return {"rows": [], "unavailable": dict(self._unavailable)}
        runs = {
            name: partial(guarded(name, peer, self._unavailable), length, self._clock)
            for name, peer in (ours | others).items()
        }
        results = {name: speeds for name, speeds in self._rounds(runs).items() if name not in self._unavailable}
        rows = []
        for name, speeds in results.items():
            ttft, tpot = (statistics.median(values) for values in zip(*speeds, strict=True))
            row: Json = {"name": name, "ttft_s": rounded(ttft), "tpot_ms": rounded(tpot * 1e3)}
            row |= {"tokens_per_s": rounded(1 / tpot), "rounds": len(speeds)}
            if name in ours:
                row["over"] = {other: _faster_by(speeds, results[other]) for other in others if other in results}
            rows.append(row)
        return {"tokens": length, "rows": rows, "unavailable": dict(self._unavailable)}

    def _open_peers(self) -> dict[str, Peer]:
        """The peers that have not failed, opened on first use."""
        if self._peers is None:
            if self._clock.left_s < _PEER_START_S:
                raise OutOfTimeError
            self._peers, self._unavailable = open_peers(self._target, self._options)
        return {name: peer for name, peer in self._peers.items() if name not in self._unavailable}

    def _rounds(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """Alternated results, at least one round of them.

        Raises:
            OutOfTimeError: not even one round fitted.
        """
        results = alternate(runs, self._options.rounds, self._clock)
        if not all(results.values()):
            raise OutOfTimeError
        return results

    def _memory(self, num_bytes: float, seconds: float) -> Json:
        """Bytes of weights that a token reads, and the bandwidth that this makes of its time."""
        rate = num_bytes / seconds
        share = None if self._bandwidth is None else rounded(rate / self._bandwidth)
        return {"mb_per_token": rounded(num_bytes / 1e6), "gb_per_s": rounded(rate / 1e9), "bandwidth_used": share}


def _gain(speedup: float, ideal: float) -> Json:
    """A speedup beside the ideal by bytes; no fraction where there is too little to gain."""
    fraction = None if ideal < _LEAST_GAIN else rounded((speedup - 1) / (ideal - 1))
    return {"speedup": rounded(speedup), "ideal_speedup": rounded(ideal), "realised_fraction": fraction}


def _faster_by(ours: Sequence[Speeds], theirs: Sequence[Speeds]) -> float:
    """How many times the tokens per second of another program: the median over neighbouring runs."""
    return rounded(statistics.median(b.tpot_s / a.tpot_s for a, b in zip(ours, theirs, strict=True)))


def rounded(value: float) -> float:
    """Five digits, which is more than any of these figures has."""
    return float(f"{value:.5g}")
