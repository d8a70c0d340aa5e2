"""Runs what comes from outside in a process with limits of memory and time, where no library has such limits itself.

A script for it has a function `reply` from one JSON value to another. Run as a script, this file is the process; it
imports nothing of Taper, so that it starts quickly.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """What a process may take: processor time of one request, and memory of all it holds."""

    seconds: float
    megabytes: int


class LimitExceeded(Exception):
    """A request took too much, which ended its process; the message says what of, as in "takes more than 5 seconds"."""


class LimitedProcess:
    """A process that answers requests by a script: started for the first one, and again after one ended it.

    Threads take turns; a forked process starts its own. `limits` hold from its next start on.
    """

    def __init__(self, script: Path, limits: Limits) -> None:
        self._script, self.limits = script, limits
        self._lock = threading.Lock()
        self._idle: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # None too while it answers
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Start it ahead of the first request, if it can be started."""
        with self._lock, suppress(OSError):
            self._idle = self._idle or self._start()

    def ask(self, request: str) -> Any:
        """The reply to a request, which is JSON.

        Raises:
            LimitExceeded: it took too much.
            OSError: the process cannot be started.
        """
        with self._lock:
            if self._idle is not None and self._idle[0].poll() is not None:
                self.stop()
            running = process, channel = self._idle or self._start()
            self._idle, reply = None, b""
            try:
                with suppress(ConnectionError):  # it has ended
                    channel.sendall(request.encode(errors="surrogatepass") + b"\n")
                    while part := channel.recv(1 << 20):
                        reply += part
                        if reply.endswith(b"\n"):
                            self._idle = running
                            return json.loads(reply)
            finally:
                if self._idle is None:
                    _end(*running)
        if process.returncode == -signal.SIGPROF:
            raise LimitExceeded(f"takes more than {self.limits.seconds:g} seconds")
        raise LimitExceeded(
            f"needs more than {self.limits.megabytes} MB, or ended its process (exit code {process.returncode})"
        )

    def stop(self) -> None:
        """End the process."""
        if self._idle is not None:
            _end(*self._idle)
            self._idle = None

    def _forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        if self._idle is not None:
            self._idle[1].close()
        self._lock, self._idle = threading.Lock(), None

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        seconds, megabytes = map(str, self.limits)
        command = [sys.executable, "-I", "-S", __file__, str(self._script), seconds, megabytes, *sys.path]
        ours, its = socket.socketpair()
        with its:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=its.fileno(),
                    stdout=its.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            except BaseException:
                ours.close()
                raise
        return process, ours


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


def _serve(reply: Callable[[Any], Any], limits: Limits) -> None:
    """Answer requests until standard input ends."""
    import resource

    max_bytes = limits.megabytes << 20
    with suppress(ValueError, OSError):  # a lower limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # The parent may ignore or block the signal of the timer, and this process would inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        try:
            answer = json.dumps(reply(request))
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    from importlib.util import module_from_spec, spec_from_file_location

    script, seconds, megabytes, *sys.path[:] = sys.argv[1:]  # the parent's, to import the same libraries
    spec = spec_from_file_location("script", script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    _serve(module.reply, Limits(float(seconds), int(megabytes)))
