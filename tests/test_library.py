"""ggml's library: what is used of several, and that one which is not what was declared is refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taper.backends.ggml import library
from taper.backends.ggml.library import Library, ggml
from taper.errors import ModelError
from taper.models.tensors import WEIGHT_TYPES

PLACE = ggml.place
ALL = list(library._places())


def used(folder: str | Path) -> subprocess.CompletedProcess[str]:
    """`taper --version` with `$TAPER_GGML`, in a process of its own: two libraries of a name exclude each other."""
    environment = {**os.environ, library.VARIABLE: str(folder)}
    command = [sys.executable, "-m", "taper", "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("place", ALL, ids=str)
def test_each_library_that_is_installed_passes_its_checks(place):
    result = used(place.folder)
    assert result.returncode == 0, result.stderr
    assert str(place.folder) in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of wheels for Linux")
def test_names_that_a_wheel_made_unique_are_found(tmp_path):
    for file, name in zip(library._files(PLACE.folder), ("ggml-base", "ggml-cpu", "ggml"), strict=False):
        if "xllamacpp" in file.name:
            pytest.skip("its libraries are one file")
        (tmp_path / f"lib{name}-82914aef.so.0.27.0").symlink_to(file)
    result = used(tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")
def test_libraries_of_devices_are_told_from_those_of_processors(tmp_path):
    for name in ("-base-82914aef", "-cpu-0786c92d", "-2f623e0b", "-vulkan-4062e2a6", "-cuda", "-cpu-haswell"):
        (tmp_path / f"libggml{name}.so").touch()
    (tmp_path / "libllama-af9aab63.so").touch()
    assert [path.name for path in library._device_files(tmp_path)] == ["libggml-cuda.so", "libggml-vulkan-4062e2a6.so"]


def test_a_device_is_called_by_what_it_is_programmed_with():
    names = {"Vulkan0": "vulkan", "CUDA1": "cuda", "MTL0": "metal", "Metal": "metal", "ROCm0": "rocm", "SYCL0": "sycl"}
    assert {name: library.Device(0, name, "a card", (1, 2)).kind for name in names} == names


def test_loading_leaves_no_threads_behind():
    """OpenMP's would slow down every later step: a server then took 1.7 times as long for a token."""
    code = (
        "import os, numpy; before = len(os.listdir('/proc/self/task')); import taper.backends.ggml.library; "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    if not Path("/proc/self/task").exists():
        pytest.skip("threads are counted in /proc")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_a_folder_without_a_library_is_told_in_one_line(tmp_path):
    result = used(tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert str(tmp_path) in result.stderr
    library._files(tmp_path)[0].write_bytes(b"no library")
    assert used(tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FIRST_TESTED", (0, 99), "tested are 0.99"),
        ("FIRST_UNTESTED", (0, 1), "not including, 0.1"),
        ("_OBJECT_SIZE", 40, "not laid out"),
        ("_AFTER_NAME", 24, "not laid out"),
        ("WEIGHT_TYPES", {**WEIGHT_TYPES, "Q4_0": (2, 32, 20)}, "Q4_0 has other blocks"),
        ("_FUNCTIONS", {"no_such_function": (None,)}, "no ggml_no_such_function"),
    ],
)
def test_a_library_that_is_not_what_was_declared_is_refused(monkeypatch, name, value, says):
    monkeypatch.setattr(library, name, value)
    monkeypatch.setattr(Library, "_close", lambda self: None)  # the tests go on with it
    with pytest.raises(ModelError, match=says):
        Library(PLACE)


def test_a_library_for_another_processor_is_refused_before_it_computes(monkeypatch):
    """Else the first product would end the process: SIGILL."""
    monkeypatch.setattr(Library, "_close", lambda self: None)
    monkeypatch.setattr(Library, "_instructions", lambda self: {"avx2": False})
    monkeypatch.setattr(Library, "_built_with", lambda self, name: True)
    with pytest.raises(ModelError, match="built for processors with avx2, which this one has not"):
        Library(PLACE)


def test_threads_do_not_spin_while_nothing_is_computed(tiny_gguf):
    from taper import LLM

    llm = LLM(tiny_gguf, threads=2, context=64)
    llm.generate("a few words", max_tokens=2, ignore_eos=True)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.6  # both of them would take two


def test_wrong_products_are_noticed(monkeypatch):
    monkeypatch.setattr(Library, "_close", lambda self: None)
    get = Library._function

    def wrong(self, name):
        function = get(self, name)
        if name != "ggml_backend_tensor_set":
            return function

        def zeros(tensor, data, offset, size):
            function(tensor, ctypes.create_string_buffer(size), offset, size)

        return zeros

    monkeypatch.setattr(Library, "_function", wrong)
    with pytest.raises(ModelError, match="product of two small matrices is wrong"):
        Library(PLACE)


def test_a_refused_library_is_named_and_the_next_one_taken(monkeypatch, tmp_path):
    nothing = library.Place(tmp_path)
    monkeypatch.setattr(library, "_places", lambda: iter([nothing, PLACE]))
    taken = library._load()
    assert taken.place == PLACE
    assert len(taken.rejected) == 1
    assert str(tmp_path) in taken.rejected[0]
