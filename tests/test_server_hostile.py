"""The worst bodies and schemas below every limit: others are served meanwhile, memory stays, and SIGTERM ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import chat_body
from test_serve_command import Process

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="memory is read in /proc")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY_BYTES = 4 << 20
HEALTHY = 1 if os.environ.get("TAPER_TIMED") else 4  # seconds to a reply of /health; a busy machine is slower
# Compiling it would take any time, and 80 MB a second.
PATTERNS = [{"type": "string", "pattern": f".*(a|b){{{n}}}c.*"} for n in range(10, 60, 3)]
WORST_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": PATTERNS}}}


def many(element: str) -> str:
    """A list of as many elements as fit a body."""
    return f"[{','.join([element] * ((BODY_BYTES - 1000) // (len(element) + 1)))}]"


def keys(value: str, prefix: str = "k") -> str:
    """An object of as many keys as fit a body."""
    return "{" + ",".join(f'"{prefix}{i}":{value}' for i in range((BODY_BYTES - 1000) // (len(value) + 12))) + "}"


FIELDS = {  # as JSON
    "messages": many("1"),
    "messages, objects": many("{}"),
    "messages, right": many('{"role":"user","content":"a"}'),
    "messages, parts": many('{"role":"user","content":[{"type":"text","text":"a"}]}'),
    "messages, unknown fields": f"[{keys('1')}]",
    "messages, content": '[{"role":"user","content":' + many("{}") + "}]",
    "messages, tool_calls": '[{"role":"assistant","tool_calls":' + many("[]") + "}]",
    "messages, annotations": '[{"role":"user","annotations":' + many("1") + "}]",
    "stop": many("1"),
    "tools": many("[]"),
    "modalities": many("1"),
    "metadata": keys("1"),
    "logit_bias": keys("[]"),
    "logit_bias, right": keys("1", ""),
    "prompt_cache_options": keys("[]"),
    "taper": keys("1"),
    "taper, stop_token_ids": '{"stop_token_ids":' + many("[]") + "}",
    "unknown": many("[]"),
    "prompt": many("1"),
    "prompt, objects": many("{}"),
    "prompt, a million objects": f"[{','.join(['{}'] * 1_000_000)}]",
    "prompt, texts": many('""'),
    "prompt, lists": many("[1]"),
    "prompt, lists of objects": f"[{many('{}')}]",
    "prompt, nulls": many("null"),
}


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body."""
    for name, value in FIELDS.items():
        field = name.partition(",")[0]
        rest = {"model": "tiny"} if field == "prompt" else {**chat_body(), "model": "tiny", "taper": {}}
        fields = {key: json.dumps(part) for key, part in rest.items()} | {field: value}
        body = ",".join(f'"{key}":{part}' for key, part in fields.items())
        yield name, COMPLETIONS if field == "prompt" else CHAT, f"{{{body}}}".encode()
    yield "keys", CHAT, keys("1").encode()


class Watch:
    """Asks for /health all the time, and notes the slowest reply and the most memory."""

    def __init__(self, server: Process) -> None:
        self._url, self._status = server.http.base_url, Path(f"/proc/{server.process.pid}/status")
        self.slowest, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def megabytes(self, key: str = "VmHWM") -> float:
        return int(re.search(rf"{key}:\s+(\d+)", self._status.read_text())[1]) / 1024

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._done.is_set():
                started = time.monotonic()
                assert http.get("/health").status_code == 200
                self.slowest = max(self.slowest, time.monotonic() - started)
                time.sleep(0.02)

    def __enter__(self) -> Watch:
        self._idle = self.megabytes("VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def added(self) -> float:
        """Megabytes above the idle server."""
        return self.megabytes() - self._idle


@pytest.mark.ci
def test_the_worst_body_of_each_field_is_rejected_while_others_are_served(tiny_gguf):
    with Process(tiny_gguf) as server, Watch(server) as watch:
        for name, path, body in bodies():
            assert len(body) <= BODY_BYTES, name
            reply = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400, (name, reply.text[:200])
            assert len(reply.content) < 3000, name
            assert watch.slowest < HEALTHY, name
            assert watch.added < 1000, name
        assert server.chat().status_code == 200


@pytest.mark.ci
def test_many_of_the_worst_bodies_at_once_are_read_one_after_the_other(tiny_gguf):
    """So they take little more memory than one. It is the clients, in this process, that delay each other."""
    path, body = next((path, body) for name, path, body in bodies() if name == "unknown")
    headers = {"content-type": "application/json"}
    with Process(tiny_gguf) as server, Watch(server) as watch, ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: server.http.post(path, content=body, headers=headers), range(20)))
        assert {reply.status_code for reply in replies} == {400}
        assert watch.added < 450


@pytest.mark.ci
def test_the_worst_schemas_are_rejected_while_others_are_served(tiny_gguf):
    with Process(tiny_gguf) as server, Watch(server) as watch:
        for _ in range(2):
            reply = server.chat(response_format=WORST_SCHEMA, taper={})
            assert reply.status_code == 400
            assert re.search("compiling it (takes more than 2 seconds|needs more than 512 MB)", reply.text)
        good = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
        assert server.chat(response_format=good, taper={}).json()["choices"][0]["message"]["content"] in "12"
        assert watch.slowest < HEALTHY
        assert watch.added < 1000


@pytest.mark.ci
def test_schemas_wait_under_the_deadline_and_only_as_long_as_their_clients(tiny_gguf):
    with Process(tiny_gguf, "--max-seconds", "3") as server:
        body = chat_body() | {"model": "tiny", "response_format": WORST_SCHEMA, "taper": {}}
        statuses = []

        def ask(timeout: float) -> None:
            with httpx.Client(base_url=server.http.base_url, timeout=timeout) as http:
                try:
                    statuses.append(http.post(CHAT, json=body).status_code)
                except httpx.ReadTimeout:
                    statuses.append(0)

        started = time.monotonic()
        threads = [threading.Thread(target=ask, args=(timeout,)) for timeout in (60, 60, 60, 0.5, 0.5)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert server.chat().status_code == 200  # no schema, so it does not wait for them
        for thread in threads:
            thread.join()
        assert time.monotonic() - started < 15
        assert statuses.count(0) == 2
        assert set(statuses) == {0, 400, 504}


@pytest.mark.ci
def test_sigterm_while_a_schema_compiles_ends_the_server_after_its_reply(tiny_gguf):
    with Process(tiny_gguf) as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.chat, response_format=WORST_SCHEMA, taper={})
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert reply.result().status_code == 400
        assert server.process.wait(15) == 143


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "\ud800"},
        {"model": "\udfff"},
        {"metadata": {"\ud800": "x"}},
        {"metadata": {"a": "x\udc00"}},
        {"stop": ["a", "\ud83d"]},
        {"safety_identifier": "\ud83d\ud83d"},
        {"prompt_cache_options": {"a": [{"b": "\ud800"}]}},
        {"taper": {"policy": "\ud800"}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"\ud800": {}}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["\ud800"]}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        {"messages": [{"role": "user", "name": "\ud800", "content": "hi"}]},
        {"\ud800": 1},
    ],
    ids=lambda fields: next(iter(fields)).encode(errors="replace").decode(),
)
def test_half_of_a_surrogate_pair_is_named_wherever_it_is(logging_server, fields):
    """Whole pairs are characters."""
    body = chat_body(user="\U0001f600") | {"model": "tiny"} | fields
    replies = [
        logging_server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        for content in (json.dumps(body), json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"))
    ]
    assert [reply.status_code for reply in replies] == [400, 400]
    escaped, not_utf8 = (reply.json()["error"] for reply in replies)
    assert "UTF-8" in not_utf8["message"]
    assert "surrogate" in escaped["message"]
    if "\ud800" not in fields:
        assert escaped["param"].startswith(next(iter(fields)))
    assert logging_server.chat(user="\U0001f600").status_code == 200


@pytest.fixture(scope="module")
def logging_server(tiny_gguf):
    with Process(tiny_gguf, "--log-prompts") as server:
        yield server


@pytest.mark.ci
def test_of_two_servers_that_start_together_one_serves(tiny_gguf):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "taper", "serve", "--model", str(tiny_gguf), "--port", str(port)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    end = time.monotonic() + 60
    while all(process.poll() is None for process in both):
        assert time.monotonic() < end
        time.sleep(0.05)
    (ended,) = [process for process in both if process.poll() is not None]
    (serving,) = [process for process in both if process.poll() is None]
    said = ended.communicate()[1].splitlines()
    assert (ended.returncode, len(said)) == (2, 1), said
    while "serving" not in serving.stderr.readline():
        pass
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
    serving.kill()
    serving.communicate()
