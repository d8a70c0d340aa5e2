"""Finished measurements on disk, by what they were made from: work that was interrupted is never done twice."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import RequestError

FORMAT = 1  # part of every key: raise it when the meaning of a stored value changes


class Store:
    """JSON values by what they were made from, in one file that a kill at any moment leaves whole.

    Args:
        path: the file; made with its folder.
        common: what every value depends on: the model, the backend.

    Raises:
        RequestError: the file cannot be written, or is none of ours.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self._common = common
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS measured (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "make it writable, remove it if it is damaged, or set TAPER_CACHE to another folder"
            raise RequestError(f"cannot keep measurements in {path}: {reason}", hint) from None

    def remember(self, what: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """The value stored for `what`, else that of `compute`; always as JSON gives it back."""
        key = digest({"format": FORMAT, **self._common, **what})
        found = self._file.execute("SELECT value FROM measured WHERE key = ?", (key,)).fetchone()
        if found is None:
            found = (json.dumps(compute()),)
            self._file.execute("INSERT OR REPLACE INTO measured VALUES (?, ?)", (key, *found))
        return json.loads(found[0])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def digest(value: Any) -> str:
    """A content hash of JSON data: 32 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
