"""Engines in this process, on models that transformers made: the default one in f32, and tiny random ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before vLLM is imported: the engine stays in this process, where a test can look at its scheduler.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

import torch
from engines import Engine, tiny_model
from reference import transformers_from_gguf

from taper.models.download import DEFAULT_MODEL, PACKAGED_MODELS

DEFAULT_MODEL_FILE = PACKAGED_MODELS[DEFAULT_MODEL].path  # the user's own, before a test points the cache elsewhere


@pytest.fixture(scope="session")
def default_model() -> torch.nn.Module:
    """The default model in transformers, f32: the reference implementation's."""
    return transformers_from_gguf(DEFAULT_MODEL_FILE)


@pytest.fixture(scope="session")
def default_folder(default_model, tmp_path_factory) -> Path:
    """The same as a folder, for vLLM."""
    folder = tmp_path_factory.mktemp("default")
    default_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny llama of 6 layers."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "Llama")
    return folder


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines and ends them when the module's tests have run."""
    made: list[Engine] = []

    def make(*args, **kwargs) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    made.clear()
    gc.collect()
