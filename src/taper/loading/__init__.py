"""Models from files: the only place that names architectures and file formats."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelError
from .config import Experts, LayerSpec, ModelConfig, Rope
from .model import LoadedModel, Tensor

__all__ = ["Experts", "LayerSpec", "LoadedModel", "ModelConfig", "Rope", "Tensor", "load_model"]


def load_model(path: Path) -> LoadedModel:
    """Read the model of a GGUF file or a Hugging Face folder; weights stay mapped.

    Raises:
        ModelError: it is missing, damaged or not supported.
    """
    # Tokenizers and chat templates need libraries that a benchmark of random weights does without.
    if os.path.isdir(path):
        from .folder import load_folder

        return load_folder(path)
    if os.path.lexists(path):
        from .gguf import load_gguf

        return load_gguf(path)
    raise ModelError(f"no file or folder {path}", "taper pull fetches the default model")
