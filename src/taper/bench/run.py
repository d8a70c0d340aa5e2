"""`run` measures phase after phase within a time budget and returns JSON data, which it writes after each phase.

Rates are per second; a realised fraction is (measured speedup - 1) / (ideal speedup - 1), the ideal by bytes read.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import count
from typing import Any

import numpy as np

from ..calibration.store import machine
from ..engine import Engine
from ..models.files import write_whole
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
from .peers import Peers, Speeds, find_llama_bench, one_line, taper
from .target import BenchOptions, Target, open_target

FORMAT_VERSION = 1
STEPS = 48  # at each depth
_PACKAGES = ("taper-llm", "numpy", "ggml-python", "torch", "triton", "transformers")
_DEPTHS = (1.0, 7 / 8, 3 / 4, 5 / 8, 1 / 2)  # of all layers
_MIN_IDEAL = 1.05  # speedup; below it, a realised fraction is noise
_PEER_START_S = 90.0  # what starting and compiling a peer may take

Json = dict[str, Any]


def run(options: BenchOptions, show: Callable[[str], None], torch_device: str = "cuda") -> Json:
    """Measure what the options ask for.

    Args:
        options: what to measure, and where to write it.
        show: called with each line of progress.
        torch_device: where PyTorch runs; "cpu" in tests.

    Raises:
        TaperError: a model, policy or option that does not work.
        OSError: the results cannot be written.
    """
    find_llama_bench(options.llama_bin)  # a wrong folder is reported before a model loads
    clock = Clock(60 * options.minutes)
    show("loading")
    target = open_target(options, torch_device)
    result: Json = {"format_version": FORMAT_VERSION, "conditions": _conditions(target, options)}
    result |= {"phases": {}, "dropped": [], "failed": {}}
    for name, phase in Phases(target, options, clock).all().items():
        show(name)
        try:
            clock.check()
            result["phases"][name] = phase()
        except OutOfTimeError:
            result["dropped"].append(name)
            show(f"{name}: left out, as the {options.minutes:g} minutes are over")
        except Exception as error:  # a phase that fails must not cost the others their results
            traceback.print_exc()
            result["failed"][name] = one_line(error)
        if options.json is not None:
            write_whole(options.json, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _conditions(target: Target, options: BenchOptions) -> Json:
    """What a reader needs to judge the results."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpu = None
    if target.on_torch:
        from .torch_device import device_name

        gpu = device_name(target.device)
    return {
        "date": datetime.date.today().isoformat(),
        "model": target.name,
        "weights": "random" if target.path is None else "the model's own",
        "backend": "torch" if target.on_torch else "ggml",
        "dtype": options.dtype,
        "gpu": gpu,
        "machine": machine(),
        "threads": target.threads,
        "versions": versions,
        "batch": 1,
        "decoding": "greedy, from a prompt of one token, sampling included",
        "statistic": f"median of up to {options.rounds} alternated rounds after a warm-up",
        "num_hidden_layers": target.config.num_hidden_layers,
        "policies": {name: policy.label for name, policy in target.policies.items()},
    }


class Phases:
    """The phases on one model; the later ones use what the earlier ones measured.

    Args:
        target: the model.
        options: lengths and rounds.
        clock: the time budget.
    """

    def __init__(self, target: Target, options: BenchOptions, clock: Clock) -> None:
        self._target, self._options, self._clock = target, options, clock
        self._engine = Engine(target.backend)
        self._bandwidth: float | None = None
        self._seeds = count(1)
        self._peers: Peers | None = None

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
        """Whether captured graphs and eager steps give the same tokens, on a tiny model."""
        from .torch_device import check_graphs

        return {"equal": check_graphs(self._target.device)}

    def check_reference(self) -> Json:
        """Whether captured graphs and the reference implementation give the same tokens, on a tiny model."""
        from .torch_device import check_reference

        try:
            return {"equal": check_reference(self._target.device)}
        except ImportError as error:
            return {"equal": {}, "left_out": f"the reference implementation needs transformers: {error}"}

    def bandwidth(self) -> Json:
        """The bandwidth of the memory: of a copy on a GPU, which counts twice, or of a read on a CPU."""
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
        """The time to first token of prompts of each length; every prompt is a new one."""
        full = DepthPolicy.full(self._target.config.num_hidden_layers)

        def prompt(length: int) -> Run:
            return measure(self._engine, full, prompt_tokens=length, seed=next(self._seeds), clock=self._clock)

        runs = {str(length): partial(prompt, length) for length in self._options.prompts}
        rows = []
        for name, results in self._rounds(runs).items():
            length, ttft = int(name), statistics.median(result.ttft_s for result in results)
            row: Json = {"prompt_tokens": length, "ttft_s": rounded(ttft), "tokens_per_s": rounded(length / ttft)}
            rows.append(row | {"rounds": len(results)})
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
        """Taper and other programs in turn: a prompt of one length, and an output of it from a prompt of one token."""
        if self._peers is None:
            if self._clock.left_s < _PEER_START_S:
                raise OutOfTimeError
            self._peers = Peers(self._target, self._options)
        ours = {f"Taper, {name}": taper(self._engine, policy) for name, policy in self._target.policies.items()}
        others = {name: partial(self._peers.run, name) for name in self._peers.available()}
        results: dict[str, list[Any]] = {}
        if others:
            results = self._rounds({name: partial(peer, length, self._clock) for name, peer in (ours | others).items()})
        unavailable = dict(self._peers.unavailable)
        rows = []
        for name, speeds in results.items():
            if name in unavailable:
                continue
            ttft, tpot = (statistics.median(values) for values in zip(*speeds, strict=True))
            row: Json = {"name": name, "ttft_s": rounded(ttft), "tpot_ms": rounded(tpot * 1e3)}
            row |= {"tokens_per_s": rounded(1 / tpot), "rounds": len(speeds)}
            if name in ours:
                row["over"] = {
                    other: _speed_ratio(speeds, results[other]) for other in others if other not in unavailable
                }
            rows.append(row)
        return {"tokens": length, "rows": rows, "unavailable": unavailable}

    def _rounds(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """Alternated results, at least one round of them.

        Raises:
            OutOfTimeError: the time did not suffice for one round.
        """
        results = alternate(runs, self._options.rounds, self._clock)
        if not all(results.values()):
            raise OutOfTimeError
        return results

    def _memory(self, num_bytes: float, seconds: float) -> Json:
        """Bytes of weights that a token reads, and the bandwidth that follows from its time."""
        rate = num_bytes / seconds
        share = None if self._bandwidth is None else rounded(rate / self._bandwidth)
        return {"mb_per_token": rounded(num_bytes / 1e6), "gb_per_s": rounded(rate / 1e9), "bandwidth_used": share}


def _gain(speedup: float, ideal: float) -> Json:
    """A speedup beside the ideal by bytes; no realised fraction where there is too little to gain."""
    fraction = None if ideal < _MIN_IDEAL else rounded((speedup - 1) / (ideal - 1))
    return {"speedup": rounded(speedup), "ideal_speedup": rounded(ideal), "realised_fraction": fraction}


def _speed_ratio(ours: Sequence[Speeds], theirs: Sequence[Speeds]) -> float:
    """Tokens per second over those of another program: the median over the rounds."""
    return rounded(statistics.median(b.tpot_s / a.tpot_s for a, b in zip(ours, theirs, strict=True)))


def rounded(value: float) -> float:
    """Five significant digits, more than any of these measurements has."""
    return float(f"{value:.5g}")
