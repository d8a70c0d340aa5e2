"""A server of a tiny model in a thread of the test's own, and requests for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from tiny import PLACE, TinyModel, policies

from taper import LLM
from taper.server.app import uvicorn_config
from taper.server.engine_loop import EngineLoop
from taper.server.limits import Limits, listen
from taper.server.metrics import Metrics
from taper.server.served import ServedModel

LAYERS = 6
NAME = "tiny"
# Hermes' and Qwen's way to say which tools there are, and how to call them.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools> <tool_call><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@dataclass
class Server:
    """A running server."""

    url: str
    llm: LLM
    served: ServedModel
    thread: threading.Thread
    uvicorn: uvicorn.Server
    engine_loop: EngineLoop
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def chat(self, content: str = "tell me", **fields) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields))

    def metric(self, name: str) -> float:
        """Its value; 0 for a label that nothing was counted under yet."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def wait_for(self, name: str, value: float, seconds: float = 20) -> None:
        assert _soon(lambda: self.metric(name) == value, seconds), f"{name} never was {value}"

    def is_idle(self, seconds: float = 20) -> bool:
        """Whether nothing runs or waits, or no longer does soon."""
        names = ("taper_running_sequences", "taper_waiting_sequences")
        return _soon(lambda: not any(map(self.metric, names)), seconds)


def _soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so, or comes to be in time."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def chat_body(content: str = "tell me", **fields) -> dict:
    """A greedy request that does not end before its tokens are used up, unless told otherwise."""
    ours = {"ignore_eos": True} | fields.pop("taper", {})
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 8,
        "taper": ours,
    } | fields


def named_events(response: httpx.Response) -> list[dict]:
    """The events of a stream in which each has a name, which is its type too."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for part in response.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def before_each_forward(server: Server, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run something before each forward of the server's engine."""
    backend, forward = server.llm.engine.backend, server.llm.engine.backend.forward
    monkeypatch.setattr(backend, "forward", lambda batch: (run(), forward(batch))[1], raising=False)


@contextmanager
def serving(tiny: TinyModel, slots: int = 4, context: int = 256, template: str = "", **limits) -> Iterator[Server]:
    """A server of a tiny model that has the policies of `tiny.policies`; "d3" is the default."""
    llm = LLM(str(tiny.folder), dtype="f32", context=context, max_batch_size=slots, **PLACE)
    if template:
        llm.tokenizer = type(llm.tokenizer)(llm.tokenizer.fast, llm.tokenizer.eos_token_ids, template, {})
    chosen = Limits(port=0, **limits)
    known = {"full": llm.resolve_policy(mode="full"), **policies(LAYERS)}
    with running(ServedModel(NAME, llm, known, "d3", chosen.max_n), chosen) as server:
        yield server


@contextmanager
def running(served: ServedModel, chosen: Limits) -> Iterator[Server]:
    """A server of a model."""
    listener = listen(chosen)
    engine_loop = EngineLoop(served.llm, Metrics(served.llm.engine), chosen.max_waiting)
    config = uvicorn.Server(uvicorn_config(served, chosen, engine_loop))
    thread = threading.Thread(target=config.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = "http://{}:{}".format(*listener.getsockname())
    server = Server(url, served.llm, served, thread, config, engine_loop)
    headers = {"authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
    server.http.headers.update(headers)
    _soon(lambda: config.started or not thread.is_alive(), 20)
    assert config.started, "the server did not start"
    try:
        yield server
    finally:
        server.http.close()
        config.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
