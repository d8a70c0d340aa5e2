"""`taper serve` as a process: how it starts, ends and is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from forked import posix_only, run_taper

PYTHON = [sys.executable, "-m", "taper"]


class Process:
    """A server of a tiny model, on a free port; `start` is the command with the place where it computes."""

    def __init__(self, model, *options: str, start: Sequence[str] = (*PYTHON, "serve", "--threads", "1")) -> None:
        command = [*start, "--model", str(model), "--port", "0", *options]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = ""
        self.http = httpx.Client(base_url=self.read(r"at (http://\S+)/"), timeout=60)
        while True:
            try:
                self.http.get("/ready")
                break
            except httpx.TransportError:
                assert time.monotonic() - self.started < 60
                time.sleep(0.02)
        self.seconds_to_ready = time.monotonic() - self.started

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read(self, pattern: str) -> str:
        """Read what it says up to the line that has a pattern; returns the group of that."""
        assert self.process.stderr is not None
        while not (match := re.search(pattern, line := self.process.stderr.readline())):
            assert line, self.said
            self.said += line
        self.said += line
        return match[1]

    def wait_for(self, accepted: int) -> None:
        """Wait until so many requests run, wait or have been completed."""
        pattern = r"^taper_(?:(?:running|waiting)_sequences|completions_total{.*}) (.+)$"
        end = time.monotonic() + 30
        while sum(map(float, re.findall(pattern, self.http.get("/metrics").text, re.M))) < accepted:
            assert time.monotonic() < end
            time.sleep(0.1)

    def chat(self, **fields) -> httpx.Response:
        ours = {"ignore_eos": True, "mode": "full"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "taper": ours, "max_tokens": 5}
        return self.http.post("/v1/chat/completions", json=body | fields)


_HANDED_OVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], file=sys.stderr, flush=True)
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "taper", "serve", "--threads", "1", *sys.argv[1:]])
"""  # as systemd does for a unit with a socket


@posix_only
def test_a_socket_that_is_handed_over_is_served(tiny_gguf):
    with Process(tiny_gguf, start=(sys.executable, "-c", _HANDED_OVER)) as server:
        assert server.http.base_url.port == int(server.said.split()[0])
        assert server.chat().status_code == 200


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.ci)])
def test_a_signal_under_load_loses_no_accepted_request(tiny_gguf, number):
    with Process(tiny_gguf, "--context", "1000", "--max-batch-size", "1") as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.chat, max_tokens=120, stream=i % 4 == 3) for i in range(8)]
        server.wait_for(accepted=8)
        server.process.send_signal(number)
        for i, future in enumerate(asked):
            response = future.result()
            assert response.status_code == 200
            if i % 4 == 3:
                assert response.text.endswith("data: [DONE]\n\n")
            else:
                assert response.json()["usage"]["completion_tokens"] == 120
        server.process.wait(20)
        assert server.process.returncode == (143 if number == signal.SIGTERM else 130)
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")


@pytest.mark.ci
def test_after_a_kill_a_restart_serves_at_once(tiny_gguf):
    with Process(tiny_gguf) as server:
        port = str(server.http.base_url.port)
        assert server.chat().status_code == 200
        server.process.kill()
        server.process.wait(10)
        with Process(tiny_gguf, "--port", port) as again:
            assert again.chat().status_code == 200
            assert again.seconds_to_ready < (3 if os.environ.get("TAPER_TIMED") else 30)  # a busy machine is slower


@pytest.mark.ci
def test_a_policy_file_is_served_under_its_name_and_is_the_default(tiny_gguf, tmp_path):
    from taper import DepthPolicy

    path = tmp_path / "mine.json"
    path.write_text(DepthPolicy.static(6, 4, [3, 2]).to_json())
    with Process(tiny_gguf, "--policy", str(path), "--policy", "full", "--name", "other") as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["id"] == "other"
        defaults = {name: policy["default"] for name, policy in model["taper"]["policies"].items()}
        assert defaults == {"mine": True, "full": False}
        depths = server.chat(model="other", taper={"ignore_eos": True}).json()["choices"][0]["taper"]["depths"]
        assert depths == [6, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--port", "99999"], "port is 99999"),
        (["--policy", "nonsense"], "no policy 'nonsense'"),
        (["--max-batch-size", "0"], "max_batch_size"),
        (["--host", "256.1.1.1", "--api-key", "x"], "cannot listen on 256.1.1.1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tiny_gguf, options, said):
    code, _, written = run_taper("serve", "--model", tiny_gguf, "--threads", "1", "--port", "0", *options)
    assert code == 2
    (line,) = [line for line in written.decode().splitlines() if "no shipped policy" not in line]
    assert line.startswith("taper: ")
    assert said in line


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import sys; sys.modules['fastapi'] = None; sys.argv = ['taper', 'serve']; from taper.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, 'taper: taper serve needs fastapi (pip install "taper-llm[serve]")\n')


@pytest.mark.ci
def test_the_key_may_come_from_the_environment(tiny_gguf, monkeypatch):
    monkeypatch.setenv("TAPER_API_KEY", "secret")
    with Process(tiny_gguf) as server:
        assert server.chat().status_code == 401
        server.http.headers["authorization"] = "Bearer secret"
        assert server.chat().status_code == 200
        assert "secret" not in server.said


@pytest.mark.ci
def test_the_dashboard_draws_metrics_that_exist(tiny_gguf):
    from pathlib import Path

    dashboard = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    drawn = {target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    with Process(tiny_gguf) as server:
        server.chat()
        server.chat(nonsense=1)
        names = set(re.findall(r"^(taper_\w+)", server.http.get("/metrics").text, re.M))
    used = {name for expression in drawn for name in re.findall(r"taper_\w+", expression)}
    assert len(used) > 10
    assert used <= names
