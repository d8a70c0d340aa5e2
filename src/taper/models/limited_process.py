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
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NamedTuple

_Running = tuple[subprocess.Popen[bytes], BufferedRWPair]  # a process, and the channel to it


class Limits(NamedTuple):
    """Limits of a process: processor time for each request, and memory in all."""

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
        self._idle: _Running | None = None  # None too while it answers
        atexit.register(self.stop)
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
            if self._idle is not None and self._idle[0].poll() is not None:
                self.stop()
            running = process, channel = self._idle or self._start()
            self._idle, reply = None, b""
            try:
                with suppress(ConnectionError):  # it has ended
                    channel.write(request.encode(errors="surrogatepass") + b"\n")
                    channel.flush()
                    reply = channel.readline()
                if reply.endswith(b"\n"):
                    self._idle = running
                    return json.loads(reply)
            finally:
                if self._idle is None:
                    _end(*running)
        if process.returncode == -signal.SIGPROF:
            raise LimitExceeded(f"takes more than {self.limits.seconds:g} seconds")
        reason = f"needs more than {self.limits.megabytes} MB, or ended its process (exit code {process.returncode})"
        raise LimitExceeded(reason)

    def stop(self) -> None:
        """End the process."""
        if self._idle is not None:
            _end(*self._idle)
            self._idle = None

    def _forget(self) -> None:
        """In a forked process, leave the running process to the parent."""
        if self._idle is not None:
            self._idle[1].close()
        self._lock, self._idle = threading.Lock(), None

    def _start(self) -> _Running:
        command = [sys.executable, "-I", "-S", __file__, str(self._script), *map(str, self.limits), *sys.path]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd, quiet = theirs.fileno(), subprocess.DEVNULL
            # In a session of its own, it does not receive Ctrl-C.
            process = subprocess.Popen(command, stdin=fd, stdout=fd, stderr=quiet, start_new_session=True)
            return process, ours.makefile("rwb")


def _end(process: subprocess.Popen[bytes], channel: BufferedRWPair) -> None:
    process.kill()
    process.wait()
    with suppress(OSError):  # data that was not sent yet
        channel.close()


def _serve(script: str, seconds: float, max_bytes: int) -> None:
    """Answer requests until standard input ends."""
    import resource

    reply = runpy.run_path(script)["reply"]
    with suppress(ValueError, OSError):  # a lower limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # The parent may ignore or block the signal of the timer, and this process would inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            result = json.dumps(reply(request))
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(result, flush=True)


if __name__ == "__main__":
    script, seconds, megabytes, *sys.path[:] = sys.argv[1:]  # the parent's path, to import the same libraries
    _serve(script, float(seconds), int(megabytes) << 20)
