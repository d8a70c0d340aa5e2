"""Attention of generated tokens on a CPU: flash attention beside the two products that Taper multiplies.

    python research/attention.py --out research/results/attention.json

Both read the caches of all layers, of the shapes of the default model and of Qwen2.5-Coder-1.5B, filled with noise.
Flash attention gets the values by cell, products by dimension, each as it likes them. Tokens of several slots attend
together; flash attention also slot by slot, as graphs did before. Leave the machine alone while it runs (two minutes).
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from decode import THREADS, conditions, median, write

from taper.backends.ggml.library import ggml
from taper.backends.ggml.tensors import TensorContext
from taper.models import find_model
from taper.models.download import DEFAULT_MODEL

ROUNDS, CONTEXT = 15, 2048
SLOTS, LENGTHS = (1, 8), (128, 512, 1024, 1536)


class Shape(NamedTuple):
    """The attention of a model."""

    layers: int
    heads: int
    shared: int  # key-value heads
    dim: int


SHAPES = {"smollm2-135m-instruct": Shape(30, 9, 3, 64), "qwen2.5-coder-1.5b-instruct": Shape(28, 12, 2, 128)}
Attend = Callable[[Any, Any, int, int], Any]  # context, queries, layer, length: [head_dim, heads, slots]


class Caches:
    """Keys and values of all layers for some slots, and how tokens attend to them, one a slot."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self._shape, self._slots, self._context = shape, slots, TensorContext(3 * shape.layers + 2)
        rng, width = np.random.default_rng(0), shape.shared * shape.dim

        def tensors(*sizes: int) -> list[Any]:
            noise = (rng.standard_normal(sizes, np.float32).astype(np.float16) for _ in range(shape.layers))
            return [self._context.over(one) for one in noise]

        self._keys, self._by_cell = tensors(slots * CONTEXT, width), tensors(slots * CONTEXT, width)
        self._by_dimension = tensors(slots * width, CONTEXT)
        self.queries = self._context.over(rng.standard_normal((slots, shape.heads, shape.dim), np.float32))
        self._mask = self._context.over(np.zeros((slots, CONTEXT), np.float16))

    def flash(self, context: Any, queries: Any, layer: int, length: int) -> Any:
        """Flash attention of all slots."""
        return self._flash(context, queries, layer, length, 0, self._slots)

    def flash_by_slot(self, context: Any, queries: Any, layer: int, length: int) -> Any:
        """Flash attention slot by slot."""
        parts = [self._flash(context, queries, layer, length, slot, 1) for slot in range(self._slots)]
        whole = parts[0]
        for part in parts[1:]:
            whole = ggml.concat(context, whole, part, 2)
        return whole

    def products(self, context: Any, queries: Any, layer: int, length: int) -> Any:
        """Two products, in which heads that share keys are rows of one matrix."""
        heads, shared, dim, slots = self._shape.heads, self._shape.shared, self._shape.dim, self._slots
        row = CONTEXT * 2  # bytes
        values = ggml.view_4d(
            context, self._by_dimension[layer], length, dim, shared, slots, row, dim * row, shared * dim * row, 0
        )
        rows = ggml.reshape_4d(context, queries, dim, heads // shared, shared, slots)
        scores = ggml.mul_mat(context, self._cells(context, self._keys[layer], length, 0, slots), rows)
        scores = ggml.reshape_4d(context, scores, length, 1, heads, slots)
        shares = ggml.soft_max_ext(context, scores, self._visible(context, length, 0, slots), dim**-0.5, 0.0)
        shares = ggml.reshape_4d(context, shares, length, heads // shared, shared, slots)
        return ggml.reshape_3d(context, ggml.mul_mat(context, values, shares), dim, heads, slots)

    def _flash(self, context: Any, queries: Any, layer: int, length: int, first: int, count: int) -> Any:
        dim, heads = self._shape.dim, self._shape.heads
        token = heads * dim * 4
        own = ggml.view_4d(context, queries, dim, heads, 1, count, dim * 4, token, token, first * token)
        keys, values = (
            self._cells(context, tensors[layer], length, first, count) for tensors in (self._keys, self._by_cell)
        )
        mask, rows = self._visible(context, length, first, count), ggml.permute(context, own, 0, 2, 1, 3)
        out = ggml.flash_attn_ext(context, rows, keys, values, mask, dim**-0.5, 0.0, 0.0)
        return ggml.reshape_3d(context, out, dim, heads, count)

    def _cells(self, context: Any, tensor: Any, length: int, first: int, count: int) -> Any:
        shared, dim, row = self._shape.shared, self._shape.dim, tensor.contents.nb[1]
        strides = (row, dim * 2, CONTEXT * row, first * CONTEXT * row)
        return ggml.view_4d(context, tensor, dim, length, shared, count, *strides)

    def _visible(self, context: Any, length: int, first: int, count: int) -> Any:
        """A mask that hides nothing; of one row a slot, which lie close together."""
        row = length * 2
        return ggml.view_4d(context, self._mask, length, 1, 1, count, row, row, row, first * row)


class Attention:
    """A graph in which tokens attend in every layer, each time with what they got from the one before."""

    def __init__(self, backend: Any, caches: Caches, shape: Shape, attend: Attend, length: int) -> None:
        nodes = shape.layers * 90
        self._backend, self._context = backend, TensorContext(nodes, graph_nodes=nodes)
        x = caches.queries
        for layer in range(shape.layers):
            x = attend(self._context.pointer, x, layer, length)
        ggml.set_output(x)
        self._graph = ggml.new_graph_custom(self._context.pointer, nodes, False)
        ggml.build_forward_expand(self._graph, x)
        self._allocator = ggml.gallocr_new(ggml.backend_get_default_buffer_type(backend))
        assert ggml.gallocr_alloc_graph(self._allocator, self._graph)

    def seconds(self) -> float:
        """The time of one computation."""
        started = time.perf_counter()
        ggml.backend_graph_compute(self._backend, self._graph)
        return time.perf_counter() - started

    def close(self) -> None:
        """Free its memory."""
        ggml.gallocr_free(self._allocator)


def measured(backend: Any, shape: Shape, slots: int) -> list[dict[str, Any]]:
    """Milliseconds of each kind at each length, in turn, and how many times as fast products are."""
    caches, rows = Caches(shape, slots), []
    for length in LENGTHS:
        kinds: dict[str, Attend] = {"flash": caches.flash, "products": caches.products}
        if slots > 1:
            kinds["flash_by_slot"] = caches.flash_by_slot
        graphs = {name: Attention(backend, caches, shape, attend, length) for name, attend in kinds.items()}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(ROUNDS + 2):
            for name, graph in graphs.items():
                seconds = graph.seconds()
                if number >= 2:  # the first ones warm up
                    times[name].append(1000 * seconds)
        for graph in graphs.values():
            graph.close()
        before = times["flash_by_slot" if slots > 1 else "flash"]
        ratios = [a / b for a, b in zip(before, times["products"], strict=True)]
        rows.append(
            {
                "slots": slots,
                "length": length,
                **{f"{name}_ms": median(values) for name, values in times.items()},
                "speedup": [median(ratios), median([min(ratios)]), median([max(ratios)])],
            }
        )
    return rows


def main() -> None:
    """Measure both shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    backend, params = ggml.backend_cpu_init(), ggml.threadpool_params_default(THREADS)
    threadpool = ggml.threadpool_new(ctypes.byref(params))
    ggml.backend_cpu_set_n_threads(backend, THREADS)
    ggml.backend_cpu_set_threadpool(backend, threadpool)
    models = {
        name: [row for slots in SLOTS for row in measured(backend, shape, slots)] for name, shape in SHAPES.items()
    }
    document = {"conditions": conditions(find_model(DEFAULT_MODEL)), "rounds": ROUNDS, "models": models}
    write(out, document)


if __name__ == "__main__":
    main()
