"""Mean depth and layers saved, at vLLM's own /metrics.

Depths are known where the model runs, and /metrics is served by another process: a small file, mapped by both, carries
two counters from each engine to it. Knows nothing of vLLM. Engines on other machines are not seen.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SLOTS = 256  # engines (data-parallel ranks) that one file can count for
_SHAPE = (_SLOTS, 2)  # answer tokens, layers run for them


class Counters:
    """What one engine adds to; `slot` is its own row of the file."""

    def __init__(self, path: str, slot: int) -> None:
        self._row = _map(path)[slot % _SLOTS]

    def add(self, answer_tokens: int, layers_run: int) -> None:
        """Count a forward."""
        self._row += (answer_tokens, layers_run)


def watch(num_hidden_layers: int) -> str:
    """Show a new file's counters at /metrics of this process; the path, for `Counters` in any other."""
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
    """The counters of every engine that this process watches, in Prometheus' terms."""

    def __init__(self) -> None:
        self.sources: list[tuple[np.ndarray, int]] = []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        tokens = CounterMetricFamily("taper:answer_tokens", "Answer tokens run, without the first.", labels=["engine"])
        run = CounterMetricFamily("taper:layers_run", "Layers run for them, summed.", labels=["engine"])
        saved = CounterMetricFamily("taper:layers_saved", "Layers skipped for them, summed.", labels=["engine"])
        mean = GaugeMetricFamily("taper:mean_depth", "Layers run per answer token, since start.", labels=["engine"])
        for engine, (rows, num_hidden_layers) in enumerate(self.sources):
            answer_tokens, layers_run = (int(total) for total in rows.sum(axis=0))
            label = [str(engine)]
            tokens.add_metric(label, answer_tokens)
            run.add_metric(label, layers_run)
            saved.add_metric(label, num_hidden_layers * answer_tokens - layers_run)
            mean.add_metric(label, layers_run / answer_tokens if answer_tokens else num_hidden_layers)
        yield from (tokens, run, saved, mean)


_collector = _Collector()
