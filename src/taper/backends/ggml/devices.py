"""Graphs computed on a device: what they read is sent to it, what they give fetched, and long ones run in pieces."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...errors import DeviceLostError, ModelError, TaperWarning
from .. import available_threads, end_process
from .library import STATUS_SUCCESS, Device, ggml
from .tensors import Computation, TensorContext, aligned

_FIRST_PIECE, _SECONDS = 16, 0.1  # a graph runs in pieces of so many nodes at first, later of so much time


class DeviceCompute:
    """Computes graphs on a device, and on the CPU those of their operations that it lacks; `close` comes last.

    Python runs the handlers of signals such as Ctrl-C between calls only, and a device cannot be asked to stop. So
    each piece of a long graph is a call. A new graph is taken for long, as drivers compile what it runs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.backend = ggml.backend_dev_init(device.pointer, None)
        if not self.backend:
            raise ModelError(f"{device.name} cannot be opened", "use another --device")
        _end_in_one_line()
        self._cpu = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self._cpu, available_threads())
        self._lacking = WeakKeyDictionary[Computation, dict[int, _OnCpu]]()  # by the numbers of their nodes
        self._pieces = WeakKeyDictionary[Computation, int]()  # of how many nodes

    def compute(self, graph: Computation, interruptible: bool = True) -> bool:
        """Compute a graph; True, as it is completed unless the handler of a signal raises.

        Raises:
            ModelError: the device did not compute it.
            BaseException: what the handler of a signal raised, such as KeyboardInterrupt. Nothing is running then.
        """
        if graph not in self._lacking:
            self._lacking[graph] = self._lacking_of(graph.pointer)
        for tensor, data in graph.sent:
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        lacking, first, nodes = self._lacking[graph], 0, ggml.graph_n_nodes(graph.pointer)
        handles_signals = threading.current_thread() is threading.main_thread()
        piece = self._pieces.get(graph, _FIRST_PIECE) if interruptible and handles_signals else nodes
        started = time.perf_counter()
        for number in sorted(lacking):
            self._compute_nodes(graph.pointer, first, number, piece)
            lacking[number].compute()
            first = number + 1
        self._compute_nodes(graph.pointer, first, nodes, piece)
        seconds = time.perf_counter() - started
        self._pieces[graph] = nodes if seconds < _SECONDS else max(1, int(nodes * _SECONDS / seconds))
        for tensor, data in graph.fetched:
            ggml.backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        return True

    def compute_on_cpu(self, graph: Computation) -> None:
        """Compute a graph whose tensors lie in the processor's memory."""
        _compute_on_cpu(self._cpu, graph.pointer)

    def close(self) -> None:
        """No graph is computed afterwards."""
        self._lacking.clear()
        ggml.backend_free(self._cpu)
        ggml.backend_free(self.backend)

    def _compute_nodes(self, graph: Any, first: int, end: int, most: int) -> None:
        """Compute nodes `first` to `end`, excluded, of a graph, at most so many at a time."""
        if (first, end) == (0, ggml.graph_n_nodes(graph)) and end <= most:
            self._compute(graph)
            return
        for start in range(first, end, most):
            stop = min(start + most, end)
            context = TensorContext(0, graph_nodes=stop - start)
            piece = ggml.new_graph_custom(context.pointer, stop - start, False)
            for number in range(start, stop):
                ggml.graph_add_node(piece, ggml.graph_node(graph, number))
            self._compute(piece)

    def _compute(self, graph: Any) -> None:
        status = ggml.backend_graph_compute(self.backend, graph)
        if status != STATUS_SUCCESS:
            message = f"{self._device.name} did not finish this computation (status {status})"
            raise ModelError(message, "retry with more of its memory free")

    def _lacking_of(self, graph: Any) -> dict[int, _OnCpu]:
        """The nodes of a graph that the device cannot compute."""
        nodes = [ggml.graph_node(graph, number) for number in range(ggml.graph_n_nodes(graph))]
        lacking = {n: node for n, node in enumerate(nodes) if not ggml.backend_supports_op(self.backend, node)}
        if lacking:
            names = ", ".join(sorted({ggml.op_desc(node).decode().lower() for node in lacking.values()}))
            message = f"{self._device.name} lacks {names}: the CPU computes that, which is slow; see --gpu-layers"
            warnings.warn(message, TaperWarning, stacklevel=2)
        return {number: _OnCpu(node, self._cpu) for number, node in lacking.items()}


class _OnCpu:
    """A node of a device's graph that the CPU computes: what it reads is fetched, what it gives is sent."""

    def __init__(self, node: Any, backend: Any) -> None:
        self._backend, self._context = backend, TensorContext(16, graph_nodes=1)
        self._held: dict[int, tuple[Any, np.ndarray]] = {}  # by address: a tensor on the device that is no view
        inputs = [self._stand_in(source) if source else None for source in node.contents.src]
        self._read = list(self._held.values())
        result = self._stand_in(node)
        self._written = self._held[ctypes.addressof(_whole(node).contents)]
        self._graph = ggml.new_graph_custom(self._context.pointer, 1, False)
        for field in ("op", "op_params", "flags"):
            setattr(result.contents, field, getattr(node.contents, field))
        for place, tensor in enumerate(inputs):
            if tensor is not None:
                result.contents.src[place] = tensor
        ggml.graph_add_node(self._graph, result)

    def compute(self) -> None:
        """Compute it now."""
        for tensor, data in [*self._read, self._written]:
            ggml.backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        _compute_on_cpu(self._backend, self._graph)
        tensor, data = self._written
        ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def _stand_in(self, tensor: Any) -> Any:
        """A tensor like this one in the processor's memory."""
        whole, theirs = _whole(tensor), tensor.contents
        address = ctypes.addressof(whole.contents)
        if address not in self._held:
            self._held[address] = whole, aligned(ggml.nbytes(whole))
        ours = self._context.new(theirs.type, tuple(reversed(theirs.ne)))
        ours.contents.nb = theirs.nb
        ours.contents.data = self._held[address][1].ctypes.data + (theirs.view_offs if theirs.view_src else 0)
        return ours


def _compute_on_cpu(backend: Any, graph: Any) -> None:
    if ggml.backend_graph_compute(backend, graph) != STATUS_SUCCESS:
        raise ModelError("the CPU did not finish this computation", "retry with more memory free")


def _end(message: bytes | None = None) -> None:
    end_process(DeviceLostError(message.decode(errors="replace") if message else "its driver failed"))


_ON_ABORT, _ON_TERMINATE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_end), ctypes.CFUNCTYPE(None)(_end)


def _end_in_one_line() -> None:
    """Where a library of a device gives up, as it does if that is lost, end in one line.

    It would end anyway: such libraries abort, or throw exceptions that C cannot catch.
    """
    if hasattr(ggml, "set_abort_callback"):
        ggml.set_abort_callback(_ON_ABORT)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_ON_TERMINATE)


def _whole(tensor: Any) -> Any:
    """The tensor itself, or the one of which it is a view."""
    return tensor.contents.view_src or tensor
