"""Where pulled models are kept, and what writing there may run into."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from ..errors import ModelError


def cache_folder() -> Path:
    """Where pulled models are kept: $TAPER_CACHE, else `taper` in the user's cache folder."""
    if own := os.environ.get("TAPER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taper"


def sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_full(error: object) -> bool:
    """Whether an error, or what a program printed, says that there is no space left."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def no_space(folder: object, needed: str, setting: str) -> ModelError:
    """The error for a full disk."""
    return ModelError(
        f"there is not enough space in {folder}: {needed} are needed",
        f"make room there, or set {setting} to another folder",
    )
