"""What the host adds to each step of a fast device: choosing tokens, making texts, sending events.

    python research/host_time.py --out research/results/host_time.json
    python research/host_time.py --beside FOLDER --out FILE

A forward computes nothing: it keeps a core busy as PyTorch does while a GPU computes, for four milliseconds in which
Python's other threads run, and gives logits of made-up tokens as a GPU's candidates. What a step takes longer is the
host's time, in `LLM.generate` and in `taper serve` with clients that stream. With --beside, Taper in another source
folder takes turns.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from decode import commit, conditions, write
from server_process import CHAT, Reply, free_port, post, serving

import taper
from taper.backends import ForwardOutput, TokenBatch
from taper.backends.candidates import Candidates, largest
from taper.backends.ggml import GgmlBackend
from taper.cli import main as taper_main
from taper.models import find_model
from taper.models.download import DEFAULT_MODEL

ROWS, TOKENS, FORWARD_MS, ROUNDS = (1, 8, 32), 200, 4.0, 5
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0, "repetition_penalty": 1},
    "top_p": {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1},
    "top_k and penalties": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
}
CONDITIONS = ("date", "cpu", "cores", "python", "versions", "model")  # of those that other scripts name
SPREAD, POOL = 8.0, 64  # standard deviation of logits; different ones


class WaitingBackend:
    """The forward of a device that does not use the host."""

    def __init__(self, vocab_size: int) -> None:
        self._count, self._speed = 0, 1e6  # rounds of hashing a second
        rng = np.random.default_rng(0)
        logits = rng.normal(0, SPREAD, (POOL, vocab_size)).astype(np.float32)
        logits[:, :100] = -100  # control tokens, and bytes that are no text
        self._pool, self._argmaxes = largest(torch.from_numpy(logits)), logits.argmax(-1)

    def begin(self, batch: TokenBatch) -> Callable[[], ForwardOutput]:
        """Begin what takes some time from now on; returns what waits for what the batch asks for."""
        end = time.perf_counter() + FORWARD_MS / 1e3
        asked = batch.logits_rows + batch.preview_rows + batch.greedy_rows
        places = np.arange(self._count, self._count + len(asked)) % POOL
        self._count += len(asked)

        def wait() -> ForwardOutput:
            self._wait(end)
            rows: list[Candidates] = [copy.copy(self._pool[place]) for place in places]
            whole, previewed = len(batch.logits_rows), len(asked) - len(batch.greedy_rows)
            logits = np.array([row.whole() for row in rows[:whole]], np.float32)
            return ForwardOutput(logits, self._argmaxes[places[previewed:]], previews=tuple(rows[whole:previewed]))

        return wait

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """The same at once."""
        return self.begin(batch)()

    def _wait(self, end: float) -> None:
        started = time.perf_counter()
        if (left := end - started) > 0:
            hashlib.pbkdf2_hmac("sha256", b"", b"", max(1, round(0.9 * left * self._speed)))  # other threads run
            self._speed *= 0.9 * left / (time.perf_counter() - started)
            while time.perf_counter() < end:
                pass


def generating(backend: WaitingBackend) -> dict[str, dict[str, float]]:
    """The host's milliseconds in a step of `LLM.generate`."""
    result: dict[str, dict[str, float]] = {}
    for count in ROWS:
        with taper.LLM(DEFAULT_MODEL, max_batch_size=count, threads=1) as llm:
            for name in ("forward", "begin"):
                setattr(llm.engine.backend, name, getattr(backend, name))
            llm.engine.backend.overlaps = True
            prompts = [f"Question {number}" for number in range(count)]
            for name, sampling in SAMPLING.items():
                llm.generate(prompts, max_tokens=8, ignore_eos=True, **sampling)
                started = time.perf_counter()
                llm.generate(prompts, max_tokens=TOKENS, ignore_eos=True, **sampling)
                step_ms = 1e3 * (time.perf_counter() - started) / TOKENS
                result.setdefault(name, {})[f"{count} rows"] = step_ms - FORWARD_MS
    return result


def served() -> dict[str, dict[str, float]]:
    """The same of `taper serve`, from the first event of the last client to the last event."""
    result: dict[str, dict[str, float]] = {}
    port = free_port()
    with serving([sys.executable, __file__, "--serve", str(port)], port):
        for count in ROWS:
            for name, sampling in SAMPLING.items():
                replies = asyncio.run(_stream(port, count, sampling))
                first = max(reply.times[0] for reply in replies)
                last = max(reply.times[TOKENS - 1] for reply in replies)
                result.setdefault(name, {})[f"{count} rows"] = 1e3 * (last - first) / (TOKENS - 1) - FORWARD_MS
    return result


async def _stream(port: int, count: int, sampling: dict[str, float]) -> list[Reply]:
    bodies = [
        {
            "model": DEFAULT_MODEL,
            "messages": [{"role": "user", "content": f"Question {number}"}],
            "max_tokens": TOKENS,
            "stream": True,
            "ignore_eos": True,
            **sampling,
        }
        for number in range(count)
    ]
    return await asyncio.gather(*(post(port, CHAT, body) for body in bodies))


def measured(source: Path) -> dict[str, Any]:
    """All of it with Taper in a source folder, in a process of its own."""
    command = [sys.executable, __file__, "--once"]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(source)}, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def main() -> None:
    """Measure, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="the src folder of another Taper")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once or options.serve:
        torch.set_num_threads(1)
        backend = WaitingBackend(taper.LLM(DEFAULT_MODEL, threads=1).config.vocab_size)
        if options.once:
            print(json.dumps({"generate": generating(backend), "serve": served()}))
            return
        methods = {name: lambda _, batch, run=getattr(backend, name): run(batch) for name in ("forward", "begin")}
        with mock.patch.multiple(GgmlBackend, create=True, overlaps=True, **methods):
            sys.argv[1:] = ["serve", "--port", options.serve, "--max-batch-size", str(max(ROWS)), "--threads", "1"]
            taper_main()
    here = Path(__file__).parents[1] / "src"
    folders = {"now": here} | ({"before": options.beside.resolve()} if options.beside else {})
    rounds = [{name: measured(folder) for name, folder in folders.items()} for _ in range(options.rounds)]
    result = {
        name: {
            place: {
                kind: {
                    rows: {
                        "host_ms": round(statistics.median(times), 3),
                        "range": [round(min(times), 3), round(max(times), 3)],
                    }
                    for rows in rounds[0][name][place][kind]
                    for times in [[one[name][place][kind][rows] for one in rounds]]
                }
                for kind in SAMPLING
            }
            for place in rounds[0][name]
        }
        for name in folders
    }
    about = {name: value for name, value in conditions(find_model(DEFAULT_MODEL)).items() if name in CONDITIONS}
    about |= {"commits": {name: commit(folder) for name, folder in folders.items()}, "statistic": "median"}
    about |= {"rounds": options.rounds, "forward_ms": FORWARD_MS, "tokens": TOKENS, "sampling": SAMPLING}
    write(options.out, {"conditions": about, "results": result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
