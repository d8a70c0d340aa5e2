"""What an evaluation has done so far, as JSON lines: a header with its settings, then a record for each problem.

Records are written as they come, so an evaluation that was killed goes on from its file.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import RequestError, shown
from ..models.files import check_writable, read_text, write_whole
from .tasks import Metrics, Problem

FORMAT = 1
_MAX_BYTES = 1 << 30
_OTHER_FILE = "give another file with --out, or remove it"


@dataclass(frozen=True)
class Answer:
    """One output of the model. `mean_depth` is over steps from 1 on, like that of an `Output`."""

    text: str
    token_ids: tuple[int, ...]  # without the stop id
    mean_depth: float
    finish_reason: str


@dataclass(frozen=True)
class Record:
    """A problem under one policy, answered and scored."""

    task: str
    problem: int  # its index in the task
    mode: str  # "full" or "taper"
    policy: str  # its label
    prompt_hash: str  # of its prompts and generation options
    truncated: bool  # whether the beginning of a prompt was cut off to fit the context
    metrics: Metrics  # filter, metric, value
    extracted: dict[str, str]  # by filter: what it took for the answer
    answers: tuple[Answer, ...]  # one, unless the task asks for more

    @property
    def key(self) -> tuple[str, int, str]:
        """What no other record of the file has in common with it."""
        return self.task, self.problem, self.policy


class RecordFile:
    """The records of one evaluation, and their file if it has one, which is first written with the first new record.

    `settings` are what records depend on, `policies` those that they may be of, by label. A file may gain problems and
    policies; its settings stay, and so does the policy of a label. A last line that is not whole is dropped.

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
        header = {"format": FORMAT, "settings": dict(settings), "policies": dict(policies), "conditions": [conditions]}
        lines = [] if path is None else _read(path)
        if path is not None and lines:
            header = _merged(path, _header(path, lines[0]), header)
        self._lines = [json.dumps(header)]  # what the file holds when it is opened
        for number, line in enumerate(lines[1:], 2):
            try:
                record = _record(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if number == len(lines):  # the evaluation was killed while it wrote
                    break
                raise RequestError(f"line {number} of {path} is not a record", _OTHER_FILE) from None
            self.records.setdefault(record.key, record)
            self._lines.append(line)

    def find(self, problem: Problem, policy: str) -> Record | None:
        """The record of a problem under a policy, by its label.

        Raises:
            RequestError: the record is of other prompts.
        """
        record = self.records.get((problem.task, problem.index, policy))
        if record is not None and record.prompt_hash != problem.prompt_hash:
            what = f"{problem.task}, problem {problem.index}"
            raise RequestError(f"{self._path} was written with other prompts or options ({what})", _OTHER_FILE)
        return record

    def append(self, record: Record) -> None:
        """Keep a record, and write it at once.

        Raises:
            RequestError: it cannot be written; those before it are kept.
        """
        self.records[record.key] = record
        if self._path is None:
            return
        try:
            if self._file is None:
                _check_free(self._path)
                write_whole(self._path, "".join(f"{line}\n" for line in self._lines).encode())
                self._file = self._path.open("ab", buffering=0)
                fcntl.flock(self._file, fcntl.LOCK_EX)
            rest = f"{json.dumps(asdict(record))}\n".encode()
            while rest:  # a disk that fills up may take a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            reason = f"cannot write {self._path}: {error.strerror or error}"
            raise RequestError(reason, "what was written before is kept; make room, and run the same again") from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def check_out(path: Path) -> None:
    """Reject at once a file that could not be written later.

    Raises:
        RequestError: it is a folder or a device, or its folder cannot be written to.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"--out {path} is a folder or a device", "name a file")
    check_writable(path.parent)


def _read(path: Path) -> list[str]:
    """The whole lines of a file; none if it is not there or empty."""
    if not path.exists():
        return []
    text = read_text(path, _MAX_BYTES, RequestError)
    _check_free(path)
    if text and "\n" not in text:
        raise _not_ours(path)
    return text.split("\n")[:-1]  # what follows the last newline was not written to its end


def _check_free(path: Path) -> None:
    """Reject a file that another process is writing."""
    if path.exists():
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or give another file with --out"
            raise RequestError(f"another evaluation is writing {path}", hint) from None


def _header(path: Path, line: str) -> dict[str, Any]:
    """The first line, checked."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise _not_ours(path) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _not_ours(path)
    if not all(isinstance(header.get(key), dict) for key in ("settings", "policies")):
        raise _not_ours(path)
    return header


def _merged(path: Path, stored: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The header of a file that goes on; rejects other settings, and another policy of the same label."""
    for kind in ("settings", "policies"):
        for name in given[kind].keys() & stored[kind].keys() if kind == "policies" else given[kind]:
            then, now = stored[kind].get(name), given[kind][name]
            if then != json.loads(json.dumps(now)):
                what = name if kind == "settings" else f"policy {name}"
                raise RequestError(f"{path} was written with {what} {shown(then)}, not {shown(now)}", _OTHER_FILE)
    conditions = [*stored.get("conditions", []), *given["conditions"]]
    different = [entry for index, entry in enumerate(conditions) if entry not in conditions[:index]]
    return {**stored, "policies": {**stored["policies"], **given["policies"]}, "conditions": different}


def _record(data: dict[str, Any]) -> Record:
    """A record from its line; raises ValueError, TypeError or KeyError if it is none."""
    answers = tuple(Answer(**{**a, "token_ids": tuple(a["token_ids"])}) for a in data.pop("answers"))
    record = Record(**data, answers=answers)
    if (
        not isinstance(record.problem, int)
        or not answers
        or not all(isinstance(m, dict) for m in record.metrics.values())
    ):
        raise ValueError
    return record


def _not_ours(path: Path) -> RequestError:
    return RequestError(f"{path} exists and holds no records of an evaluation", _OTHER_FILE)
