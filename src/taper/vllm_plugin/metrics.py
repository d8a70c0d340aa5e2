"""Mean depth and layers saved, at vLLM's own /metrics.

Depths are known where the model runs, but another process serves /metrics. A small file, mapped by both, carries two
counters of each engine from one to the other. Knows nothing of vLLM. Engines on other machines are not counted.
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
_SHAPE = (_SLOTS, 2)  # completion tokens, layers run for them


class Counters:
    """The counters of one engine; `slot` is its row of the file."""

    def __init__(self, path: str, slot: int) -> None:
        self._row = _map(path)[slot % _SLOTS]

    def add(self, completion_tokens: int, layers_run: int) -> None:
        """Count a forward."""
        self._row += (completion_tokens, layers_run)


def watch(num_hidden_layers: int) -> str:
    """Make a file of counters and show them at this process's /metrics; its path is for `Counters` elsewhere."""
    from prometheus_client import REGISTRY

    handle, path = tempfile.mkstemp(prefix="taper-metrics-")
    with os.fdopen(handle, "wb") as file:
        file.write(bytes(8 * _SLOTS * 2))
    atexit.register(Path(path).unlink, missing_ok=True)
    if not _collector.sources:
        REGISTRY.register(_collector)
    _collector.sources.append((_map(path), num_hidden_layers))
    return path


def _map(path: str) -> np.ndarray:
    return np.memmap(path, np.int64, "r+", shape=_SHAPE)


class _Collector:
    """The counters of every engine that this process watches, as Prometheus metrics."""

    def __init__(self) -> None:
        self.sources: list[tuple[np.ndarray, int]] = []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["engine"]
        tokens = CounterMetricFamily(
            "taper:answer_tokens", "Completion tokens, without the first of each request.", labels=labels
        )
        run = CounterMetricFamily("taper:layers_run", "Layers run for these tokens, summed.", labels=labels)
        saved = CounterMetricFamily("taper:layers_saved", "Layers skipped for these tokens, summed.", labels=labels)
        mean = GaugeMetricFamily("taper:mean_depth", "Mean layers run for these tokens since the start.", labels=labels)
        for engine, (rows, num_hidden_layers) in enumerate(self.sources):
            completion_tokens, layers_run = (int(total) for total in rows.sum(axis=0))
            label = [str(engine)]
            tokens.add_metric(label, completion_tokens)
            run.add_metric(label, layers_run)
            saved.add_metric(label, num_hidden_layers * completion_tokens - layers_run)
            mean.add_metric(label, layers_run / completion_tokens if completion_tokens else num_hidden_layers)
        yield from (tokens, run, saved, mean)


_collector = _Collector()
