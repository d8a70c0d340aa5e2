"""The CPU backend: ggml's kernels on weights that stay in the mapped file.

A graph is prepared once for each `_Key` (depth pattern, slots, rows of logits, KV bucket) and kept; a step then
sets its inputs and computes. Knows neither policies nor text.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ggml
import numpy as np

from ..errors import ModelError, RequestError
from ..loading import ModelConfig, Tensor
from ..loading.model import WEIGHT_TYPES, row_bytes
from . import TokenBatch, runs_by_slot

KV_BUCKET = 256  # cells; attention reads whole buckets, so that one graph serves that many positions
MAX_GRAPHS = 64
_ALIGNMENT = 32
_NODES_PER_LAYER, _NODES_PER_RUN = 40, 8
_ROPE_NEIGHBOURS, _ROPE_HALVES = 0, 2


def available_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Key:
    """What a prepared graph depends on."""

    active: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    num_logits: int
    kv_length: int
    first_layer: int
    keep: tuple[int, ...]


class GgmlBackend:
    """A model on the CPU.

    Args:
        config: facts of the model.
        tensors: its weights, by our names.
        num_slots: sequences the key-value cache holds.
        context_length: tokens of each. Memory is used as cells are written, not before.
        dtype: "f32", "f16", "bf16" or "q8_0" to convert the weights when loading; None uses them as they are.
        kv_dtype: "f16" or "f32".
        threads: threads to compute with; None takes the cores this process may use.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        *,
        num_slots: int = 1,
        context_length: int,
        dtype: str | None = None,
        kv_dtype: str = "f16",
        threads: int | None = None,
    ) -> None:
        self.config, self.num_slots, self.context_length = config, num_slots, context_length
        self._context = _new_context(len(tensors) + 2 * config.num_hidden_layers + 1)
        self._memory: list[np.ndarray] = []  # keeps alive what the tensors of the context point to
        self._weights = {name: self._add_weight(tensor, dtype) for name, tensor in tensors.items()}
        cache_type = np.dtype(np.float32 if kv_dtype == "f32" else np.float16)
        kv_size = config.num_key_value_heads * config.head_dim
        cells = _lazy_zeros((config.num_hidden_layers, 2, num_slots * context_length, kv_size), cache_type)
        self._cache = [[self._add_array(cells[layer, which]) for which in (0, 1)] for layer in range(len(cells))]
        factors = config.rope_factors
        self._rope_factors = self._add_array(np.array(factors, np.float32)) if factors else None
        self._backend = ggml.ggml_backend_cpu_init()
        self._threads = threads or available_threads()
        params = ggml.ggml_threadpool_params_default(self._threads)
        self._threadpool = ggml.ggml_threadpool_new(ctypes.byref(params))
        ggml.ggml_backend_cpu_set_n_threads(self._backend, self._threads)
        ggml.ggml_backend_cpu_set_threadpool(self._backend, self._threadpool)
        self._allocator = ggml.ggml_gallocr_new(ggml.ggml_backend_get_default_buffer_type(self._backend))
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()

    def forward(self, batch: TokenBatch) -> np.ndarray:
        """Run the batch: write keys and values, return logits float32 [len(logits_rows), vocab_size]."""
        graph = self._graph(batch)
        graph.start[:] = batch.hidden[batch.first_layer] if batch.first_layer else batch.tokens
        graph.positions[:] = batch.positions
        graph.cells[:] = batch.slots.astype(np.int64) * self.context_length + batch.positions
        visible = np.arange(graph.mask.shape[1]) <= batch.positions[:, None]
        graph.mask[:] = np.where(visible, np.float16(0), np.float16(-np.inf))
        if graph.logits is not None:
            graph.logits_rows[:] = batch.logits_rows
        status = ggml.ggml_backend_graph_compute(self._backend, graph.graph)
        assert status == 0, f"ggml status {status}"
        batch.hidden.update({layer: kept.copy() for layer, kept in graph.kept.items()})
        if graph.logits is None:
            return np.empty((0, self.config.vocab_size), np.float32)
        return graph.logits.copy()

    def close(self) -> None:
        """Give back ggml's memory; the backend cannot be used afterwards."""
        self._graphs.clear()
        if self._context is not None:
            ggml.ggml_gallocr_free(self._allocator)
            ggml.ggml_backend_free(self._backend)
            ggml.ggml_threadpool_free(self._threadpool)
            ggml.ggml_free(self._context)
            self._context = None

    def __del__(self) -> None:
        if hasattr(self, "_graphs"):
            self.close()

    def _graph(self, batch: TokenBatch) -> _Graph:
        longest = int(batch.positions.max()) + 1
        kv_length = min(-(-longest // KV_BUCKET) * KV_BUCKET, self.context_length)
        runs = runs_by_slot(batch.slots)
        key = _Key(batch.active, runs, len(batch.logits_rows), kv_length, batch.first_layer, batch.keep)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        before = ggml.ggml_gallocr_get_buffer_size(self._allocator, 0)
        graph = _Graph(self, key)
        if ggml.ggml_gallocr_get_buffer_size(self._allocator, 0) != before:
            self._graphs.clear()  # all graphs share one buffer, and it has just moved
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _add_weight(self, tensor: Tensor, dtype: str | None) -> Any:
        # Norms and biases are used in f32 by ggml's element-wise operations.
        target = "F32" if len(tensor.shape) == 1 else (dtype or tensor.dtype).upper()
        if target == "Q8_0" and tensor.shape[-1] % 32:
            target = "F16"
        data = tensor.data
        if target != tensor.dtype:
            data = convert(tensor, target)
        elif data.ctypes.data % _ALIGNMENT:
            data = _aligned(len(data))
            data[:] = tensor.data
        return self._add(WEIGHT_TYPES[target][0], tensor.shape, data)

    def _add_array(self, array: np.ndarray) -> Any:
        return self._add({2: ggml.GGML_TYPE_F16, 4: ggml.GGML_TYPE_F32}[array.itemsize], array.shape, array)

    def _add(self, type_id: int, shape: tuple[int, ...], data: np.ndarray) -> Any:
        sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
        tensor = ggml.ggml_new_tensor(self._context, type_id, len(shape), sizes)
        tensor.contents.data = data.ctypes.data
        self._memory.append(data)
        return tensor


class _Graph:
    """One prepared forward: the graph, and numpy views of its inputs and output."""

    def __init__(self, backend: GgmlBackend, key: _Key) -> None:
        self._backend, self._key = backend, key
        config = backend.config
        count = key.runs[-1][2]
        nodes = config.num_hidden_layers * (_NODES_PER_LAYER + _NODES_PER_RUN * len(key.runs)) + 32
        self._context = context = _new_context(nodes, graph_nodes=nodes)
        self.graph = ggml.ggml_new_graph_custom(context, nodes, False)
        inputs = {
            "positions": ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_I32, count),
            "cells": ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_I64, count),
            "mask": ggml.ggml_new_tensor_2d(context, ggml.GGML_TYPE_F16, key.kv_length, count),
        }
        if key.first_layer:
            x = inputs["hidden"] = ggml.ggml_new_tensor_2d(context, ggml.GGML_TYPE_F32, config.hidden_size, count)
        else:
            inputs["tokens"] = ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_I32, count)
            x = ggml.ggml_get_rows(context, backend._weights["embed_tokens"], inputs["tokens"])
        if key.num_logits:
            inputs["logits_rows"] = ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_I32, key.num_logits)
        for tensor in inputs.values():
            ggml.ggml_set_input(tensor)
        kept = {}
        for layer in range(key.first_layer, config.num_hidden_layers + 1):
            if layer in key.keep:
                # A copy, made before a later layer updates x in place.
                kept[layer] = ggml.ggml_dup(context, x)
                ggml.ggml_set_output(kept[layer])
                self._run(kept[layer])
            if layer < config.num_hidden_layers and (active := key.active[layer]):
                x = self._layer(x, layer, active, count, inputs)
        logits = None
        if key.num_logits:
            rows = ggml.ggml_get_rows(context, x, inputs["logits_rows"])
            weights = backend._weights
            normed = self._norm(rows, weights["norm"])
            logits = ggml.ggml_mul_mat(context, weights.get("lm_head", weights["embed_tokens"]), normed)
            ggml.ggml_set_output(logits)
            self._run(logits)
        if not ggml.ggml_gallocr_alloc_graph(backend._allocator, self.graph):
            raise ModelError("not enough memory for this many tokens", "lower --context or shorten the prompt")
        hidden_shape = (count, config.hidden_size)
        if key.first_layer:
            self.start = _view(inputs["hidden"], hidden_shape, np.float32)
        else:
            self.start = _view(inputs["tokens"], (count,), np.int32)
        # Without a retained layer nothing reads these inputs, and they have no memory.
        used = any(key.active[key.first_layer :])
        self.positions = _view(inputs["positions"], (count,), np.int32) if used else np.empty(count, np.int32)
        self.cells = _view(inputs["cells"], (count,), np.int64) if used else np.empty(count, np.int64)
        self.mask = _view(inputs["mask"], (count, key.kv_length), np.float16) if used else np.empty((count, 1))
        self.kept = {layer: _view(tensor, hidden_shape, np.float32) for layer, tensor in kept.items()}
        self.logits = None
        if key.num_logits:
            self.logits_rows = _view(inputs["logits_rows"], (key.num_logits,), np.int32)
            self.logits = _view(logits, (key.num_logits, config.vocab_size), np.float32)

    def __del__(self) -> None:
        ggml.ggml_free(self._context)

    def _run(self, tensor: Any) -> None:
        ggml.ggml_build_forward_expand(self.graph, tensor)

    def _norm(self, x: Any, weight: Any) -> Any:
        normed = ggml.ggml_rms_norm(self._context, x, self._backend.config.rms_norm_eps)
        return ggml.ggml_mul(self._context, normed, weight)

    def _layer(self, x: Any, layer: int, active: int, count: int, inputs: dict[str, Any]) -> Any:
        """Run a layer on the first `active` of `count` tokens; x float32 [hidden_size, count] in ggml's order."""
        context = self._context
        prefix = x if active == count else ggml.ggml_view_2d(context, x, x.contents.ne[0], active, x.contents.nb[1], 0)
        # A part of x is updated in place: the rest keeps its value, and a token may re-enter at a later layer.
        add = ggml.ggml_add if active == count else ggml.ggml_add_inplace
        weights = {name: self._backend._weights[f"layers.{layer}.{name}"] for name in _LAYER_WEIGHTS}
        attended = self._attention(self._norm(prefix, weights["input_layernorm"]), layer, active, inputs)
        prefix = add(context, prefix, ggml.ggml_mul_mat(context, weights["o_proj"], attended))
        h = self._norm(prefix, weights["post_attention_layernorm"])
        gate = ggml.ggml_mul_mat(context, weights["gate_proj"], h)
        up = ggml.ggml_mul_mat(context, weights["up_proj"], h)
        down = ggml.ggml_mul_mat(context, weights["down_proj"], ggml.ggml_swiglu_split(context, gate, up))
        prefix = add(context, prefix, down)
        self._run(prefix)
        return prefix if active == count else x

    def _attention(self, h: Any, layer: int, active: int, inputs: dict[str, Any]) -> Any:
        """Write keys and values of the active tokens, then attend; returns [heads * head_dim, active]."""
        context, backend, config = self._context, self._backend, self._backend.config
        keys, values = backend._cache[layer]
        q = self._rotated(self._project(h, layer, "q", config.num_attention_heads, active), inputs, active)
        k = self._rotated(self._project(h, layer, "k", config.num_key_value_heads, active), inputs, active)
        v = self._project(h, layer, "v", config.num_key_value_heads, active)
        cells = ggml.ggml_view_1d(context, inputs["cells"], active, 0)
        for cache, new in ((keys, k), (values, v)):
            flat = ggml.ggml_reshape_2d(context, new, config.num_key_value_heads * config.head_dim, active)
            self._run(ggml.ggml_set_rows(context, cache, flat, cells))
        outputs = None
        for slot, first, end in self._key.runs:
            if first >= active:
                break
            rows = min(end, active) - first
            q_rows = ggml.ggml_view_3d(
                context, q, *q.contents.ne[:2], rows, *q.contents.nb[1:3], first * q.contents.nb[2]
            )
            mask = inputs["mask"]
            mask_rows = ggml.ggml_view_2d(
                context, mask, mask.contents.ne[0], rows, mask.contents.nb[1], first * mask.contents.nb[1]
            )
            out = ggml.ggml_flash_attn_ext(
                context,
                ggml.ggml_permute(context, q_rows, 0, 2, 1, 3),
                self._cached(keys, slot),
                self._cached(values, slot),
                mask_rows,
                config.head_dim**-0.5,
                0.0,
                0.0,
            )
            outputs = out if outputs is None else ggml.ggml_concat(context, outputs, out, 2)
        return ggml.ggml_reshape_2d(context, outputs, config.num_attention_heads * config.head_dim, active)

    def _project(self, h: Any, layer: int, name: str, heads: int, active: int) -> Any:
        """One of q, k, v as [head_dim, heads, active]."""
        weights, context = self._backend._weights, self._context
        out = ggml.ggml_mul_mat(context, weights[f"layers.{layer}.{name}_proj"], h)
        if (bias := weights.get(f"layers.{layer}.{name}_bias")) is not None:
            out = ggml.ggml_add(context, out, bias)
        out = ggml.ggml_reshape_3d(context, out, self._backend.config.head_dim, heads, active)
        if (norm := weights.get(f"layers.{layer}.{name}_norm")) is not None:
            out = self._norm(out, norm)
        return out

    def _rotated(self, x: Any, inputs: dict[str, Any], active: int) -> Any:
        config = self._backend.config
        mode = _ROPE_NEIGHBOURS if config.rope_interleaved else _ROPE_HALVES
        positions = ggml.ggml_view_1d(self._context, inputs["positions"], active, 0)
        scaling = (config.rope_theta, config.rope_scale, 0.0, 1.0, 0.0, 0.0)
        return ggml.ggml_rope_ext(
            self._context, x, positions, self._backend._rope_factors, config.head_dim, mode, 0, *scaling
        )

    def _cached(self, cache: Any, slot: int) -> Any:
        """The first cells of a slot as [head_dim, kv_length, key-value heads]."""
        config, (row, item) = self._backend.config, (cache.contents.nb[1], cache.contents.nb[0])
        return ggml.ggml_view_3d(
            self._context,
            cache,
            config.head_dim,
            self._key.kv_length,
            config.num_key_value_heads,
            row,
            config.head_dim * item,
            slot * self._backend.context_length * row,
        )


_LAYER_WEIGHTS = ("input_layernorm", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj")


def convert(tensor: Tensor, dtype: str) -> np.ndarray:
    """The bytes of a tensor as another of ggml's types, by way of f32; uint8 [bytes], aligned."""
    columns = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    target, width = _aligned(rows * row_bytes(dtype, columns)), row_bytes(dtype, columns)
    source, source_width = np.ascontiguousarray(tensor.data), row_bytes(tensor.dtype, columns)
    to_float = ggml.ggml_get_type_traits(WEIGHT_TYPES[tensor.dtype][0]).contents.to_float
    step = max(1, (1 << 22) // columns)  # rows at a time: 16 MB of f32
    floats = np.empty(min(step, rows) * columns, np.float32)
    pointer = floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        start = source[first * source_width : (first + count) * source_width]
        if tensor.dtype == "F32":
            floats[: count * columns] = start.view(np.float32)
        else:
            to_float(start.ctypes.data, pointer, count * columns)
        destination = target.ctypes.data + first * width
        ggml.ggml_quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, destination, 0, count, columns, None)
    return target


def _lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that take memory as they are written, in small pages; numpy's own ask for pages of 2 MiB."""
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, OverflowError):
        gib = size / 2**30
        raise RequestError(
            f"the key-value cache would take {gib:.1f} GiB, more than there is", "lower --context"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + size]


def _new_context(tensors: int, graph_nodes: int = 0) -> Any:
    size = tensors * ggml.ggml_tensor_overhead()
    if graph_nodes:
        size += ggml.ggml_graph_overhead_custom(graph_nodes, False)
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))


def _view(tensor: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A numpy view of a tensor's memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(tensor.contents.data), dtype).reshape(shape)
