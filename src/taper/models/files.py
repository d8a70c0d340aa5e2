"""Reads only ordinary files of a plausible size, checks the values in them, and writes files whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..errors import ModelError, RequestError, TaperError, shown

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
MAX_PARTS = 512  # of a GGUF model
MAX_JSON_BYTES = 16 << 20  # twice the largest real file, the weight index of a very large model


def open_file(path: Path, error: type[TaperError] = ModelError) -> BinaryIO:
    """Open an ordinary file. Others are rejected: a FIFO would block, and a device may never end.

    Raises:
        error: the file is missing, not an ordinary file, or cannot be opened.
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
        error: as `open_file`, or the file is too large or not UTF-8.
    """
    with open_file(path, error) as file:
        try:
            raw = file.read(max_bytes + 1)
        except OSError as reason:
            raise error(f"cannot read {path}: {reason.strerror}") from None
    if len(raw) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes", "files of this kind are smaller")
    return decode_text(raw, path, error)


def decode_text(raw: bytes, source: object, error: type[TaperError] = RequestError) -> str:
    """Text from UTF-8, without a byte order mark; an `error` that names the source if it is not UTF-8."""
    try:
        return without_mark(raw.decode())
    except UnicodeDecodeError as reason:
        raise error(f"{source} is not UTF-8 text (byte {reason.start})", "convert it to UTF-8") from None


def without_mark(text: str) -> str:
    """A text without a byte order mark at its beginning."""
    return text.removeprefix("\ufeff")


def text_lines(text: str) -> list[str]:
    r"""The lines of a text, which end at \n or \r\n and nowhere else; other line breaks are part of the text."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file, or `missing`, if given, when there is no such file.

    Raises:
        ModelError: as `read_text`, or the file is not a JSON object.
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


class Settings:
    """Values of a config.json or a GGUF header, checked when they are read; None counts as missing.

    Args:
        values: by key.
        source: the file's name, for messages.
        names: the file's own keys, where they differ, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None) -> None:
        self.values, self.source, self._names = values, source, names or {}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind`; a ModelError if it is missing and has no default, or has another type."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source} lacks {self._names.get(key, key)}", "the file is damaged or incomplete")
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if type(value) is not kind:
            raise self.error(key, f"it must be of type {kind.__name__}")
        return value

    def error(self, key: str, rule: str) -> ModelError:
        """The error for a value that breaks a rule."""
        return ModelError(f"{self.source}: {self._names.get(key, key)} is {shown(self.values.get(key))}; {rule}")


def head_size(settings: Settings) -> int:
    """`head_dim` as the file gives it, else an equal share of the hidden size."""
    share = settings.get("hidden_size", int) // max(settings.get("num_attention_heads", int), 1)
    return int(settings.get("head_dim", int, share))


def recurrent_layers(kinds: Any, recurrent: str, source: str) -> list[bool]:
    """Which layers have a state, of `layer_types` whose items are `recurrent` or full attention."""
    settings, full = Settings({"layer_types": kinds}, source), "full_attention"
    kinds = settings.get("layer_types", list)
    if not all(kind in (full, recurrent) for kind in kinds) or full not in kinds:
        raise settings.error("layer_types", f"each layer must be {full} or {recurrent}, and some the former")
    return [kind == recurrent for kind in kinds]


def layers_without_heads(settings: Settings) -> dict[str, Any]:
    """Which layers of a GGUF header have a state: those without key-value heads, of which all others have as many."""
    heads = settings.get("num_key_value_heads", list)
    if not all(type(number) is int and number >= 0 for number in heads) or len({*heads} - {0}) != 1:
        raise settings.error("num_key_value_heads", "it must be the same for all layers that have some")
    return {"num_key_value_heads": max(heads), "recurrent_layers": [number == 0 for number in heads]}


def parts_of(path: Path) -> list[Path]:
    """All files of a GGUF model, given any of them: parts are named as llama.cpp names them."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, min(int(match[2]), MAX_PARTS) + 1)
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[2]}.gguf") for number in numbers] or [path]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 1 << 30  # nobody else can read a locked byte, so it lies beyond the end of all files with locks

    def lock(file: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process has locked it. A shared lock only looks."""
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            if shared:
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        except PermissionError:
            return False
        return True

else:
    import fcntl

    def lock(file: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process has locked it, for itself alone if `shared`."""
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def wait_for_lock(file: IO[Any]) -> None:
    """Lock a file until it is closed, as soon as no other process has locked it."""
    while not lock(file):
        time.sleep(0.1)


def check_writable(folder: Path) -> None:
    """Raise a RequestError if a folder, which need not exist yet, cannot be written to."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RequestError(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
