"""Computing graphs so that a signal such as Ctrl-C ends a long one at once.

Python runs signal handlers between calls only, and computing a long prompt is one call. While a graph is computed,
Python therefore writes the numbers of signals into a file, which is mapped where ggml looks whether to go on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import tempfile
import threading
from contextlib import suppress
from typing import Any

import ggml

_C: Any = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)
_NONE = -1  # what Python calls no file to write to


class InterruptibleCompute:
    """Computes graphs on a backend, one at a time; `close` comes last.

    ggml asks an abort callback between the nodes of a graph. It is C's `strlen` of the mapped file: unlike a function
    of Python's it needs no lock of the interpreter. A thread of its own for computing would do without the file, but
    handing a graph over costs half a millisecond, a twentieth of a step of a small model.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `close`
        self._file.write(bytes(mmap.PAGESIZE))
        self._file.seek(0)
        os.set_blocking(self._file.fileno(), False)
        self._signals = mmap.mmap(self._file.fileno(), mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._signals))
        callback = ctypes.cast(_C.strlen, ggml.ggml_abort_callback)
        ggml.ggml_backend_cpu_set_abort_callback(backend, callback, address)

    def compute(self, graph: Any, interruptible: bool = True) -> bool:
        """Compute a graph; False if a signal ended it, and the signal's handler returned: nothing was computed.

        Raises:
            BaseException: what the handler of a signal raised, such as KeyboardInterrupt. The graph has ended.
        """
        if not interruptible or threading.current_thread() is not threading.main_thread():  # where handlers run
            status = ggml.ggml_backend_graph_compute(self._backend, graph)
        else:
            previous = _NONE  # should the next line be interrupted
            try:
                previous = signal.set_wakeup_fd(self._file.fileno(), warn_on_full_buffer=False)
                status = ggml.ggml_backend_graph_compute(self._backend, graph)
            finally:
                signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
                self._pass_on(previous)
        assert status in (ggml.GGML_STATUS_SUCCESS, ggml.GGML_STATUS_ABORTED), f"ggml status {status}"
        return bool(status == ggml.GGML_STATUS_SUCCESS)

    def close(self) -> None:
        """Close the file; no graph is computed afterwards."""
        ggml.ggml_backend_cpu_set_abort_callback(self._backend, ggml.ggml_abort_callback(), None)
        self._file.close()

    def _pass_on(self, fd: int) -> None:
        """Clear the file; whoever else waits for signals, as asyncio does, gets those that came."""
        count = self._signals.find(b"\0")
        if count:
            numbers, self._signals[:count] = self._signals[:count], bytes(count)
            self._file.seek(0)
            if fd != _NONE:
                with suppress(OSError):
                    os.write(fd, numbers)
