"""A server in a process of its own, and the least client: what the benchmarks of serving share.

The client does little for each token, as it runs on the same cores as the server.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

HOST = "127.0.0.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
START_SECONDS = 120
_EVENT = b"data: {"  # how each event of a stream begins


@dataclass(frozen=True)
class Server:
    """A server that runs, and its port."""

    process: subprocess.Popen[bytes]
    port: int
    started_s: float  # from its start until it was ready

    @property
    def rss_mib(self) -> float:
        """Its resident memory."""
        return self.status("VmRSS") / 1024

    def status(self, name: str) -> int:
        """A number of /proc/PID/status, such as KiB of memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True)
class Reply:
    """What came back: the body, and when each event of a stream came, in seconds from the request."""

    status: int
    body: bytes
    times: list[float]

    @property
    def text(self) -> str:
        """The text of the first choice, streamed or not."""
        if not self.body.startswith(b"data:"):
            return str(_text(json.loads(self.body)["choices"][0]))
        return "".join(_event_text(event) for event in self.events)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream."""
        return [json.loads(part[6:]) for part in self.body.split(b"\n\n") if part.startswith(_EVENT)]

    @property
    def first_text_s(self) -> float:
        """Seconds until the first event of a stream that has text; until the last event if none has."""
        timed = zip(self.times, self.events, strict=False)  # text that looks like an event adds to the times
        return next((moment for moment, event in timed if _event_text(event)), self.times[-1])

    @property
    def usage(self) -> dict[str, Any]:
        """The usage that one of a stream's last events tells; empty without it."""
        return next((event["usage"] for event in reversed(self.events) if event.get("usage")), {})

    @property
    def completion_tokens(self) -> int:
        """Tokens of a stream, by its usage; 0 without usage."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def is_complete(self) -> bool:
        """Whether all of it came: JSON, or a stream up to its last event, which is no error."""
        if self.body.startswith(b"data:"):
            return self.body.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in self.body
        return self.status == 200 and self.body.endswith(b"}")


def _event_text(event: dict[str, Any]) -> str:
    return _text(event["choices"][0]) if event.get("choices") else ""  # one has the usage and no choice


def _text(choice: dict[str, Any]) -> str:
    return str((choice.get("message") or choice.get("delta") or choice).get("content") or choice.get("text") or "")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[Server]:
    """A server's process until the end of the block, ready for requests.

    Raises:
        RuntimeError: it ended, or is not ready in time.
    """
    started = time.perf_counter()
    with TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            while asyncio.run(_status(port)) != 200:
                if process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                    said.seek(0)
                    last = said.read()[-1000:].decode(errors="replace")
                    raise RuntimeError(f"{command[0]} is not ready (exit status {process.poll()}): {last}")
                time.sleep(0.02)
            yield Server(process, port, time.perf_counter() - started)
        finally:
            process.kill()
            process.wait()


async def _status(port: int) -> int:
    try:
        return (await asyncio.wait_for(send(port, request_bytes("GET", "/health")), 5)).status
    except (OSError, ValueError, asyncio.TimeoutError):  # in Python 3.10, the last one is no OSError
        return 0


def request_bytes(method: str, path: str, body: bytes = b"") -> bytes:
    """A whole HTTP request, after which the connection ends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def post(port: int, path: str, body: dict[str, Any], events: int | None = None) -> Reply:
    """What a server replies to a JSON body; leaves after so many events, if that is given."""
    return await send(port, request_bytes("POST", path, json.dumps(body).encode()), events)


async def send(port: int, request: bytes, events: int | None = None) -> Reply:
    """What a server replies to these bytes; leaves after so many events, if that is given.

    Raises:
        OSError: it closed the connection, or refused it.
        ValueError: what came is no HTTP response.
    """
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    received, times = bytearray(), []
    try:
        writer.write(request)
        while part := await reader.read(1 << 16):
            begin = max(0, len(received) - len(_EVENT) + 1)
            received += part
            times += [time.perf_counter() - started] * received.count(_EVENT, begin)
            if events is not None and len(times) >= events:
                break
    finally:
        writer.close()
    return _parsed(bytes(received), times)


def _parsed(received: bytes, times: list[float]) -> Reply:
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError(f"not a whole response: {received[:60]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(_chunks(body))
    return Reply(int(head.split()[1]), body, times)


def _chunks(body: bytes) -> Iterator[bytes]:
    """The parts of a chunked body, as far as they came."""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        yield rest[:length]
        body = rest[length + 2 :]
