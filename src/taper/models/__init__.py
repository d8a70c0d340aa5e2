"""From what a user calls a model to files on disk, and `taper pull`, which brings them there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..errors import ModelError
from .cache import cache_folder, sha256
from .hub import HUB_ID, find_hub_model, pull_hub_model
from .packaged import PACKAGED_MODELS, DownloadProgress, PackagedModel

__all__ = ["DEFAULT_MODEL", "PACKAGED_MODELS", "PackagedModel", "cache_folder", "content_hash", "find_model", "pull"]

DEFAULT_MODEL = "smollm2-135m-instruct"


def find_model(name: str) -> Path:
    """The GGUF file or folder of a model: a packaged model's name, a path, or a hub id that was pulled.

    Raises:
        ModelError: there is none here, or a packaged model is damaged; the hint names the command that fetches it.
    """
    if name in PACKAGED_MODELS:
        return PACKAGED_MODELS[name].find()
    if os.path.exists(name):
        return Path(name)
    if HUB_ID.fullmatch(name) and not (name.endswith(".gguf") and name.count("/") == 1):
        return find_hub_model(name)
    raise ModelError(f"no model {name!r} here", f"give a file, a folder, a hub id (ORG/MODEL) or {_packaged_names()}")


def pull(name: str, progress: DownloadProgress) -> Path:
    """Fetch a model, whole or not at all, and return where it is.

    Raises:
        ModelError: it cannot be fetched, is not what was expected, or cannot be stored.
    """
    if name in PACKAGED_MODELS:
        return PACKAGED_MODELS[name].pull(progress)
    if HUB_ID.fullmatch(name):
        return pull_hub_model(name)
    raise ModelError(f"{name!r} cannot be fetched", f"taper pull takes a hub id (ORG/MODEL) or {_packaged_names()}")


def content_hash(path: Path) -> str:
    """sha256 of what a model is made of: a GGUF file, or a folder's configuration, tokenizer and weights, by name."""
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja") and file.is_file():
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()


def _packaged_names() -> str:
    return " or ".join(PACKAGED_MODELS)
