"""llama.cpp's own benchmarks, as programs that print JSON: what a user of GGUF files would run otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError

_PROGRAMS = ("llama-bench", "llama-batched-bench")
_ALL_LAYERS = 999  # more than any model has


@dataclass(frozen=True)
class LlamaBench:
    """llama-bench and llama-batched-bench on one model.

    Args:
        folder: where the programs are.
        model: a GGUF file.
        threads: CPU threads.
        on_gpu: run every layer on the GPU, not on the CPU.
    """

    folder: Path
    model: Path
    threads: int
    on_gpu: bool = False

    def measure(
        self, *, prompt_tokens: int = 0, max_tokens: int = 0, context: int = 0, timeout_s: float | None = None
    ) -> float:
        """Tokens per second of a prompt, or of decoding after so many tokens of context: one repetition, warmed up.

        Args:
            prompt_tokens: of the prompt (`-p`); 0 to measure decoding.
            max_tokens: to decode (`-n`); 0 to measure a prompt.
            context: tokens of context before either (`-d`), which are not timed.
            timeout_s: seconds to give it.

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
        """Tokens per second, of all sequences together, of their prompts and of decoding (`-npp -ntg -npl`).

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
