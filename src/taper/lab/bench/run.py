"""`run` measures phase after phase within a time budget and returns JSON data, which it writes after each phase.

Rates are per second; a realised fraction is (measured speedup - 1) / (ideal speedup - 1), the ideal by bytes read.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import count
from typing import Any

import numpy as np

from ...engine import Engine
from ...errors import RequestError
from ...models.files import write_whole
from ...policy import DepthPolicy, middle_first_order
from ..calibration.store import machine
from . import peers
from .measure import (
    Clock,
    OutOfTimeError,
    Speeds,
    alternate,
    mean_step_bytes,
    measure,
    read_bandwidth,
    step_bytes,
    step_ms_by_depth,
)
from .target import LENGTHS, BenchOptions, Target, open_target

FORMAT_VERSION = 1
STEPS = 48  # at each depth
TEMPERATURE = 0.8  # of outputs that are sampled
_PACKAGES = ("taper-llm", "numpy", "torch", "triton", "transformers")
_DEPTHS = (1.0, 7 / 8, 3 / 4, 5 / 8, 1 / 2)  # of all layers
_MIN_IDEAL = 1.05  # speedup; below it, a realised fraction is noise
_PEER_START_S = 90.0  # what starting and compiling a peer may take

Json = dict[str, Any]


def run(options: BenchOptions, show: Callable[[str], None], torch_device: str = "cuda") -> Json:
    """Measure what the options ask for; `show` is called with each line of progress.

    PyTorch runs on `torch_device`, which is "cpu" in tests.

    Raises:
        TaperError: a model, policy or option that does not work.
        OSError: the results cannot be written.
    """
    peers.find_llama_bench(options.llama_bin)  # a wrong folder is reported before a model loads
    clock = Clock(60 * options.minutes)
    show("loading")
    target = open_target(options, torch_device)
    result: Json = {"format_version": FORMAT_VERSION, "conditions": _conditions(target, options)}
    result |= {"phases": {}, "dropped": [], "failed": {}}
    for name, phase in Phases(target, options, clock).all().items():
        show(name)
        try:
            clock.left_s()
            result["phases"][name] = _rounded(phase())
        except OutOfTimeError:
            result["dropped"].append(name)
            show(f"{name}: left out, as the {options.minutes:g} minutes are over")
        except Exception as error:  # a phase that fails must not cost the others their results
            traceback.print_exc()
            result["failed"][name] = _one_line(error)
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
        "kernels": target.backend.kernels,
        "layouts": target.backend.layouts,
        "head": target.backend.head,
        "dtype": options.dtype,
        "gpu": gpu,
        "device": target.device,
        "gpu_layers": options.gpu_layers,
        "machine": machine(),
        "threads": target.threads,
        "versions": versions,
        "batch": 1,
        "decoding": "greedy, from a prompt of one token, the choice of tokens included; "
        f"outputs of each length also at temperature {TEMPERATURE}",
        "statistic": f"median of up to {options.rounds} alternated rounds after a warm-up",
        "num_hidden_layers": target.config.num_hidden_layers,
        "policies": {name: policy.label for name, policy in target.policies.items()},
    }


class Phases:
    """The phases on one model within a time budget; the later ones use what the earlier ones measured."""

    def __init__(self, target: Target, options: BenchOptions, clock: Clock) -> None:
        self._target, self._options, self._clock = target, options, clock
        self._engine = Engine(target.backend)
        self._bandwidth: float | None = None
        self._seeds = count(1)
        self._peers: dict[str, peers.Peer] | None = None  # None until they are started
        self._unavailable: dict[str, str] = {}  # peers that cannot run here or have failed, and why

    def all(self) -> dict[str, Callable[[], Json]]:
        """The phases by name, in the order in which they are measured: short outputs first.

        Prompts come before them, but after lengths that were asked for, which a short budget must reach.
        """
        phases: dict[str, Callable[[], Json]] = {}
        if self._target.on_torch:
            from .torch_device import check_graphs, check_reference

            phases["graphs equal eager steps"] = partial(self.check, check_graphs)
            phases["graphs equal the reference implementation"] = partial(self.check, check_reference)
        if self._target.on_torch or self._target.device == "cpu":
            phases["bandwidth"] = self.bandwidth
        phases["depth"] = self.depth
        prompts: dict[str, Callable[[], Json]] = {"prompts": self.prompts}
        outputs: dict[str, Callable[[], Json]] = {}
        for length in self._options.lengths:
            outputs[f"outputs of {length}"] = partial(self.outputs, length)
            if not self._options.no_peers:
                outputs[f"peers at {length}"] = partial(self.compare, length)
        return phases | (prompts | outputs if self._options.lengths == LENGTHS else outputs | prompts)

    def check(self, compare_tokens: Callable[[str], dict[str, bool]]) -> Json:
        """Whether captured graphs and something else give the same tokens on a tiny model, by policy."""
        try:
            return {"equal": compare_tokens(self._target.device)}
        except ImportError as error:
            return {"equal": {}, "left_out": f"the reference implementation needs transformers: {error}"}

    def bandwidth(self) -> Json:
        """The bandwidth of the memory: of a copy on a GPU, which counts twice, or of a read on a CPU."""
        if self._target.on_torch:
            from .torch_device import copy_bandwidth

            kind, self._bandwidth = "copy", copy_bandwidth(self._target.device)
        else:
            kind, self._bandwidth = "read", read_bandwidth(self._target.threads)
        return {"kind": kind, "gb_per_s": self._bandwidth / 1e9}

    def depth(self) -> Json:
        """One decode step at several depths in turn, and the straight line through them."""
        layers, sizes = self._target.config.num_hidden_layers, self._target.backend.weight_bytes
        order = middle_first_order(layers)
        depths = sorted({max(layers - len(order), round(part * layers), 1) for part in _DEPTHS}, reverse=True)
        ms = step_ms_by_depth(self._target.backend, order, depths, STEPS, clock=self._clock)
        read = {d: step_bytes(sizes, DepthPolicy.static(layers, d, order).retained_at(d)) for d in depths}
        layer_ms, fixed_ms = np.polyfit(depths, list(ms.values()), 1) if len(depths) > 1 else (0.0, ms[layers])
        rows = [
            {"depth": d, "step_ms": ms[d]}
            | self._memory(read[d], ms[d] / 1e3)
            | _gain(ms[layers] / ms[d], read[layers] / read[d])
            for d in depths
        ]
        return {"rows": rows, "ms_per_layer": layer_ms, "fixed_ms": fixed_ms, "steps": STEPS}

    def prompts(self) -> Json:
        """The time to first token of prompts of each length."""
        full = self._target.policies["full"]
        runs = {length: partial(self._ttft_s, full, length) for length in self._options.prompts}
        rows = []
        for length, times in alternate(runs, self._options.rounds).items():
            ttft = statistics.median(times)
            rows.append({"prompt_tokens": length, "ttft_s": ttft, "tokens_per_s": length / ttft, "rounds": len(times)})
        return {"rows": rows}

    def outputs(self, length: int) -> Json:
        """Outputs of one length under each policy, greedy and sampled in turn."""
        policies, sizes = self._target.policies, self._target.backend.weight_bytes
        runs = {
            (name, temperature): partial(self._tpot_s, policy, length, temperature)
            for name, policy in policies.items()
            for temperature in (0.0, TEMPERATURE)
        }
        times = alternate(runs, self._options.rounds)
        results, sampled = ({name: times[name, t] for name in policies} for t in (0.0, TEMPERATURE))
        read = {name: mean_step_bytes(sizes, policy, length) for name, policy in policies.items()}
        rows = []
        for name, policy in policies.items():
            tpot, speedup = statistics.median(results[name]), _median_ratio(results["full"], results[name])
            row = {"policy": name, "mean_depth": policy.mean_depth(length), "tpot_ms": tpot * 1e3}
            row |= {"tokens_per_s": 1 / tpot, "sampled_tokens_per_s": 1 / statistics.median(sampled[name])}
            row |= self._memory(read[name], tpot)
            rows.append(row | _gain(speedup, read["full"] / read[name]) | {"rounds": len(results[name])})
        return {"output_tokens": length, "rows": rows}

    def compare(self, length: int) -> Json:
        """Taper and other programs in turn: a prompt of this length, and an output of it from a prompt of one token."""
        if self._peers is None:
            self._peers = self._open_peers()
        ours: dict[str, Callable[[], Any]] = {
            f"Taper, {name}": partial(self._taper, policy, length) for name, policy in self._target.policies.items()
        }
        theirs = {name: partial(self._peer, name, length) for name in self._peers if name not in self._unavailable}
        results = alternate(ours | theirs, self._options.rounds) if theirs else {}
        results = {name: speeds for name, speeds in results.items() if name not in self._unavailable}
        tpots = {name: [tpot for _, tpot in speeds] for name, speeds in results.items()}
        rows = []
        for name, speeds in results.items():
            ttft, tpot = (statistics.median(values) for values in zip(*speeds, strict=True))
            row = {"name": name, "ttft_s": ttft, "tpot_ms": tpot * 1e3, "tokens_per_s": 1 / tpot, "rounds": len(speeds)}
            if name in ours:
                row["over"] = {other: _median_ratio(tpots[other], tpots[name]) for other in tpots if other in theirs}
            rows.append(row)
        return {"tokens": length, "rows": rows, "unavailable": dict(self._unavailable)}

    def _open_peers(self) -> dict[str, peers.Peer]:
        """The peers that can run here.

        Raises:
            OutOfTimeError: there is too little time to start one.
        """
        if self._clock.left_s() < _PEER_START_S:
            raise OutOfTimeError
        opened = {}
        for name, open_peer in peers.PEERS.items():
            try:
                opened[name] = open_peer(self._target, self._options)
            except Exception as error:  # the failure of another program must not cost Taper's own results
                self._unavailable[name] = _one_line(error)
        return opened

    def _peer(self, name: str, length: int) -> Speeds | None:
        """Measure a peer; None if it fails or has failed before."""
        assert self._peers is not None
        if name in self._unavailable:
            return None
        try:
            return self._peers[name](length, self._clock)
        except OutOfTimeError:
            raise
        except Exception as error:  # as in `_open_peers`
            self._unavailable[name] = _one_line(error)
            return None

    def _taper(self, policy: DepthPolicy, length: int) -> Speeds:
        return Speeds(self._ttft_s(policy, length), self._tpot_s(policy, length))

    def _ttft_s(self, policy: DepthPolicy, length: int) -> float:
        """Time a prompt; each is new, as the cache would hold one that was seen before."""
        seed = next(self._seeds)
        return measure(self._engine, policy, prompt_tokens=length, seed=seed, clock=self._clock).ttft_s

    def _tpot_s(self, policy: DepthPolicy, length: int, temperature: float = 0.0) -> float:
        """Time an output from a prompt of one token."""
        return measure(self._engine, policy, max_tokens=length, temperature=temperature, clock=self._clock).tpot_s

    def _memory(self, num_bytes: float, seconds: float) -> Json:
        """Bytes of weights that a token reads, and the bandwidth that its time implies."""
        rate = num_bytes / seconds
        share = None if self._bandwidth is None else rate / self._bandwidth
        return {"mb_per_token": num_bytes / 1e6, "gb_per_s": rate / 1e9, "bandwidth_used": share}


def _gain(speedup: float, ideal: float) -> Json:
    """A speedup beside the ideal by bytes; no realised fraction where there is too little to gain."""
    fraction = None if ideal < _MIN_IDEAL else (speedup - 1) / (ideal - 1)
    return {"speedup": speedup, "ideal_speedup": ideal, "realised_fraction": fraction}


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _rounded(data: Any) -> Any:
    """The same data with five significant digits, more than any of these measurements has."""
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.5g}") if isinstance(data, float) else data


def _one_line(error: Exception) -> str:
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}".splitlines()[0][:300]
