"""Models from files: the only place that names architectures and file formats."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from .folder import load_folder
from .gguf import load_gguf
from .model import LoadedModel, ModelConfig, Tensor
from .names import DEFAULT_MODEL, cache_folder, content_hash, find_model, pull
from .tokenizer import Message, TextStream, Tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "LoadedModel",
    "Message",
    "ModelConfig",
    "Tensor",
    "TextStream",
    "Tokenizer",
    "cache_folder",
    "content_hash",
    "find_model",
    "load_model",
    "pull",
]


def load_model(path: Path) -> LoadedModel:
    """Read the model of a GGUF file or a Hugging Face folder; weights stay mapped.

    Raises:
        ModelError: it is missing, damaged or not supported.
    """
    if path.is_dir():
        return load_folder(path)
    if path.exists():
        return load_gguf(path)
    raise ModelError(f"no file or folder {path}", "taper pull fetches the default model")
