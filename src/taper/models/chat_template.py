"""Chat templates: programs that come with a model, run in a process with limits of memory and time.

Jinja's sandbox limits neither, and leaves that to the operating system. `template_worker.py` is the process.
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
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RequestError

MAX_SOURCE = 1 << 16  # characters of a template; the largest real ones have a third of that
MAX_OUTPUT, OUTPUT_PER_CHARACTER = 1 << 20, 4  # characters of the rendered text; more for each one of the messages
MAX_MEGABYTES = 512
MAX_SECONDS = 5.0  # of processor time


class ChatTemplate:
    """A template, given as its source."""

    def __init__(self, source: str) -> None:
        self.source = source
        if source:
            _WORKER.start()  # it imports Jinja while this process reads the model

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the values that the template reads; none if it is damaged."""
        try:
            return frozenset(self._run(None)["variables"])
        except (RequestError, KeyError):
            return frozenset()

    def render(self, values: Mapping[str, Any]) -> str:
        """The text that the template makes of values, which must be JSON.

        Raises:
            RequestError: the template refuses them, fails, or does too much.
        """
        reply = self._run(values)
        if "too_long" in reply:
            raise _too_much(f"writes more than {reply['too_long']} characters")
        if "refused" in reply:
            raise RequestError(f"the model's chat template refused these messages: {reply['refused']}")
        text: str = reply["text"]
        return text

    def _run(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        if len(self.source) > MAX_SOURCE:
            raise _too_much(f"has {len(self.source)} characters; at most {MAX_SOURCE} are run")
        try:
            given = json.dumps(values, ensure_ascii=False, default=dict)  # other mappings are objects too
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages must be JSON: {error}") from None
        limits = {"seconds": MAX_SECONDS, "characters": MAX_OUTPUT + OUTPUT_PER_CHARACTER * len(given)}
        request = f"[{json.dumps(limits)}, {json.dumps(self.source)}, {given}]\n"
        reply: dict[str, Any] = json.loads(_WORKER.run(request.encode(errors="surrogatepass")))
        return reply


class _Worker:
    """The process: started for the first template, and again after a template ended it.

    All templates of this process share it. Threads take turns; a forked process starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # None too while a template runs

    def run(self, request: bytes) -> bytes:
        """The reply to a request.

        Raises:
            RequestError: the template ended the process, or it cannot be started.
        """
        with self._lock:
            if self._idle is not None and self._idle[0].poll() is not None:
                self.stop()
            running = process, channel = self._idle or _start()
            self._idle, reply = None, b""
            try:
                with suppress(ConnectionError):  # it has ended
                    channel.sendall(request)
                    while part := channel.recv(1 << 20):
                        reply += part
                        if reply.endswith(b"\n"):
                            self._idle = running
                            return reply
            finally:
                if self._idle is None:
                    _end(*running)
        if process.returncode == -signal.SIGPROF:
            raise _too_much(f"takes more than {MAX_SECONDS:g} seconds")
        raise _too_much(f"needs more than {MAX_MEGABYTES} MB, or ended its process (exit code {process.returncode})")

    def start(self) -> None:
        """Start the process ahead of the first template, if it can be started."""
        with self._lock, suppress(RequestError):
            self._idle = self._idle or _start()

    def stop(self) -> None:
        """End the process."""
        if self._idle is not None:
            _end(*self._idle)
            self._idle = None

    def forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        if self._idle is not None:
            self._idle[1].close()
        self._lock, self._idle = threading.Lock(), None


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py"))]
    command += [str(MAX_MEGABYTES << 20), *sys.path]
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
        except OSError as error:
            ours.close()
            raise RequestError(f"cannot start the process that runs chat templates: {error.strerror}") from None
    return process, ours


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


_WORKER = _Worker()
atexit.register(_WORKER.stop)
os.register_at_fork(after_in_child=_WORKER.forget)


def _too_much(what: str) -> RequestError:
    return RequestError(f"the model's chat template {what}", "a template of a chat model does far less")
