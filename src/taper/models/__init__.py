"""Models: from a name or a path to config, weights and tokenizer. The only place that names architectures and formats.

The way in: `find_model` turns a name into a path on this machine, `pull` fetches the files, and `load_model` reads them
into a `LoadedModel`: a `ModelConfig` of plain facts (`config.py`), named tensors (`tensors.py`) and a `Tokenizer`.

To add an architecture, add an entry to `MODEL_TYPES` in `families.py`. `folder.py` and `gguf.py` read its files, and
`read_config.py` turns their settings into the config.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError, did_you_mean
from .download import HUB_ID, PACKAGED_MODELS, DownloadProgress, find_hub_model, pull_hub_model

if TYPE_CHECKING:
    from .tensors import LoadedModel

_PACKAGED = " or ".join(PACKAGED_MODELS)


def find_model(name: str) -> Path:
    """The GGUF file or folder of a model, given as a packaged model's name, a path or a hub id.

    A hub id is ORG/MODEL, also with a file, with :TYPE of a GGUF file, or with the hub's address before it.

    Raises:
        ModelError: the model is not on this machine, or is damaged; the hint names the command that fetches it.
    """
    if name in PACKAGED_MODELS:
        return PACKAGED_MODELS[name].find()
    if os.path.exists(name):
        return Path(name)
    if HUB_ID.fullmatch(name) and not (name.endswith(".gguf") and name.count("/") == 1):
        return find_hub_model(name)
    hint = did_you_mean(name, PACKAGED_MODELS) or f"give a file, a folder, a hub id (ORG/MODEL) or {_PACKAGED}"
    raise ModelError(f"no model {name!r} here", hint)


def model_name(model: str | Path) -> str:
    """The last part of a model's path or hub id, without ".gguf" and the number of a part.

    Never empty: "." and ".." have the names of the folders that they stand for.
    """
    path = Path(model)
    path = path if path.name not in ("", "..") else path.resolve()
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name)
    return name or "model"


def pull(name: str, progress: DownloadProgress) -> Path:
    """Fetch a model, whole or not at all, and return its path.

    Raises:
        ModelError: it cannot be fetched or stored, or is not the expected file.
    """
    if name in PACKAGED_MODELS:
        return PACKAGED_MODELS[name].pull(progress)
    if HUB_ID.fullmatch(name):
        return pull_hub_model(name)
    raise ModelError(f"{name!r} cannot be fetched", f"taper pull takes a hub id (ORG/MODEL) or {_PACKAGED}")


def load_model(path: Path) -> LoadedModel:
    """Read a model from a GGUF file or a Hugging Face folder; weights stay mapped.

    Raises:
        ModelError: it is missing, damaged or not supported.
    """
    # Imported late: finding a model needs neither numpy nor the tokenizers library.
    if os.path.isdir(path):
        from .folder import load_folder

        return load_folder(path)
    if os.path.lexists(path):
        from .gguf import load_gguf

        model = load_gguf(path)
        known = next((packaged for packaged in PACKAGED_MODELS.values() if packaged.path == path), None)
        if known is None:
            return model
        return replace(model, sampling=model.sampling or known.sampling, license=known.license)
    raise ModelError(f"no file or folder {path}", "taper pull fetches the default model")
