"""Measurements on disk, under what they were made from: work that was interrupted is never done twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sqlite3
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine import Engine
from ...errors import RequestError, TaperWarning
from ...models.download import cache_folder
from ...policy import DepthPolicy
from .progress import Stage
from .replay import Reference, Replay, Scores

if TYPE_CHECKING:
    from ...llm import LLM

FORMAT = 3  # part of every key: raise it when the meaning of a stored value changes
_TABLE = f"measured_{FORMAT}"
_TIMEOUT = 60  # seconds to wait for another process that is writing


@dataclass(frozen=True)
class Conditions:
    """What figures depend on besides the model and the prompts."""

    date: str  # YYYY-MM-DD
    taper: str
    backend: str  # "ggml" or "torch"
    dtype: str  # of the weights; "auto": as they are in the file
    threads: int | None  # of the CPU; None: the cores that the process may use
    machine: str  # the processor and its cores
    python: str
    kernels: str = ""  # the distribution that holds the backend's kernels, and its version; "": not recorded
    head: str = ""  # how logits are computed, in words; "": the whole head


def current_conditions(llm: LLM) -> Conditions:
    """The conditions of a measurement here and now."""
    backend = type(llm.engine.backend).__name__.removesuffix("Backend").lower()
    return Conditions(
        date=datetime.date.today().isoformat(),
        taper=metadata.version("taper-llm"),
        backend=backend,
        dtype=llm.dtype,
        threads=llm.threads,
        machine=machine(),
        python=platform.python_version(),
        kernels=llm.engine.backend.kernels,
        head=llm.engine.backend.head,
    )


def machine() -> str:
    """The processor and how many cores it has."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


class Store:
    """JSON values under JSON keys, in one file that stays whole if the process is killed at any moment.

    Every value depends on `common` too: the model, the backend and its version. A file that cannot be read or written
    is a RequestError.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self._path, self._common = path, common
        with self._one_line_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, isolation_level=None, timeout=_TIMEOUT)
            self._file.execute("PRAGMA journal_mode=WAL")
            columns = "key TEXT PRIMARY KEY, value TEXT, check_sum TEXT"
            self._file.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({columns}) WITHOUT ROWID")
            tables = self._file.execute("SELECT name FROM sqlite_master WHERE name GLOB 'measured_*'").fetchall()
            for (old,) in [row for row in tables if row[0] != _TABLE]:
                warnings.warn(f"{path} is of an older Taper: everything is measured anew", TaperWarning, stacklevel=2)
                self._file.execute(f'DROP TABLE "{old}"')

    def remember(self, key: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """The value stored under a key, or else the result of `compute`; always as JSON returns it."""
        name = digest({"format": FORMAT, **self._common, **key})
        with self._one_line_errors():
            row = self._file.execute(f"SELECT value, check_sum FROM {_TABLE} WHERE key = ?", (name,)).fetchone()
        text, check_sum = row or (None, None)
        # A row that was damaged on disk is measured again.
        if not isinstance(text, str) or digest([name, text]) != check_sum:
            text = json.dumps(compute())
            with self._one_line_errors():
                values = (name, text, digest([name, text]))
                self._file.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?)", values)
        return json.loads(text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Raise RequestError instead of what the system or SQLite raise."""
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "free the disk, make it writable, remove it if it is damaged, or set TAPER_CACHE to another folder"
            raise RequestError(f"cannot keep measurements in {self._path}: {reason}", hint) from None


def open_store(model_hash: str, conditions: Conditions, path: Path | None = None) -> Store:
    """The measurements of a model, by default in the cache folder; those of other versions or dtypes are not reused."""
    common = {name: getattr(conditions, name) for name in ("backend", "dtype", "taper", "kernels", "head")}
    return Store(path or cache_folder() / "calibration.sqlite", {"model": model_hash, **common})


class Measurements:
    """Completions on which each policy is replayed once; the scores of each completion are stored. Close it to free
    the engine's slots."""

    def __init__(self, engine: Engine, references: Sequence[Reference], store: Store) -> None:
        self.replay = Replay(engine, references)
        self._layers, self._store = engine.backend.config.num_hidden_layers, store
        self._keys = [digest([reference.prompt_ids, reference.completion_ids]) for reference in references]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tapered_steps(self) -> list[int]:
        """Steps besides step 0 of each completion."""
        return [len(reference.completion_ids) - 1 for reference in self.replay.references]

    def close(self) -> None:
        """Free the slots."""
        self.replay.close()

    def scores(self, policy: DepthPolicy, stage: Stage, completions: range | None = None) -> Scores:
        """What a policy costs at each step of some completions, by default of all."""

        def measure() -> dict[str, list[float]]:
            (scores,) = self.replay.at(index, [policy])
            return {name: values.tolist() for name, values in vars(scores).items() if name != "reference"}

        parts = []
        for index in completions or range(len(self)):
            stored = self._store.remember({"scores of": numbers(policy), "on": self._keys[index]}, measure)
            columns = {name: np.array(values) for name, values in stored.items()}
            parts.append(Scores(reference=np.full(len(columns["step"]), index), **columns))
            stage.done()
        return Scores.joined(parts)

    def kl_sums(
        self, skipped: frozenset[int], candidates: Sequence[int], completions: range, stage: Stage
    ) -> np.ndarray:
        """Sums of KL over some completions if `skipped` and one of the candidates are skipped: [candidates], nats."""
        sums, base = np.zeros(len(candidates)), skipping(self._layers, skipped)
        policies = [skipping(self._layers, skipped | {layer}) for layer in candidates]

        def measure() -> list[float]:
            return [float(scores.kl.sum()) for scores in self.replay.at(index, policies, base)]

        for index in completions:
            key = {"kl of skipping": sorted(skipped), "and": list(candidates), "on": self._keys[index]}
            sums += self._store.remember(key, measure)
            stage.done()
        return sums

    def block_influence(self) -> list[float]:
        """ShortGPT's measure of each layer, [L]."""
        return self._store.remember({"block influence on": self._keys}, lambda: self.replay.block_influence().tolist())  # type: ignore[no-any-return]


def skipping(num_hidden_layers: int, skipped: Collection[int]) -> DepthPolicy:
    """The policy that skips these layers from step 1 on."""
    return DepthPolicy.static(num_hidden_layers, num_hidden_layers - len(skipped), sorted(skipped))


def numbers(policy: DepthPolicy) -> dict[str, Any]:
    """What decides what is computed, and nothing else."""
    adapters = {} if policy.adapters is None else {"adapters": policy.adapters.digest}
    return {**vars(policy.schedule), "skip_order": policy.skip_order, **adapters}


def digest(value: Any) -> str:
    """A content hash of JSON data: 32 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
