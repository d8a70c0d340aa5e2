"""The ggml backend: on a CPU, weights stay in the mapped file or are repacked for it; on a device, they lie there.

A graph is prepared once for each `GraphKey` (which tokens run which layers, slots, rows of logits, cells read) and
kept; a forward then sets its inputs and computes. Knows neither policies nor text.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import FileIO
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...adapters import Adapters
from ...errors import QUANTISED_DTYPES, REPACK, ModelError, TaperWarning
from ...models.config import LayerSpec, ModelConfig
from ...models.preview import (
    TABLE_TYPE,
    UNUSUAL_TOKENS,
    fingerprint,
    keep_preview,
    preview_rank,
    sample_texts,
    shipped_factors,
)
from ...models.tensors import LoadedModel, Tensor, row_bytes
from .. import Backend, ForwardOutput, TokenBatch, available_threads, needed, runs_by_slot
from ..passing import PassingStates
from ..states import Passage, StateRecords
from .cache import KeyValueCache
from .devices import DeviceCompute
from .graph import Graph, GraphKey, Model
from .layouts import seconds
from .library import STATUS_ABORTED, STATUS_SUCCESS, AbortCallback, Device, ggml
from .recurrent import StateTensors, fill_state_inputs
from .shortlist import HeadProducts, Previewed, PreviewTensors, kept_as, make_preview, quantised
from .tensors import Computation, Copies, TensorContext, lazy_zeros
from .weights import AdapterTensors, LoadProgress, Weights

MAX_GRAPHS = 64
_TILE = 64  # tokens of a slot from which on flash attention works in tiles, and is faster than products, on a CPU
# A preview is measured on one of so many parts of the head, if that is large enough. A second product has an overhead.
_PART, _MIN_HEAD, _OVERHEAD = 8, 8 << 20, 4e-4  # the last two in bytes and seconds
_SAMPLE_TOKENS = 56  # of each sample text
_NONE = -1  # the file descriptor that stands for no file


class GgmlBackend(Backend):
    """A model on the CPU or a device; the options are those of `LLM`.

    Args:
        device: None computes on the CPU.
        dtype: None uses the weights as they are, but bf16 as f16 if all values fit.
        kv_dtype: of the cache, "f16" or "f32"; always f32 for weights that do not fit f16.
    """

    layers_on_cpu = 0

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        *,
        device: Device | None = None,
        num_slots: int = 1,
        context_length: int,
        dtype: str | None = None,
        kv_dtype: str = "f16",
        threads: int | None = None,
        repack: str = REPACK[0],
        progress: LoadProgress | None = None,
    ) -> None:
        self.num_slots, self.context_length, self.has_preview = num_slots, context_length, False
        self.head, self._threads = "the whole matrix", threads or available_threads()
        self.kernels = str(ggml.place) if device is None else f"{ggml.place}, {device.name}: {device.description}"
        self._device = device
        self._buffer_type = None if device is None else ggml.backend_dev_buffer_type(device.pointer)
        self._records = self._states = None  # of recurrent layers
        if config.mixer is not None:
            ggml.declare_recurrent()
            self._records = StateRecords(config, num_slots)
            self._states = StateTensors(config, config.mixer, self._records.num_records, self._buffer_type)
        self._constants = TensorContext(config.num_hidden_layers + 1, buffer_type=self._buffer_type)
        rope_factors = self._rope_factors(config.layers)
        weights = Weights(tensors, dtype, repack, self._threads, progress, self._buffer_type)
        self.config = replace(config, quantization=weights.quantization) if dtype in QUANTISED_DTYPES else config
        self.weight_bytes, self.layouts = weights.num_bytes, weights.layouts
        kv_dtype = "f32" if weights.beyond_f16 else kv_dtype
        cache = KeyValueCache(config, num_slots, context_length, kv_dtype, self._buffer_type)
        self._passing, exact = PassingStates(config), weights.quantization == "F32"
        passed = self._constants.over(lazy_zeros((self._passing.size, config.hidden_width), np.dtype(np.float32)))
        tile = _TILE if device is None else 1
        self._model = Model(config, weights, cache, rope_factors, exact, passed, tile, self._states)
        self._graphs: OrderedDict[GraphKey, Graph] = OrderedDict()
        self._adapters: WeakKeyDictionary[Adapters, AdapterTensors] = WeakKeyDictionary()  # those in use
        self._compute = InterruptibleCompute(self._threads) if device is None else DeviceCompute(device)
        self._closed = False
        self._products: HeadProducts | None = None  # with a preview
        self._pid = os.getpid()  # threads and their locks do not survive a fork
        self._allocator = self._new_allocator()

    def _rope_factors(self, layers: tuple[LayerSpec, ...]) -> tuple[Any, ...]:
        """A tensor of divisors of rotary frequencies for each layer, or None; layers with equal ones share it."""
        factors = [spec.rope.factors_for(self.context_length) if spec.rope else None for spec in layers]
        over = self._constants.over
        tables = {row: None if row is None else over(np.array(row, np.float32)) for row in set(factors)}
        return tuple(tables[row] for row in factors)

    def set_head(
        self,
        head: str,
        model: LoadedModel,
        dtype: str,
        kept: PreviewTensors | None,
        progress: LoadProgress | None,
    ) -> None:
        """Compute logits in two steps if `head`, one of `HEADS`, says so, with the preview of a model as it was loaded.

        A preview comes from the cache (`kept_preview`), is made of shipped factors, or is made from the model's states
        on a text. What is in the cache is not timed again.
        """
        if head == "full" or (head == "auto" and self._model.weights.quantization == "F32"):
            return
        if kept is None:
            saves_time, known = self._gains_by_preview(), fingerprint(model)
            if head == "auto" and not saves_time:
                return
            advance, vocab_size = progress or (lambda _: None), self.config.vocab_size
            if dtype == "auto" and (shipped := shipped_factors(known)) is not None:
                preview = quantised(*shipped, self.head_rows, vocab_size, advance)
            else:
                states = self._sample_states(model, advance)
                if not all(np.isfinite(part).all() for part in states):
                    message = "hidden states are not finite, so the head gets no preview"
                    warnings.warn(message, TaperWarning, stacklevel=2)
                    return
                preview = make_preview(states, self.head_rows, vocab_size, self._preview_rank(), advance)
            preview = replace(preview, saves_time=saves_time)
            keep_preview(known, kept_as(dtype, self._device), preview)
            kept = PreviewTensors(preview, self._threads, self._buffer_type)
        if head == "shortlist" or kept.saves_time:
            self.use_preview(kept)

    def use_preview(self, preview: PreviewTensors) -> None:
        """Compute logits in two steps where forwards ask for it."""
        weights = self._model.weights
        self._model, self.has_preview = replace(self._model, preview=preview), True
        compute = partial(self._compute.compute, interruptible=False)
        on_cpu = self._compute.compute_on_cpu if isinstance(self._compute, DeviceCompute) else compute
        head = weights.matrix(weights.head, 1), weights.head_rows, weights.head_type
        scaling = self.config.logit_scale, self.config.logit_cap
        self._products = HeadProducts(*head, *scaling, compute, on_cpu, self._buffer_type)
        self.weight_bytes = self.weight_bytes | {weights.head: preview.num_bytes}  # read instead of the whole
        bits = f"{preview.rank} of {self.config.hidden_size} dimensions in {TABLE_TYPE.lower()}"
        self.head = f"shortlist: preview of {bits}, margin {preview.margin:.1f}"

    def head_rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the head, int64 [n], as float32 [n, hidden_size]."""
        return self._model.weights.floats_of_head(ids)

    def _preview_rank(self) -> int:
        return preview_rank(self.config.hidden_size, self.config.vocab_size, sum(self.weight_bytes.values()))

    def _gains_by_preview(self) -> bool:
        """Whether a preview saves time, measured on a part of the rows with zeros: some milliseconds."""
        weights, (rows, columns) = self._model.weights, (self.config.vocab_size, self.config.hidden_size)
        size, part = rows * row_bytes(weights.head_type, columns), rows // _PART // 8 * 8
        if size < max(_MIN_HEAD, sum(self.weight_bytes.values()) // 10):  # else making one takes more than it can save
            return False
        places = [ggml.backend_get_default_buffer_type(self._compute.backend)]
        places += ggml.repacking_buffer_types() if self._device is None else []
        whole, previewed = (
            min(seconds(self._compute.backend, place, dtype, (part, width), 1) for place in places)
            for dtype, width in ((weights.head_type, columns), (TABLE_TYPE, self._preview_rank()))
        )
        return (whole - previewed) * _PART > _OVERHEAD

    def _sample_states(self, model: LoadedModel, advance: LoadProgress) -> list[np.ndarray]:
        """What the head is multiplied with on each of the sample texts: float32 [n, hidden_size]."""
        layers, texts, states = self.config.num_hidden_layers, sample_texts(), list[np.ndarray]()
        for number, text in enumerate(texts):
            ids = model.tokenizer.encode(text)[: min(_SAMPLE_TOKENS, self.context_length)]
            tokens, count = np.array(ids, np.int32), len(ids)
            batch = TokenBatch(
                tokens,
                np.arange(count, dtype=np.int32),
                np.zeros(count, np.int32),
                (count,) * layers,
                head_inputs=True,
            )
            read = self.forward(batch).head_inputs
            assert read is not None
            states.append(read[UNUSUAL_TOKENS:])
            advance((number + 1) / len(texts))
        return states

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Run the batch and write its keys and values."""
        batch = needed(batch, self.config)
        plan = self._passing.plan(batch, self._write_cells)
        skips = min(batch.num_active) < len(batch.tokens)
        num_greedy, num_logits, num_previews = map(len, (batch.greedy_rows, batch.logits_rows, batch.preview_rows))
        key = GraphKey(
            num_active=batch.num_active,
            runs=runs_by_slot(batch.slots),
            num_outputs=num_logits + (0 if batch.shortlist else num_greedy),
            num_previews=num_previews + (num_greedy if batch.shortlist else 0),
            kv_length=self._model.cache.bucket(int(batch.positions.max()) + 1),
            first_layer=batch.first_layer,
            output_hidden_states=batch.output_hidden_states,
            head_inputs=batch.head_inputs,
            adapters=batch.adapters if skips else None,
            fill=batch.fill and skips,
            plan=plan,
        )
        graph, passages = self._graph(key), [] if self._records is None else self._records.passages(batch)
        self._fill(graph, key, batch, passages)
        if not self._compute.compute(graph):  # interrupted by a signal whose handler returned: run to the end
            self._fill(graph, key, batch, passages)
            self._compute.compute(graph, interruptible=False)
        if self._records is not None:
            self._records.commit(passages, batch.tentative)
        self._passing.note(batch, plan)
        previews = self._previewed(graph) if key.num_previews else []
        if batch.shortlist:
            greedy_ids = np.array([preview.argmax() for preview in previews[num_previews:]], np.int64)
        else:
            greedy_ids = _greedy(graph.logits[num_logits:])
        return ForwardOutput(
            logits=graph.logits[:num_logits].copy(),
            greedy_ids=greedy_ids,
            hidden_states={layer: states.copy() for layer, states in graph.hidden_states.items()},
            head_inputs=graph.head_inputs.copy() if batch.head_inputs else None,
            previews=tuple(previews[:num_previews]),
        )

    def resumable(self, slot: int, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a slot a forward can go on."""
        return num_tokens if self._records is None else self._records.resumable(slot, num_tokens)

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy keys and values, and the state after them, from one slot to another."""
        self._passing.settle(source, first, end, self._write_cells)
        self._passing.forget(target, first, end)
        self._run_copies(self._model.cache.copies(source, target, first, end))
        if self._records is not None and self._states is not None:
            passage = self._records.copied(source, target, first, end)
            self._run_copies(self._states.copies(passage))
            self._records.commit_copy(passage)

    def clear(self, slot: int) -> None:
        """Write zeros over the keys and values of a slot, and forget its states."""
        self._model.cache.clear(slot)
        self._passing.forget(slot, 0, self.context_length)
        if self._records is not None:
            self._records.clear(slot)

    def close(self) -> None:
        """Free ggml's memory; the backend cannot be used afterwards."""
        self._graphs.clear()
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            ggml.gallocr_free(self._allocator)
            self._compute.close()
            del self._model, self._products, self._states

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_allocator") and not is_finalizing():
            self.close()

    def _previewed(self, graph: Graph) -> list[Previewed]:
        preview, products = self._model.preview, self._products
        assert preview is not None
        assert products is not None
        scale, cap, states = self.config.logit_scale, self.config.logit_cap, graph.states.copy()
        logits = graph.previews + (states @ preview.mean_row)[:, None]
        if scale != 1.0:
            logits *= np.float32(scale)
        if cap is not None:  # brings logits closer together, so that the margin is more than enough
            logits = cap * np.tanh(logits / np.float32(cap))
        rows = zip(logits, states, strict=True)
        return [Previewed(row, state, preview.margin * scale, products) for row, state in rows]

    def _fill(self, graph: Graph, key: GraphKey, batch: TokenBatch, passages: list[Passage]) -> None:
        """Write the inputs of a graph."""
        inputs = graph.inputs
        if self._states is not None and passages:
            fill_state_inputs(inputs, self._states, passages)
        self._fill_places(graph, batch.slots, batch.positions)
        for window, name in graph.windows.items():
            mask = inputs[name]
            mask[:] = -np.inf
            for row, end in zip(mask, (batch.positions + 1).tolist(), strict=True):
                row[0 if window is None else max(0, end - window) : end] = 0
        if batch.first_layer:
            inputs["hidden_states"][:] = batch.hidden_states
        if "tokens" in inputs:
            inputs["tokens"][:] = batch.tokens
        if "layer_tokens" in inputs:
            inputs["layer_tokens"][:] = np.where(batch.tokens < self.config.layer_vocab_size, batch.tokens, 0)
        if key.plan:
            inputs["places"][:] = self._passing.places(key.plan)
        if key.num_outputs + key.num_previews:  # those of the whole head come first
            inputs["rows"][:] = (*batch.logits_rows, *batch.preview_rows, *batch.greedy_rows)

    def _fill_places(self, graph: Graph, slots: np.ndarray, positions: np.ndarray) -> None:
        """Write where the tokens of a graph stand, and where their keys and values go."""
        cache, inputs = self._model.cache, graph.inputs
        inputs["positions"][:] = positions
        inputs["cells"][:] = cache.cells(slots, positions)
        for width, name in graph.elements.items():
            inputs[name][:] = cache.elements(slots, positions, width)

    def _write_cells(self, layer: int, slots: np.ndarray, positions: np.ndarray, places: np.ndarray) -> None:
        """Write the keys and values of a layer for states that have passed it (`passing.Write`)."""
        none, count = (0,) * self.config.num_hidden_layers, len(positions)
        key = GraphKey(none, ((0, 0, count),), 0, 0, 0, layer, (), False, None, fill=True, only_cells=True)
        graph = self._graph(key)
        self._fill_places(graph, slots, positions)
        graph.inputs["waiting"][:] = places
        self._compute.compute(graph, interruptible=False)

    def _run_copies(self, copies: Copies) -> None:
        if not ggml.graph_n_nodes(copies.pointer):
            return
        ggml.gallocr_alloc_graph(self._allocator, copies.pointer)  # lets views lie where their tensors do
        self._compute.compute(copies, interruptible=False)

    def _graph(self, key: GraphKey) -> Graph:
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        before = ggml.gallocr_get_buffer_size(self._allocator, 0)
        try:
            graph = Graph(self._model, key, self._adapter_tensors(key.adapters), self._allocator)
        except ModelError:
            self._graphs.clear()  # what they lay in is freed
            ggml.gallocr_free(self._allocator)
            self._allocator = self._new_allocator()
            raise
        if ggml.gallocr_get_buffer_size(self._allocator, 0) != before:
            self._graphs.clear()  # all graphs share one buffer, and it has just moved
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _new_allocator(self) -> Any:
        return ggml.gallocr_new(ggml.backend_get_default_buffer_type(self._compute.backend))

    def _adapter_tensors(self, adapters: Adapters | None) -> Mapping[int, tuple[Any, Any]]:
        """Adapters as tensors, made when a forward first needs them."""
        if adapters is None:
            return {}
        if adapters not in self._adapters:
            here = adapters.only(i for i, spec in enumerate(self.config.layers) if not spec.is_elsewhere)
            self._adapters[adapters] = AdapterTensors(here, self._model.exact, self._buffer_type)
        return self._adapters[adapters]


def _greedy(logits: np.ndarray) -> np.ndarray:
    """The argmax of each row, -1 where its logit is not a finite number: int64 [rows]."""
    ids = logits.argmax(-1)  # the first NaN, if there is one
    return np.where(np.isfinite(logits[np.arange(len(ids)), ids]), ids, -1)


def _page_of_zeros() -> FileIO:
    """A file of one page, in memory where the system has such files: then no disk need be writable.

    Raises:
        ModelError: there is no room for it, or no folder that can be written to.
    """
    try:
        if hasattr(os, "memfd_create"):  # Linux
            file = FileIO(os.memfd_create("taper"), "r+")
        else:
            with tempfile.TemporaryFile(buffering=0) as temporary:
                file = FileIO(os.dup(temporary.fileno()), "r+")
        if file.write(bytes(mmap.PAGESIZE)) != mmap.PAGESIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.seek(0)
    except OSError as error:
        hint = "free some space, or let TMPDIR name a folder that can be written to"
        raise ModelError(f"cannot make a temporary file: {error.strerror}", hint) from None
    return file


class InterruptibleCompute:
    """Computes graphs on the CPU so that a signal such as Ctrl-C ends a long one at once; `close` comes last.

    Python runs signal handlers between calls only, and computing a long prompt is one call. While a graph is computed,
    Python therefore writes the numbers of signals into a file. ggml asks an abort callback between the nodes of a
    graph, and this is C's `strlen` of the mapped file: unlike a Python function, it does not need the interpreter's
    lock. With a thread of its own for computing, there would be no need for the file, but handing a graph over costs
    half a millisecond, a twentieth of a step of a small model.
    """

    def __init__(self, threads: int) -> None:
        self.backend = ggml.backend_cpu_init()
        self._threadpool = ggml.threadpool_new(ctypes.byref(ggml.threadpool_params_default(threads)))
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        ggml.backend_cpu_set_threadpool(self.backend, self._threadpool)
        self._file = _page_of_zeros()
        if sys.platform != "win32":  # where files need not be told
            os.set_blocking(self._file.fileno(), False)
        self._signals = mmap.mmap(self._file.fileno(), mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._signals))
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        callback = ctypes.cast(libc.strlen, AbortCallback)
        ggml.backend_cpu_set_abort_callback(self.backend, callback, address)

    def compute(self, graph: Computation, interruptible: bool = True) -> bool:
        """Compute a graph; False if a signal ended it, and the signal's handler returned: nothing was computed.

        Raises:
            ModelError: ggml did not compute it.
            BaseException: what the handler of a signal raised, such as KeyboardInterrupt. The graph has ended.
        """
        if not interruptible or threading.current_thread() is not threading.main_thread():  # where handlers run
            status = ggml.backend_graph_compute(self.backend, graph.pointer)
        else:
            previous = _NONE  # should the next line be interrupted
            try:
                previous = signal.set_wakeup_fd(self._file.fileno(), warn_on_full_buffer=False)
                status = ggml.backend_graph_compute(self.backend, graph.pointer)
            finally:
                signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
                self._pass_on(previous)
        if interruptible and status == STATUS_ABORTED:
            return False
        if status != STATUS_SUCCESS:
            raise ModelError(f"ggml did not finish this computation (status {status})", "retry with more memory free")
        return True

    def close(self) -> None:
        """Close the file and end the threads; no graph is computed afterwards."""
        ggml.backend_cpu_set_abort_callback(self.backend, AbortCallback(), None)
        self._signals.close()  # first, as Windows removes no file that is mapped
        self._file.close()
        ggml.backend_free(self.backend)
        ggml.threadpool_free(self._threadpool)

    def _pass_on(self, fd: int) -> None:
        """Clear the file; the signals that came go to whoever else waits for them, as asyncio does."""
        count = self._signals.find(b"\0")
        if count:
            numbers, self._signals[:count] = self._signals[:count], bytes(count)
            self._file.seek(0)
            if fd != _NONE:
                with suppress(OSError):
                    os.write(fd, numbers)
