"""Mean depth and skipped layers at vLLM's own /metrics, named as at /metrics of Taper's server.

Depths are known where the model runs, but another process serves /metrics. A small file, mapped by both, carries two
counters of each engine from one to the other. Engines on other machines are not counted.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SLOTS = 256  # engines (data-parallel ranks) that one file has room for


def counters(path: str, slot: int) -> np.ndarray:
    """The completion tokens of one engine and the layers run for them, `slot` being its row of the file."""
    row: np.ndarray = _map(path)[slot % _SLOTS]
    return row


def watch(num_hidden_layers: int) -> str:
    """Make a file of counters and show them at this process's /metrics; its path is for `counters` elsewhere."""
    from prometheus_client import REGISTRY

    handle, path = tempfile.mkstemp(prefix="taper-metrics-")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    _collector.engines.append((_map(path, "w+"), num_hidden_layers))
    if len(_collector.engines) == 1:
        REGISTRY.register(_collector)
    return path


def _map(path: str, mode: Any = "r+") -> np.ndarray:
    return np.memmap(path, np.int64, mode, shape=(_SLOTS, 2))


class _Collector:
    """The counters of every engine that this process watches, as Prometheus metrics."""

    def __init__(self) -> None:
        self.engines: list[tuple[np.ndarray, int]] = []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        metrics = [
            Counter("taper_completion_tokens", "Completion tokens after a request's first", labels=["engine"]),
            Counter("taper_layers_run", "Layers run for these tokens, summed", labels=["engine"]),
            Counter("taper_layers_skipped", "Layers skipped for these tokens, summed", labels=["engine"]),
            Gauge("taper_mean_depth", "Mean layers run for these tokens since the start", labels=["engine"]),
        ]
        for engine, (rows, num_hidden_layers) in enumerate(self.engines):
            tokens, run = (int(total) for total in rows.sum(axis=0))
            mean_depth = run / tokens if tokens else num_hidden_layers
            values = (tokens, run, num_hidden_layers * tokens - run, mean_depth)
            for metric, value in zip(metrics, values, strict=True):
                metric.add_metric([str(engine)], value)
        yield from metrics


_collector = _Collector()
