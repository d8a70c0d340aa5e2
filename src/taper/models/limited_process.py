"""Runs untrusted input in a process with limits of memory and time, for libraries that have no such limits.

A script for it has a function `reply` from one JSON value to another. Run as a script, this file is the process; it
imports nothing of Taper, so that it starts quickly.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """Limits of a process: processor time for each request (on Windows, all time), and memory in all."""

    seconds: float
    megabytes: int


class LimitExceeded(Exception):
    """A request exceeded a limit, which ended its process. The message says which: "takes more than 5 seconds"."""


class LimitedProcess:
    """A process that answers requests with a script. It is started for the first request, and again when one ended it.

    Threads take turns; a forked process starts its own. New `limits` apply from the next start.
    """

    def __init__(self, script: Path, limits: Limits) -> None:
        self._script, self.limits = script, limits
        self._lock = threading.Lock()
        self._idle: subprocess.Popen[bytes] | None = None  # None too while it answers
        atexit.register(self.stop)
        if sys.platform != "win32":  # which does not fork
            os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Start it ahead of the first request, if it can be started."""
        with self._lock, suppress(OSError):
            self._idle = self._idle or self._start()

    def ask(self, request: str) -> Any:
        """The reply to a request, which is JSON.

        Raises:
            LimitExceeded: the request exceeded a limit.
            OSError: the process cannot be started.
        """
        with self._lock:
            if self._idle is not None and self._idle.poll() is not None:
                self.stop()
            process = self._idle or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            self._idle, reply, started = None, b"", time.perf_counter()
            try:
                with suppress(OSError):  # it has ended
                    process.stdin.write(request.encode(errors="surrogatepass") + b"\n")
                    process.stdin.flush()
                    reply = process.stdout.readline()
                if reply.endswith(b"\n"):
                    self._idle = process
                    return json.loads(reply)
            finally:
                if self._idle is None:
                    _end(process)
        if sys.platform == "win32":
            is_slow = time.perf_counter() - started >= self.limits.seconds
        else:
            is_slow = process.returncode == -signal.SIGPROF
        if is_slow:
            raise LimitExceeded(f"takes more than {self.limits.seconds:g} seconds")
        reason = f"needs more than {self.limits.megabytes} MB, or ended its process (exit code {process.returncode})"
        raise LimitExceeded(reason)

    def stop(self) -> None:
        """End the process."""
        if self._idle is not None:
            _end(self._idle)
            self._idle = None

    def _forget(self) -> None:
        """In a forked process, leave the running process to the parent."""
        if self._idle is not None:
            _close(self._idle)
        self._lock, self._idle = threading.Lock(), None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__, str(self._script), *map(str, self.limits), *sys.path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # In a session of its own, or with a console of its own, it does not receive Ctrl-C.
        if sys.platform == "win32":
            return subprocess.Popen(command, **pipes, creationflags=subprocess.CREATE_NO_WINDOW)
        return subprocess.Popen(command, **pipes, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for channel in (process.stdin, process.stdout):
        assert channel is not None
        with suppress(OSError):  # data that was not sent yet
            channel.close()


def _serve(script: str, seconds: float, max_bytes: int) -> None:
    """Answer requests until standard input ends."""
    reply = runpy.run_path(script)["reply"]
    start_timer, stop_timer = _limit(seconds, max_bytes)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        start_timer()
        try:
            result = json.dumps(reply(request))
        except MemoryError:
            os._exit(1)
        stop_timer()
        print(result, flush=True)


def _limit(seconds: float, max_bytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Limit the memory of this process; returns what starts a timer that ends the process, and what stops it."""
    if sys.platform == "win32":
        import ctypes
        import faulthandler

        kernel = ctypes.WinDLL("kernel32")
        kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
        job, process = (ctypes.c_void_p(h) for h in (kernel.CreateJobObjectW(None, None), kernel.GetCurrentProcess()))
        # JOBOBJECT_EXTENDED_LIMIT_INFORMATION, class 9, with the flag JOB_OBJECT_LIMIT_PROCESS_MEMORY.
        limits = struct.pack("<16xI92xQ24x", 0x100, max_bytes)
        kernel.SetInformationJobObject(job, 9, limits, len(limits))
        kernel.AssignProcessToJobObject(job, process)
        # Its thread does not need the interpreter's lock, which one long call may hold.
        start = partial(faulthandler.dump_traceback_later, seconds, exit=True)
        return start, faulthandler.cancel_dump_traceback_later
    import resource

    with suppress(ValueError, OSError):  # a lower limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # The parent may ignore or block the signal of the timer, and this process would inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    return partial(signal.setitimer, signal.ITIMER_PROF, seconds), partial(signal.setitimer, signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    script, seconds, megabytes, *sys.path[:] = sys.argv[1:]  # the parent's path, to import the same libraries
    _serve(script, float(seconds), int(megabytes) << 20)
