"""Policies as files, and those that ship with Taper, in a folder for each model.

A policy is a JSON file. With adapters it is a safetensors file, which has this JSON in its metadata as `taper_policy`
and two tensors for each adapter: `adapters.<layer>.down` and `adapters.<layer>.up`, both f16. Policies that share
adapters are JSON files whose key `adapters` names such a file, relative to their folder.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from itertools import chain
from pathlib import Path

from ..adapters import Adapters
from ..errors import PolicyError, TaperWarning, did_you_mean, shown, unique_keys
from ..policy import DepthPolicy, ModelIdentity
from .download import DEFAULT_MODEL
from .files import read_text, write_whole

MAX_FILE_BYTES = 1 << 20
MAX_ADAPTER_BYTES = 1 << 30  # those of a model of 70 billion parameters have 0.2 GB
ADAPTERS_SUFFIX = ".safetensors"
METADATA_KEY = "taper_policy"
PARTS = ("down", "up")
FULL = "full"  # the policy that runs every layer, of any model
LONG_OUTPUT = 1024  # tokens up to which a policy must hold to be a default
TAPERING = ("balanced", "fast")  # the policy of mode taper where none may be a default: the first that ships
_HINT = "taper policy list shows the shipped policies; or give the path of a policy file"


@cache
def shipped_policies() -> dict[str, list[DepthPolicy]]:
    """The calibrated policies that come with Taper, by model, deepest first. Every call returns the same objects."""
    shipped: dict[str, list[DepthPolicy]] = {}
    with resources.as_file(resources.files("taper") / "policies") as folders:
        for file in folders.glob("*/*.json"):
            shipped.setdefault(file.parent.name, []).append(load_policy(file))
    return {name: sorted(policies, key=lambda policy: -policy.mean_depth(128)) for name, policies in shipped.items()}


def fitting_policies(num_hidden_layers: int, identity: ModelIdentity) -> dict[str, DepthPolicy]:
    """The shipped policies that fit a model, by name."""
    fitting = {}
    for policy in chain(*shipped_policies().values()):
        with suppress(PolicyError):
            policy.check_model(num_hidden_layers, identity)
            fitting[policy.name] = policy
    return fitting


def default_policy(num_hidden_layers: int, identity: ModelIdentity) -> DepthPolicy | None:
    """The shipped policy that runs where nobody names one: the fastest that holds in long outputs. None: full depth."""
    return fastest_holding(fitting_policies(num_hidden_layers, identity).values())


def fastest_holding(policies: Iterable[DepthPolicy]) -> DepthPolicy | None:
    """The fastest of some policies that hold in long outputs; None if none does."""
    holding = filter(holds_in_long_outputs, policies)
    return min(holding, key=lambda policy: policy.mean_depth(LONG_OUTPUT), default=None)


def holds_in_long_outputs(policy: DepthPolicy) -> bool:
    """Whether a policy was measured in long outputs, and passed the rule for defaults there.

    The rule is that of `taper.lab.calibration.long_outputs`; the measurement is a part of the policy's file.
    """
    measured = policy.provenance.get("long_outputs")
    return isinstance(measured, dict) and measured.get("failures") == []


def measured_tokens(policy: DepthPolicy) -> int | None:
    """The length of outputs on which the quality of a policy was measured; None if it was not."""
    long, tokens = policy.provenance.get("long_outputs"), policy.provenance.get("answer_tokens")
    if isinstance(long, dict):
        tokens = long.get("max_tokens", tokens)
    return tokens if isinstance(tokens, int) else None


def resolve_policy(policy: DepthPolicy | str | Path, num_hidden_layers: int, identity: ModelIdentity) -> DepthPolicy:
    """The policy for a model, given "full", a name, a file or a policy; warns if it may be made for another model.

    Raises:
        PolicyError: there is no such policy, or it does not fit the model.
    """
    if str(policy) == FULL:
        return DepthPolicy.full(num_hidden_layers)
    if isinstance(policy, str | Path):
        policy = fitting_policies(num_hidden_layers, identity).get(str(policy)) or find_policy(policy)
    if not isinstance(policy, DepthPolicy):
        raise PolicyError(f"policy is {shown(policy)}", "give a DepthPolicy, the name of a shipped one, or a file")
    if warning := policy.check_model(num_hidden_layers, identity):
        warnings.warn(warning, TaperWarning, stacklevel=3)
    return policy


def find_policy(name: str | Path) -> DepthPolicy:
    """A shipped policy by MODEL/NAME, one of the default model by NAME, or a policy from a file.

    Raises:
        PolicyError: there is no such policy, or the file is not a policy.
    """
    known = {f"{model}/{policy.name}": policy for model, policies in shipped_policies().items() for policy in policies}
    known |= {policy.name: policy for policy in shipped_policies().get(DEFAULT_MODEL, [])}
    if str(name) in known:
        return known[str(name)]
    try:
        return load_policy(name)
    except PolicyError as error:
        raise PolicyError(error.message, did_you_mean(name, known) or error.hint) from None


def load_policy(path: str | Path) -> DepthPolicy:
    """Read a policy file, with adapters if its name ends in .safetensors or its JSON names a file that has them.

    Raises:
        PolicyError: the file is missing, too large, damaged or not a policy; adapters are not of layers that it skips,
            differ in size, or hold values that are not finite.
    """
    if not os.path.isfile(path):
        raise PolicyError(f"no policy {shown(str(path))}: it is neither a shipped one nor a file", _HINT)
    try:
        if Path(path).suffix == ADAPTERS_SUFFIX:
            file, stat = Path(path).absolute(), os.stat(path)
            return _read_with_adapters(file, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return policy_from_json(read_text(Path(path), MAX_FILE_BYTES, PolicyError), Path(path).parent)
    except PolicyError as error:
        raise PolicyError(f"policy {path}: {error.message}", error.hint) from None


def policy_from_json(text: str, folder: Path) -> DepthPolicy:
    """A policy from its JSON, with the adapters of the file that its key `adapters` names, if it has one.

    Args:
        text: what `DepthPolicy.to_json` wrote, and perhaps `adapters`.
        folder: where the file with adapters is, unless its path is absolute.

    Raises:
        PolicyError: the text is not a policy, or the file is not one with adapters for layers that it skips.
    """
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        data = None
    file = data.pop("adapters", None) if isinstance(data, dict) else None
    if file is None:
        return DepthPolicy.from_json(text)
    if not isinstance(file, str) or Path(file).suffix != ADAPTERS_SUFFIX:
        raise PolicyError(f"adapters is {shown(file)}; it must be the path of a {ADAPTERS_SUFFIX} file")
    return replace(DepthPolicy.from_json(json.dumps(data)), adapters=load_policy(folder / file).adapters)


def save_policy(path: str | Path, policy: DepthPolicy) -> None:
    """Write a policy to a file: JSON, or with adapters a .safetensors file. Whole or not at all.

    Raises:
        PolicyError: the suffix does not fit: .safetensors is for policies with adapters, and only for these.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if (path.suffix == ADAPTERS_SUFFIX) != (policy.adapters is not None):
        rule = "has adapters and must be" if policy.adapters is not None else "has no adapters and must not be"
        raise PolicyError(f"policy {policy.label} {rule} written as {ADAPTERS_SUFFIX}; got {path.name}", "rename it")
    content = policy.without_adapters().to_json().encode()
    if policy.adapters is not None:
        from safetensors.numpy import save

        pairs = policy.adapters.layers.items()
        tensors = {f"adapters.{layer}.{part}": m for layer, pair in pairs for part, m in zip(PARTS, pair, strict=True)}
        content = save(tensors, {METADATA_KEY: content.decode()})
    write_whole(path, content)


@lru_cache(maxsize=4)  # requests that name one file share its arrays while it does not change
def _read_with_adapters(path: Path, version: tuple[int, ...]) -> DepthPolicy:
    import numpy as np
    from safetensors import SafetensorError, safe_open

    try:
        if version[-1] > MAX_ADAPTER_BYTES:
            raise PolicyError(f"it has {version[-1]} bytes; at most {MAX_ADAPTER_BYTES} are read")
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise PolicyError(f"not a policy with adapters: {error}", "download or train it again") from None
    if METADATA_KEY not in metadata:
        raise PolicyError(f"its metadata has no {METADATA_KEY}", "taper heal writes such files")
    policy = DepthPolicy.from_json(metadata[METADATA_KEY])
    layers, hidden_size = {}, policy.model.hidden_size if policy.model else None
    for layer in sorted({name.split(".")[1] for name in tensors if name.count(".") == 2}):
        names = [f"adapters.{layer}.{part}" for part in PARTS]
        if not (layer.isdecimal() and len(layer) < 6 and all(name in tensors for name in names)):
            raise PolicyError(f"adapter {shown(layer)} is not complete", "there must be a down and an up of each layer")
        down, up = (tensors.pop(name) for name in names)
        hidden_size = down.shape[-1] if hidden_size is None and down.ndim else hidden_size
        if {down.dtype, up.dtype} != {np.dtype(np.float16)}:
            raise PolicyError(f"the adapter of layer {layer} is of type {down.dtype} and {up.dtype}, not float16")
        if down.ndim != 2 or down.shape[1] != hidden_size or up.shape != down.shape[::-1] or not down.size:
            shapes = f"shapes {list(down.shape)} and {list(up.shape)}"
            raise PolicyError(f"the adapter of layer {layer} has {shapes}, not [rank, {hidden_size}] and the reverse")
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise PolicyError(f"the adapter of layer {layer} has values that are not finite", "train it again")
        layers[int(layer)] = (down, up)
    if tensors:
        raise PolicyError(f"tensor {shown(min(tensors))} is no adapter's")
    if not layers:
        raise PolicyError("it has no adapters", "a policy without adapters is a JSON file")
    return replace(policy, adapters=Adapters(layers, str(path)))
