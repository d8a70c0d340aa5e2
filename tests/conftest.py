"""Fixtures: tiny random models, and a cache of each test's own."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny import PLAIN, TinyModel, make_tiny, write_gguf

from taper.errors import Names
from taper.lab.calibration import clock
from taper.models import preview

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
settings.register_profile("taper", deadline=None, max_examples=50)  # a busy machine must not fail a test
settings.load_profile("taper")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # pytest runs in the background; processes of tests get Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # A core for each worker and its processes: threads that share cores with another worker's wait for each other.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", params=PLAIN)
def tiny(request, tmp_path_factory) -> TinyModel:
    """One tiny model of each kind."""
    architecture, options = PLAIN[request.param]
    return make_tiny(tmp_path_factory.mktemp(request.param), architecture, **options)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> TinyModel:
    """A tiny llama of 6 layers."""
    return make_tiny(tmp_path_factory.mktemp("tiny_llama"), layers=6)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama, tmp_path_factory) -> Path:
    """The same as a GGUF file, q and k permuted as GGUF has them."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama)
    return path


@pytest.fixture(scope="module")
def server(tiny_llama):
    """A server of the tiny llama."""
    from serving import serving  # the environment of the vLLM plug-in's tests has no server

    with serving(tiny_llama) as running:
        yield running


@pytest.fixture(scope="module")
def tools_server(tiny_llama):
    """The same, with a chat template that takes tools."""
    from serving import TOOLS_TEMPLATE, serving

    with serving(tiny_llama, template=TOOLS_TEMPLATE, context=1000) as running:
        yield running


@pytest.fixture
def folder(tiny_llama, tmp_path) -> Path:
    """A whole model folder to damage."""
    return Path(shutil.copytree(tiny_llama.folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def previews(tmp_path_factory) -> Path:
    """Where previews of heads are kept: all tests share them, as making one of the default model takes a second."""
    return tmp_path_factory.mktemp("previews")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, previews):
    """No test reads or writes the user's cache, and each begins as Python does: the command line sets a global.

    Calibrations time a policy once.
    """
    monkeypatch.setattr(clock, "ROUNDS", 1)
    monkeypatch.setattr(Names, "are_options", False)
    monkeypatch.setattr(preview, "previews_folder", lambda: previews)
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "taper-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
