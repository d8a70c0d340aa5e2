"""The records of an evaluation, as a file of JSON lines: a header with its settings, then a record for each problem.

Each record is written as soon as it is made, so an evaluation that was killed continues from its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ...errors import RequestError, shown
from ...models.files import lock, read_text, wait_for_lock, write_whole
from ...policy import DepthPolicy
from .tasks import Metrics, Problem, Selection

FORMAT = 2
_MAX_BYTES = 1 << 30
_OTHER_FILE = "give another file with --out, or remove it"


@dataclass(frozen=True)
class Completion:
    """One output of the model. `mean_depth` is over steps from 1 on, like that of an `Output`."""

    text: str
    token_ids: tuple[int, ...]  # without the stop id
    mean_depth: float
    finish_reason: str


@dataclass(frozen=True)
class Record:
    """The completions of a problem under one policy, and their scores. Its fields are the keys of a line."""

    task: str
    problem: int  # its index in the task
    mode: str  # "full" or "taper"
    policy: str  # its label
    prompt_hash: str  # of its prompts and generation options
    truncated: bool  # whether the beginning of a prompt was cut off to fit the context
    metrics: Metrics  # filter, metric, value
    extracted: dict[str, str]  # by filter: the text that it extracted
    completions: tuple[Completion, ...]  # one, unless the task asks for more

    @property
    def key(self) -> tuple[str, int, str]:
        """Unique in a file."""
        return self.task, self.problem, self.policy

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """A record from its line; raises ValueError, TypeError, KeyError or AttributeError if it is none."""
        completions = tuple(Completion(**{**c, "token_ids": tuple(c["token_ids"])}) for c in data["completions"])
        record = cls(**{**data, "completions": completions})
        metrics_are_objects = all(isinstance(metrics, dict) for metrics in record.metrics.values())
        if not (isinstance(record.problem, int) and completions and metrics_are_objects):
            raise ValueError
        return record


@dataclass(frozen=True)
class Evaluation:
    """The records that were asked for, and the settings that they depend on."""

    settings: Mapping[str, Any]
    selection: Selection
    policies: dict[str, DepthPolicy]  # by label
    records: list[Record]  # problem by problem, each under all policies
    record_s: float | None = None  # seconds that a new record took, mean; None: the file had all


class RecordFile:
    """The records of one evaluation, and their file if it has one. The first new record creates or extends the file.

    `settings` are what all records depend on, `policies` the policies by label. A file may gain problems and policies;
    its settings and the policy of a label never change. An incomplete last line is dropped.

    Raises:
        RequestError: the file cannot be read, is damaged, belongs to an evaluation with other settings, or another
            process is writing it.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], policies: Mapping[str, Any], conditions: Mapping[str, Any]
    ) -> None:
        self.records: dict[tuple[str, int, str], Record] = {}
        self._path = path
        self._file: FileIO | None = None
        header = {"format": FORMAT, "settings": settings, "policies": policies, "conditions": [conditions]}
        lines = [] if path is None else _read_lines(path)
        if path is not None and lines:
            header = _merged_header(path, lines[0], json.loads(json.dumps(header)))
        self._lines = [json.dumps(header)]  # what the file holds when it is opened
        for number, line in enumerate(lines[1:], 2):
            try:
                record = Record.from_json(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if number == len(lines):  # the evaluation was killed while it wrote
                    break
                raise RequestError(f"line {number} of {path} is not a record", _OTHER_FILE) from None
            self.records.setdefault(record.key, record)
            self._lines.append(line)

    def find(self, problem: Problem, policy: str) -> Record | None:
        """The record of a problem under the policy with this label.

        Raises:
            RequestError: the record was written with other prompts.
        """
        record = self.records.get((problem.task, problem.index, policy))
        if record is not None and record.prompt_hash != problem.prompt_hash:
            name = f"{problem.task}, problem {problem.index}"
            raise RequestError(f"{self._path} was written with other prompts or options ({name})", _OTHER_FILE)
        return record

    def append(self, record: Record) -> None:
        """Keep a record, and write it at once.

        Raises:
            RequestError: it cannot be written; earlier records are kept.
        """
        self.records[record.key] = record
        if self._path is None:
            return
        try:
            if self._file is None:
                _check_not_locked(self._path)
                write_whole(self._path, "".join(f"{line}\n" for line in self._lines).encode())
                self._file = self._path.open("ab", buffering=0)
                wait_for_lock(self._file)
            rest = f"{json.dumps(asdict(record))}\n".encode()
            while rest:  # a disk that fills up may take a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            reason = f"cannot write {self._path}: {error.strerror or error}"
            raise RequestError(reason, "earlier records are kept; make room, and run the same command again") from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _read_lines(path: Path) -> list[str]:
    """The complete lines of a file; none if it is missing or empty."""
    if not path.exists():
        return []
    text = read_text(path, _MAX_BYTES, RequestError)
    _check_not_locked(path)
    if text and "\n" not in text:
        raise _no_records(path)
    return text.split("\n")[:-1]


def _check_not_locked(path: Path) -> None:
    """Reject a file that another process is writing."""
    if path.exists():
        with path.open("rb") as file:
            is_free = lock(file, shared=True)
        if not is_free:
            raise RequestError(f"another evaluation is writing {path}", "wait for it, or give another file with --out")


def _merged_header(path: Path, line: str, header: dict[str, Any]) -> dict[str, Any]:
    """The header of a file that is extended; rejects other settings, and another policy of the same label."""
    try:
        stored = json.loads(line)
    except (ValueError, RecursionError):
        stored = None
    is_header = isinstance(stored, dict) and stored.get("format") == FORMAT
    if not is_header or not all(isinstance(stored.get(key), dict) for key in ("settings", "policies")):
        raise _no_records(path)
    policies = {**header["policies"], **stored["policies"]}
    for prefix, then, now in (("", stored["settings"], header["settings"]), ("policy ", policies, header["policies"])):
        for name in now:
            if then.get(name) != now[name]:
                was = f"{prefix}{name} {shown(then.get(name))}"
                raise RequestError(f"{path} was written with {was}, not {shown(now[name])}", _OTHER_FILE)
    conditions = stored.get("conditions", [])
    conditions += [entry for entry in header["conditions"] if entry not in conditions]
    return {**stored, "policies": policies, "conditions": conditions}


def _no_records(path: Path) -> RequestError:
    return RequestError(f"{path} exists and holds no records of an evaluation", _OTHER_FILE)
