"""The policies that ship with Taper, a folder a model, and finding a policy by name or file."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from ..errors import PolicyError
from ..policy import DepthPolicy, ModelIdentity

MAX_FILE_BYTES = 1 << 20
_HINT = "taper policy list shows the shipped policies; or give the path of a policy file"


def shipped_policies() -> dict[str, list[DepthPolicy]]:
    """The calibrated policies that come with Taper, by model, deepest first."""
    shipped: dict[str, list[DepthPolicy]] = {}
    for folder in resources.files(__package__).iterdir():
        files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
        policies = [DepthPolicy.from_json(file.read_text(encoding="utf-8")) for file in files]
        if policies:
            shipped[folder.name] = sorted(policies, key=lambda policy: -policy.mean_depth(128))
    return shipped


def fitting_policies(num_hidden_layers: int, identity: ModelIdentity) -> dict[str, DepthPolicy]:
    """The shipped policies that fit a model, by name."""
    fitting = {}
    for policy in (policy for policies in shipped_policies().values() for policy in policies):
        try:
            policy.check_model(num_hidden_layers, identity)
        except PolicyError:
            continue
        fitting[policy.name] = policy
    return fitting


def find_policy(name: str | Path) -> DepthPolicy:
    """A policy by MODEL/NAME, by NAME if only one model has it, or from a file.

    Raises:
        PolicyError: there is no such policy, several models have one of this name, or the file is not a policy.
    """
    named = {(model, policy.name): policy for model, policies in shipped_policies().items() for policy in policies}
    wanted = [key for key in named if str(name) in (key[1], "/".join(key))]
    if len(wanted) > 1:
        raise PolicyError(
            f"several models have a policy {str(name)!r}", f"name one: {', '.join(sorted(map('/'.join, wanted)))}"
        )
    return named[wanted[0]] if wanted else load_policy(name)


def load_policy(path: str | Path) -> DepthPolicy:
    """Read a policy file.

    Raises:
        PolicyError: the file is missing, not UTF-8, too large, or not a policy.
    """
    given, path = str(path), Path(path)
    try:
        if not os.path.isfile(path):
            reason = "it is not a file" if os.path.exists(path) else "there is no such file"
            raise PolicyError(f"no policy {given[:200]!r}: {reason}", _HINT)
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise PolicyError(f"cannot read policy {path}: {getattr(error, 'strerror', None) or error}", _HINT) from None
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(f"policy {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return DepthPolicy.from_json(raw.decode())
    except UnicodeDecodeError:
        raise PolicyError(f"policy {path} is not UTF-8 text") from None
    except PolicyError as error:
        raise PolicyError(f"policy {path}: {error.message}", error.hint) from None
