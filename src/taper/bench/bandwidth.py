"""How fast this machine moves memory: what the bytes of weights that a step reads are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROUNDS = 5
_PARTS = 8  # for each thread, so that a slow one is helped by the others


def read_bandwidth(threads: int, num_bytes: int = 1 << 29) -> float:
    """Bytes per second that so many threads of the CPU read together."""
    values = np.ones(num_bytes // 8, np.int64)
    parts = np.array_split(values, threads * _PARTS)
    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            for _ in pool.map(np.bitwise_or.reduce, parts):
                pass

        return values.nbytes / median_seconds(read)


def median_seconds(run: Callable[[], object]) -> float:
    """The median time of a few runs after a warm-up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
