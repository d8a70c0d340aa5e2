"""Reading and writing files: ordinary files only, of a size that such files have, written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelError, RequestError, TaperError

MAX_JSON_BYTES = 16 << 20  # the largest real ones, indexes of very large models' weights, have half of that


def open_file(path: Path, error: type[TaperError] = ModelError) -> BinaryIO:
    """Open an ordinary file. A FIFO would block and a device may never end, so both are rejected.

    Raises:
        error: there is no such file, it is something else, or it cannot be opened.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path} is not an ordinary file", "give a file, not a folder, pipe or device")
        return path.open("rb")
    except FileNotFoundError:
        raise error(f"there is no file {path}") from None
    except (OSError, ValueError) as reason:  # a name with a null byte is a ValueError
        raise error(f"cannot read {path}: {getattr(reason, 'strerror', None) or reason}") from None


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES, error: type[TaperError] = ModelError) -> str:
    """The text of a file.

    Raises:
        error: what `open_file` raises, or it is too large or not UTF-8.
    """
    with open_file(path, error) as file:
        try:
            raw = file.read(max_bytes + 1)
            if len(raw) > max_bytes:
                raise error(f"{path} has more than {max_bytes} bytes", "no such file needs that")
            return raw.decode()
        except UnicodeDecodeError as reason:
            raise error(f"{path} is not UTF-8 text (byte {reason.start})") from None
        except OSError as reason:
            raise error(f"cannot read {path}: {reason.strerror}") from None


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; `missing`, if given, where there is no such file.

    Raises:
        ModelError: what `read_text` raises, or it holds something else.
    """
    if missing is not None and not os.path.lexists(path):
        return missing
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return data


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its folder.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Reject a folder that cannot be written to, leaving nothing there; it need not exist yet.

    Raises:
        RequestError: it cannot.
    """
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RequestError(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
