"""Finished measurements on disk, by what they were made from: work that was interrupted is never done twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..models.download import cache_folder

if TYPE_CHECKING:
    from ..llm import LLM

FORMAT = 2  # part of every key: raise it when the meaning of a stored value changes
_TABLE = f"measured_{FORMAT}"
_TIMEOUT = 60  # seconds to wait for another process that is writing


class Store:
    """JSON values by what they were made from, in one file that a kill at any moment leaves whole.

    `common` is what every value depends on: the model, the backend and its version. The file is made with its folder.

    Raises:
        RequestError: the file cannot be written, or is not such a file.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self._path, self._common = path, common
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, isolation_level=None, timeout=_TIMEOUT)
            self._file.execute("PRAGMA journal_mode=WAL")
            columns = "key TEXT PRIMARY KEY, value TEXT, check_sum TEXT"
            self._file.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({columns}) WITHOUT ROWID")

    def remember(self, key: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """The value stored under a key, else that of `compute`; always as JSON gives it back."""
        name = digest({"format": FORMAT, **self._common, **key})
        with self._told():
            row = self._file.execute(f"SELECT value, check_sum FROM {_TABLE} WHERE key = ?", (name,)).fetchone()
        # A row that was damaged on disk is measured anew.
        if row is None or not isinstance(row[0], str) or digest([name, row[0]]) != row[1]:
            text = json.dumps(compute())
            with self._told():
                row = (name, text, digest([name, text]))
                self._file.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?)", row)
        else:
            text = row[0]
        return json.loads(text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One line instead of what the system or SQLite raise."""
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "free the disk, make it writable, remove it if it is damaged, or set TAPER_CACHE to another folder"
            raise RequestError(f"cannot keep measurements in {self._path}: {reason}", hint) from None


def open_store(model_hash: str, conditions: Conditions, path: Path | None = None) -> Store:
    """What was measured on a model, by default in the cache folder; other versions' and precisions' is never reused."""
    common = {name: getattr(conditions, name) for name in ("backend", "dtype", "taper", "kernels")}
    return Store(path or cache_folder() / "calibration.sqlite", {"model": model_hash, **common})


def digest(value: Any) -> str:
    """A content hash of JSON data: 32 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


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
        taper=metadata.version("taper-llm"),
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
