"""Finds policies: those that ship with Taper, in a folder for each model, and files."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import resources
from itertools import chain
from pathlib import Path

from ..errors import PolicyError, shown
from ..policy import DepthPolicy, ModelIdentity
from .download import DEFAULT_MODEL
from .files import read_text

MAX_FILE_BYTES = 1 << 20
_HINT = "taper policy list shows the shipped policies; or give the path of a policy file"


def shipped_policies() -> dict[str, list[DepthPolicy]]:
    """The calibrated policies that come with Taper, by model, deepest first."""
    shipped: dict[str, list[DepthPolicy]] = {}
    for folder in resources.files("taper").joinpath("policies").iterdir():
        files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
        if policies := [DepthPolicy.from_json(file.read_text(encoding="utf-8")) for file in files]:
            shipped[folder.name] = sorted(policies, key=lambda policy: -policy.mean_depth(128))
    return shipped


def fitting_policies(num_hidden_layers: int, identity: ModelIdentity) -> dict[str, DepthPolicy]:
    """The shipped policies that fit a model, by name."""
    fitting = {}
    for policy in chain.from_iterable(shipped_policies().values()):
        with suppress(PolicyError):
            policy.check_model(num_hidden_layers, identity)
            fitting[policy.name] = policy
    return fitting


def find_policy(name: str | Path) -> DepthPolicy:
    """A shipped policy by MODEL/NAME, one of the default model by NAME, or a policy from a file.

    Raises:
        PolicyError: there is no such policy, or the file is not a policy.
    """
    for model, policies in shipped_policies().items():
        for policy in policies:
            if str(name) == f"{model}/{policy.name}" or (model == DEFAULT_MODEL and str(name) == policy.name):
                return policy
    return load_policy(name)


def load_policy(path: str | Path) -> DepthPolicy:
    """Read a policy file.

    Raises:
        PolicyError: the file is missing, not UTF-8, too large, or not a policy.
    """
    if not os.path.isfile(path):
        raise PolicyError(f"no policy {shown(str(path))}: it is neither a shipped one nor a file", _HINT)
    text = read_text(Path(path), MAX_FILE_BYTES, PolicyError)
    try:
        return DepthPolicy.from_json(text)
    except PolicyError as error:
        raise PolicyError(f"policy {path}: {error.message}", error.hint) from None
