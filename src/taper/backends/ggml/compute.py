"""Computing graphs in one thread of their own: Ctrl-C ends a long one at once, and OpenMP keeps one team of threads.

Signals reach only Python's main thread between calls, so no thread of the caller's computes. OpenMP makes a team for
each thread that computes; with several teams they sleep at every barrier, and short prompts take up to 1.5 times as
long.
"""

from __future__ import annotations

import ctypes
import os
import threading
from queue import SimpleQueue
from typing import Any

import ggml

_C: Any = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)


class ComputeThread:
    """Runs graphs on a backend, one at a time; `close` ends it.

    ggml asks an abort callback between the nodes of a graph. It is C's `strlen` of a text that is empty until the graph
    is to stop: unlike a function of Python's it needs no lock of the interpreter, which other threads may hold.
    """

    def __init__(self, backend: Any) -> None:
        self._stop = ctypes.create_string_buffer(2)
        callback = ctypes.cast(_C.strlen, ggml.ggml_abort_callback)
        ggml.ggml_backend_cpu_set_abort_callback(backend, callback, ctypes.addressof(self._stop))
        self._work = _Work()
        threading.Thread(target=_serve, args=(backend, self._work), daemon=True).start()

    def compute(self, graph: Any) -> None:
        """Compute a graph; when a signal handler raises meanwhile, the graph ends first."""
        work, asked, interrupt = self._work, False, None
        work.graph = graph
        while work.graph is not None:  # and not "until told": an interrupt may swallow what `done` gave
            try:
                if not asked:
                    work.wake.put(True)
                    asked = True
                work.done.get()
            except BaseException as error:  # also a second Ctrl-C, while the first one takes effect
                self._stop.value, interrupt = b"1", error
        self._stop.value = b""
        if interrupt is not None:
            raise interrupt
        assert work.status in (ggml.GGML_STATUS_SUCCESS, ggml.GGML_STATUS_ABORTED), f"ggml status {work.status}"

    def close(self) -> None:
        """End the thread; no graph is computed afterwards."""
        self._work.wake.put(False)


class _Work:
    """What the two threads share: the graph to compute, None when that is done."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.status = 0
        self.wake: SimpleQueue[bool] = SimpleQueue()
        self.done: SimpleQueue[bool] = SimpleQueue()


def _serve(backend: Any, work: _Work) -> None:
    while work.wake.get():
        if work.graph is not None:
            work.status = ggml.ggml_backend_graph_compute(backend, work.graph)
            work.graph = None
            work.done.put(True)
