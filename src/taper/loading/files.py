"""Opening files defensively: ordinary files only, of a size that such files have."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelError

MAX_JSON_BYTES = 16 << 20  # the largest real ones, indexes of very large models' weights, have half of that
_COMPLETE = "give a complete Hugging Face model folder"


def open_file(path: Path) -> BinaryIO:
    """Open an ordinary file. A FIFO would block and a device may never end, so both are rejected.

    Raises:
        ModelError: there is no such file, it is something else, or it cannot be opened.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelError(f"{path} is not an ordinary file", "give a file, not a folder, pipe or device")
        return path.open("rb")
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}", _COMPLETE) from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The text of a file.

    Raises:
        ModelError: what `open_file` raises, or it is too large or not UTF-8.
    """
    with open_file(path) as file:
        try:
            raw = file.read(max_bytes + 1)
            if len(raw) > max_bytes:
                raise ModelError(f"{path} has more than {max_bytes} bytes", "no model needs that")
            return raw.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None


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
