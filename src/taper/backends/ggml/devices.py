"""Graphs computed on a device: what they read is sent to it, what they give fetched, and long ones run in pieces."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from ...errors import ModelError
from .library import STATUS_SUCCESS, Device, ggml
from .tensors import Computation, TensorContext

_MANY_TOKENS, _PIECE = 32, 16  # graphs of so many tokens run in pieces of so many nodes


class DeviceCompute:
    """Computes graphs on a device; `close` comes last.

    Python runs the handlers of signals such as Ctrl-C between calls only, and a device cannot be asked to stop. So
    each piece of a long graph is a call.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.backend = ggml.backend_dev_init(device.pointer, None)
        if not self.backend:
            raise ModelError(f"{device.name} cannot be opened", "use another --device")
        self._supported = WeakSet[Computation]()

    def compute(self, graph: Computation, interruptible: bool = True) -> bool:
        """Compute a graph; True, as it is completed unless the handler of a signal raises.

        Raises:
            ModelError: the device lacks an operation, or did not compute it.
            BaseException: what the handler of a signal raised, such as KeyboardInterrupt. Nothing is running then.
        """
        if graph not in self._supported:
            self._check(graph.pointer)
            self._supported.add(graph)
        for tensor, data in graph.sent:
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        handles_signals = threading.current_thread() is threading.main_thread()
        if interruptible and handles_signals and graph.num_tokens >= _MANY_TOKENS:
            nodes = ggml.graph_n_nodes(graph.pointer)
            for first in range(0, nodes, _PIECE):
                self._compute_piece(graph.pointer, first, min(first + _PIECE, nodes))
        else:
            self._compute(graph.pointer)
        for tensor, data in graph.fetched:
            ggml.backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        return True

    def close(self) -> None:
        """No graph is computed afterwards."""
        ggml.backend_free(self.backend)

    def _compute_piece(self, graph: Any, first: int, end: int) -> None:
        """Compute nodes `first` to `end`, excluded, of a graph."""
        context = TensorContext(0, graph_nodes=end - first)
        piece = ggml.new_graph_custom(context.pointer, end - first, False)
        for node in range(first, end):
            ggml.graph_add_node(piece, ggml.graph_node(graph, node))
        self._compute(piece)

    def _compute(self, graph: Any) -> None:
        status = ggml.backend_graph_compute(self.backend, graph)
        if status != STATUS_SUCCESS:
            message = f"{self._device.name} did not finish this computation (status {status})"
            raise ModelError(message, "retry with more of its memory free")

    def _check(self, graph: Any) -> None:
        for number in range(ggml.graph_n_nodes(graph)):
            node = ggml.graph_node(graph, number)
            if not ggml.backend_supports_op(self.backend, node):
                operation = ggml.op_desc(node).decode().lower()
                raise ModelError(
                    f"{self._device.name} lacks an operation of this model, {operation}", "use --device cpu"
                )
