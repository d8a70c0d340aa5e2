"""Times of prompts, outputs and single steps on an engine, and the bytes a step reads. Knows no model files."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from ...backends import Backend, TokenBatch
from ...engine import Engine, Request
from ...policy import DepthPolicy, active_prefixes
from ...sampling import SamplingParams

ROUNDS = 5  # of a measurement of bandwidth
_WARM_UP_STEPS = 3  # at each depth, before any step is timed
_PARTS = 8  # per thread, so that the others help a slow one
K = TypeVar("K")
T = TypeVar("T")


class OutOfTimeError(Exception):
    """The time budget is spent."""


class Clock:
    """A time budget of `budget_s` seconds, which begins now."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.perf_counter() + budget_s

    def left_s(self) -> float:
        """Seconds left.

        Raises:
            OutOfTimeError: there are none.
        """
        left = self._end - time.perf_counter()
        if left <= 0:
            raise OutOfTimeError
        return left


UNLIMITED = Clock(math.inf)


class Speeds(NamedTuple):
    """Seconds until the first token, and seconds per token after it (nan if there is only one)."""

    ttft_s: float
    tpot_s: float


def measure(
    engine: Engine,
    policy: DepthPolicy,
    *,
    prompt_tokens: int = 1,
    max_tokens: int = 1,
    batch: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    clock: Clock = UNLIMITED,
) -> Speeds:
    """Complete `batch` random prompts side by side, and time when all have their first token, and the steps after it.

    To measure decoding after some context, give a prompt of that length; with `max_tokens` 1, only prompts are
    measured. The same seed gives the same prompts, which a second run finds in the key-value cache, so that only its
    decoding is timed. To time prompts, give each run its own seed. The engine's backend needs `batch` slots of
    `prompt_tokens` + `max_tokens` each.

    Raises:
        OutOfTimeError: the budget ended first.
        RequestError: prompt and output do not fit into the context.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    prompts = [random_prompt(engine, prompt_tokens, seed, row) for row in range(batch)]
    started = time.perf_counter()
    sequences = [engine.add(Request(prompt, params, policy)) for prompt in prompts]
    try:
        for sequence in sequences:  # prompts one after another, so that all rows begin to decode together
            while sequence.step == 0:
                clock.left_s()
                engine.step([sequence])
        first = time.perf_counter()
        for _ in range(max_tokens - 1):
            clock.left_s()
            engine.step(sequences)
        last = time.perf_counter()
    finally:
        for sequence in sequences:
            engine.abort(sequence)
    assert all(sequence.finish_reason == "length" and sequence.step == max_tokens for sequence in sequences)
    return Speeds(first - started, (last - first) / (max_tokens - 1) if max_tokens > 1 else math.nan)


def random_prompt(engine: Engine, length: int, seed: int, row: int = 0) -> list[int]:
    """Random token ids, a function of seed and row; a shorter prompt is a prefix of a longer one."""
    rng = np.random.default_rng([seed, row])
    return rng.integers(0, engine.backend.config.vocab_size, length).tolist()  # type: ignore[no-any-return]


def step_ms_by_depth(
    backend: Backend,
    skip_order: Sequence[int],
    depths: Sequence[int],
    steps: int,
    first_position: int = 0,
    clock: Clock = UNLIMITED,
) -> dict[int, float]:
    """The median milliseconds of a forward of one token at each depth; the depths take turns.

    Positions rise from `first_position` up to the end of the context.

    Raises:
        OutOfTimeError: the time budget ended first.
    """
    layers = backend.config.num_hidden_layers
    times: dict[int, list[float]] = {depth: [] for depth in depths}
    for step in range(steps + _WARM_UP_STEPS):
        for depth in depths:
            clock.left_s()
            position = min(first_position + step, backend.context_length - 1)
            tokens, positions, slots = (np.array([value], np.int32) for value in (1, position, 0))
            active = active_prefixes(tuple(skip_order), layers, [depth])
            batch = TokenBatch(tokens, positions, slots, active, greedy_rows=(0,), fill=True)
            backend.forward(batch)  # computes the keys that shallower steps left out, which no policy asks for
            started = time.perf_counter()
            backend.forward(batch)
            times[depth].append((time.perf_counter() - started) * 1e3)
    return {depth: statistics.median(row[_WARM_UP_STEPS:]) for depth, row in times.items()}


def alternate(runs: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """The results of each run after a warm-up; runs take turns, so whatever slows the machine slows all alike.

    When a run is out of time, only the complete rounds before it count.

    Raises:
        OutOfTimeError: there is no complete round.
    """
    results: dict[K, list[T]] = {name: [] for name in runs}
    try:
        for round_number in range(rounds + 1):
            round_results = {name: run() for name, run in runs.items()}
            if round_number:
                for name, result in round_results.items():
                    results[name].append(result)
    except OutOfTimeError:
        if not all(results.values()):
            raise
    return results


def step_bytes(weight_bytes: Mapping[str, int], layers: Collection[int]) -> int:
    """Bytes of weights that a step reads: its layers, lm_head once, tied or not, and all else but tables of inputs."""
    left_out = "embed_tokens", "layer_embeddings", "lm_head", "layers."
    always = sum(size for name, size in weight_bytes.items() if not name.startswith(left_out))
    prefixes = tuple(f"layers.{layer}." for layer in layers)
    head = weight_bytes.get("lm_head", weight_bytes["embed_tokens"])
    return head + always + sum(size for name, size in weight_bytes.items() if name.startswith(prefixes))


def mean_step_bytes(weight_bytes: Mapping[str, int], policy: DepthPolicy, max_tokens: int) -> float:
    """Mean bytes of a step after the first, in an output of at least 2 `max_tokens`; adapters are in f16."""
    depths = [policy.depth(step) for step in range(1, max_tokens)]
    by_depth = {depth: step_bytes(weight_bytes, policy.retained_at(depth)) for depth in set(depths)}
    for layer, (down, up) in policy.adapters.layers.items() if policy.adapters else ():
        for depth in by_depth:
            by_depth[depth] += 0 if layer in policy.retained_at(depth) else int(down.nbytes + up.nbytes)
    return statistics.fmean(by_depth[depth] for depth in depths)


def read_bandwidth(threads: int, num_bytes: int = 1 << 29) -> float:
    """Bytes per second that so many threads of the CPU read together."""
    values = np.ones(num_bytes // 8, np.int64)
    parts = np.array_split(values, threads * _PARTS)
    with ThreadPoolExecutor(threads) as pool:
        return values.nbytes / median_seconds(lambda: list(pool.map(np.bitwise_or.reduce, parts)))


def median_seconds(run: Callable[[], object]) -> float:
    """The median time of a few runs after a warm-up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
