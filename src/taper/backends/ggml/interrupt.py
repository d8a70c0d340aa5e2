"""Computing a graph so that Ctrl-C ends it at once, not when it is done."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import ggml

_C: Any = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)


class Interrupt:
    """Runs graphs on a backend. ggml asks an abort callback between the nodes of a graph.

    The callback is C's `strlen` of a text that is empty until the graph is to stop: unlike a function of Python's it
    needs no lock of the interpreter, which other threads may hold.
    """

    def __init__(self, backend: Any) -> None:
        self._backend, self._stop = backend, ctypes.create_string_buffer(2)
        callback = ctypes.cast(_C.strlen, ggml.ggml_abort_callback)
        ggml.ggml_backend_cpu_set_abort_callback(backend, callback, ctypes.addressof(self._stop))

    def compute(self, graph: Any, may_take_long: bool) -> None:
        """Compute a graph. Signals reach only the main thread between calls, so it waits for a long one in another."""
        if not may_take_long or threading.current_thread() is not threading.main_thread():
            self._compute(graph)
            return
        done, interrupt = threading.Event(), None
        threading.Thread(target=self._compute, args=(graph, done)).start()
        while not done.is_set():
            try:
                done.wait()
            except BaseException as error:  # also a second Ctrl-C, while the first one takes effect
                self._stop.value, interrupt = b"1", error
        self._stop.value = b""
        if interrupt is not None:
            raise interrupt

    def _compute(self, graph: Any, done: threading.Event | None = None) -> None:
        status = ggml.ggml_backend_graph_compute(self._backend, graph)
        if done is not None:
            done.set()
        assert status in (ggml.GGML_STATUS_SUCCESS, ggml.GGML_STATUS_ABORTED), f"ggml status {status}"
