"""Models from files: the only place that names architectures and file formats."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelError
from .folder import load_folder
from .gguf import load_gguf
from .model import LoadedModel, ModelConfig, Tensor
from .tokenizer import Message, TextStream, Tokenizer

__all__ = [
    "LoadedModel",
    "Message",
    "ModelConfig",
    "Tensor",
    "TextStream",
    "Tokenizer",
    "load_model",
]


def load_model(path: Path) -> LoadedModel:
    """Read the model of a GGUF file or a Hugging Face folder; weights stay mapped.

    Raises:
        ModelError: it is missing, damaged or not supported.
    """
    if os.path.isdir(path):
        return load_folder(path)
    if os.path.lexists(path):
        return load_gguf(path)
    raise ModelError(f"no file or folder {path}", "taper pull fetches the default model")
