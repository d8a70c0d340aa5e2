"""What figures depend on besides the model and the prompts: versions, backend, precision, machine."""

from __future__ import annotations

import datetime
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    from ..llm import LLM

_KERNELS = {"ggml": "ggml-python", "torch": "torch"}  # the distribution that holds each backend's kernels


@dataclass(frozen=True)
class Conditions:
    """Under what conditions figures were measured."""

    date: str  # YYYY-MM-DD
    taper: str
    backend: str  # "ggml" or "torch"
    dtype: str  # of the weights; "auto": as they are in the file
    threads: int | None  # of the CPU; None: the cores the process may use
    machine: str  # the processor and its cores
    python: str
    kernels: str = ""  # the distribution that holds the backend's kernels, and its version; "": not recorded


def current_conditions(llm: LLM) -> Conditions:
    """The conditions of measuring a model here and now."""
    backend = type(llm.engine.backend).__name__.removesuffix("Backend").lower()
    return Conditions(
        date=datetime.date.today().isoformat(),
        taper=__version__,
        backend=backend,
        dtype=llm.dtype,
        threads=llm.threads,
        machine=machine(),
        python=platform.python_version(),
        kernels=f"{_KERNELS[backend]} {metadata.version(_KERNELS[backend])}",
    )


def machine() -> str:
    """The processor and how many cores it has."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"
