"""Mean depth and layers skipped, at vLLM's own /metrics.

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
_NAMES = ("taper_completion_tokens", "taper_layers_run", "taper_layers_skipped", "taper_mean_depth")
_OLD_NAMES = ("taper:answer_tokens", "taper:layers_run", "taper:layers_saved", "taper:mean_depth")


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
        for old in (False, True):  # the old names go with 0.3
            tokens, run, skipped, mean = _OLD_NAMES if old else _NAMES
            families = [
                CounterMetricFamily(tokens, "Completion tokens, without the first of each request", labels=labels),
                CounterMetricFamily(run, "Layers run for these tokens", labels=labels),
                CounterMetricFamily(skipped, "Layers skipped for these tokens", labels=labels),
                GaugeMetricFamily(mean, "Mean depth of these tokens since the start", labels=labels),
            ]
            for engine, (rows, num_hidden_layers) in enumerate(self.sources):
                completion_tokens, layers_run = (int(total) for total in rows.sum(axis=0))
                depth = layers_run / completion_tokens if completion_tokens else num_hidden_layers
                layers_skipped = num_hidden_layers * completion_tokens - layers_run
                values = (completion_tokens, layers_run, layers_skipped, depth)
                for family, value in zip(families, values, strict=True):
                    family.add_metric([str(engine)], value)
            yield from families


_collector = _Collector()
