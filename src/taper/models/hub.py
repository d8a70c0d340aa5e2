"""Models of the Hugging Face hub, kept in the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ModelError
from .cache import is_full, no_space

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.json", "chat_template.jinja"]


def find_hub_model(name: str) -> Path:
    """The folder or GGUF file of a model that was pulled.

    Raises:
        ModelError: it was not, or only in part.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, file = _split_hub_id(name)
    try:
        if file:
            return Path(hf_hub_download(repository, file, local_files_only=True))
        path = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        raise ModelError(f"model {name} is not on this machine yet", f"fetch it with: taper pull {name}") from None
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name} is here only in part", f"fetch the rest with: taper pull {name}")
    return path


def pull_hub_model(name: str) -> Path:
    """Fetch into the hub's own cache, which resumes and is shared with other tools; it draws its own bars.

    Raises:
        ModelError: it cannot be fetched, has no weights in a format that Taper reads, or cannot be stored.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import logging

    # Its retries would stand before our one line.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    repository, file = _split_hub_id(name)
    try:
        if file:
            return Path(hf_hub_download(repository, file))
        files = HfApi().list_repo_files(repository)
        if not any(entry.endswith(".safetensors") for entry in files):
            names = [entry for entry in files if entry.endswith(".gguf")]
            hint = f"choose a file: taper pull {repository}/{names[0]}" if names else "choose a model with safetensors"
            raise ModelError(f"{repository} has no safetensors weights", hint)
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except ModelError:
        raise
    except Exception as error:  # the hub raises its own, its HTTP library's and the system's errors
        if is_full(error):
            raise no_space(HF_HUB_CACHE, f"all bytes of {name}", "HF_HOME") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"cannot fetch {name}: {reason[:200]}", "check the name and the network; private models need: hf auth login"
        ) from None


def _split_hub_id(name: str) -> tuple[str, str | None]:
    parts = name.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
