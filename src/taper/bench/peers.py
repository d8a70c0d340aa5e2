"""Other programs that run the same model, each behind one function: what a user would have without Taper."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..engine import Engine
from ..errors import RequestError
from ..policy import DepthPolicy
from .measure import Clock, OutOfTimeError, measure
from .target import BenchOptions, Target

_PROGRAMS = ("llama-bench", "llama-batched-bench")
_ALL_LAYERS = 999  # more than any model has


class Speeds(NamedTuple):
    """Seconds of a prompt until its first token, and of each token of an output after its first."""

    ttft_s: float
    tpot_s: float


Peer = Callable[[int, Clock], Speeds]  # measures one length within a time budget


def taper(engine: Engine, policy: DepthPolicy) -> Peer:
    """Taper itself under a policy; every prompt is a new one, as the cache would hold a known one."""
    seeds = count(1)

    def run(length: int, clock: Clock) -> Speeds:
        prompt = measure(engine, policy, prompt_tokens=length, seed=next(seeds), clock=clock)
        output = measure(engine, policy, max_tokens=length, clock=clock)
        return Speeds(prompt.ttft_s, output.tpot_s)

    return run


def llama_cpp(target: Target, options: BenchOptions) -> Peer:
    """llama.cpp's llama-bench on the same file.

    Raises:
        RequestError: it is not installed, or the model is not a GGUF file.
    """
    folder = find_llama_bench(options.llama_bin)
    if folder is None:
        raise RequestError("it is not on PATH", "name its folder with --llama-bin")
    if target.path is None or target.path.is_dir():
        raise RequestError("it runs GGUF files only")
    bench = LlamaBench(folder, target.path, target.threads, on_gpu=target.device == "cuda")

    def run(length: int, clock: Clock) -> Speeds:
        try:
            prompt = bench.measure(prompt_tokens=length, timeout_s=_timeout(clock))
            output = bench.measure(max_tokens=length, timeout_s=_timeout(clock))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        return Speeds(length / prompt, 1 / output)

    return run


def transformers(target: Target, options: BenchOptions) -> Peer:
    """transformers' `generate` with a static cache, which it compiles on a GPU.

    Raises:
        RequestError: it is not installed, or cannot share Taper's weights.
    """
    if find_spec("transformers") is None:
        raise RequestError("it is not installed")
    if target.weights is None:
        raise RequestError("it is compared on random weights on a GPU, which it shares with Taper")
    import torch

    from .torch_device import synchronize, transformers_model

    model = transformers_model(target.config, target.weights)

    def seconds(prompt_tokens: int, max_tokens: int, clock: Clock) -> float:
        clock.check()
        ids = torch.randint(target.config.vocab_size, (1, prompt_tokens), device=target.device)
        rest = {"max_new_tokens": max_tokens, "do_sample": False, "cache_implementation": "static"}
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_time=_timeout(clock), **rest)
        synchronize(target.device)
        if out.shape[1] < prompt_tokens + max_tokens:
            raise OutOfTimeError
        return time.perf_counter() - started

    def run(length: int, clock: Clock) -> Speeds:
        ttft = seconds(length, 1, clock)
        first = seconds(1, 1, clock)
        return Speeds(ttft, (seconds(1, length, clock) - first) / (length - 1))

    return run


PEERS: dict[str, Callable[[Target, BenchOptions], Peer]] = {"llama.cpp": llama_cpp, "transformers": transformers}


class Peers:
    """The other programs, of which those that cannot run here or have failed are left out.

    Args:
        target: the model.
        options: where llama.cpp is.
    """

    def __init__(self, target: Target, options: BenchOptions) -> None:
        self._peers: dict[str, Peer] = {}
        self.unavailable: dict[str, str] = {}  # peer -> why it is left out
        for name, open_peer in PEERS.items():
            try:
                self._peers[name] = open_peer(target, options)
            except Exception as error:  # the failure of another program must not cost Taper's own results
                self.unavailable[name] = one_line(error)

    def available(self) -> list[str]:
        """The names of the peers that have not failed."""
        return [name for name in self._peers if name not in self.unavailable]

    def run(self, name: str, length: int, clock: Clock) -> Speeds | None:
        """Measure a peer; None if it fails or has failed before.

        Raises:
            OutOfTimeError: the time budget ended first.
        """
        if name in self.unavailable:
            return None
        try:
            return self._peers[name](length, clock)
        except OutOfTimeError:
            raise
        except Exception as error:  # as above
            self.unavailable[name] = one_line(error)
            return None


def one_line(error: Exception) -> str:
    """An error as one line."""
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _timeout(clock: Clock) -> float | None:
    clock.check()
    return None if clock.left_s == float("inf") else clock.left_s


@dataclass(frozen=True)
class LlamaBench:
    """llama-bench and llama-batched-bench on one model.

    Args:
        folder: where the programs are.
        model: a GGUF file.
        threads: CPU threads.
        on_gpu: run every layer on the GPU instead of the CPU.
    """

    folder: Path
    model: Path
    threads: int
    on_gpu: bool = False

    def measure(
        self, *, prompt_tokens: int = 0, max_tokens: int = 0, context: int = 0, timeout_s: float | None = None
    ) -> float:
        """Tokens per second of a prompt, or of decoding: one repetition after a warm-up.

        Args:
            prompt_tokens: of the prompt (`-p`); 0 to measure decoding.
            max_tokens: to decode (`-n`); 0 to measure a prompt.
            context: tokens before either (`-d`), which are not timed.
            timeout_s: seconds until it is stopped.

        Raises:
            RequestError: the program failed, or does not know an option.
            subprocess.TimeoutExpired: it took too long.
        """
        assert (prompt_tokens == 0) != (max_tokens == 0), "measure a prompt or decoding"
        arguments = ["-p", prompt_tokens, "-n", max_tokens, "-fa", 1, "-r", 1, "-o", "json"]
        arguments += ["-d", context] if context else []
        (test,) = json.loads(self._run(_PROGRAMS[0], arguments, timeout_s))
        return float(test["avg_ts"])

    def measure_batch(
        self, *, prompt_tokens: int, max_tokens: int, batch: int, timeout_s: float | None = None
    ) -> tuple[float, float]:
        """Tokens per second of all sequences together, of their prompts and of decoding (`-npp -ntg -npl`).

        Raises:
            RequestError: the program failed, or does not know an option.
            subprocess.TimeoutExpired: it took too long.
        """
        cells = batch * (prompt_tokens + max_tokens + 256)  # each sequence's share is rounded up
        arguments = ["-npp", prompt_tokens, "-ntg", max_tokens, "-npl", batch, "-c", cells, "-fa", "on"]
        output = self._run(_PROGRAMS[1], [*arguments, "--output-format", "jsonl"], timeout_s)
        (line,) = (line for line in output.splitlines() if line.startswith("{"))
        test = json.loads(line)
        return float(test["speed_pp"]), float(test["speed_tg"])

    def _run(self, program: str, arguments: Sequence[Any], timeout_s: float | None) -> str:
        """What a program prints on standard output."""
        layers = _ALL_LAYERS if self.on_gpu else 0
        command = [self.folder / program, "-m", self.model, "-t", self.threads, "-ngl", layers, *arguments]
        words = [str(word) for word in command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=True)
        except OSError as error:
            raise RequestError(f"cannot run {words[0]}: {error.strerror}", "build llama.cpp anew") from None
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            raise RequestError(f"{program} failed: {lines[-1]}", "try a newer llama.cpp") from None
        return done.stdout


def find_llama_bench(given: Path | None = None) -> Path | None:
    """The folder of llama-bench: the one given, or that of the program on PATH; None if it is not installed.

    Raises:
        RequestError: the given folder does not have it.
    """
    if given is None:
        program = shutil.which(_PROGRAMS[0])
        return Path(program).resolve().parent if program else None
    if not os.access(given / _PROGRAMS[0], os.X_OK):
        raise RequestError(f"no program {_PROGRAMS[0]} in {given}", "name the folder with llama.cpp's programs")
    return given
