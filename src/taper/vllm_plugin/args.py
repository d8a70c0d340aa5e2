"""The flags that make vLLM taper. Knows nothing of vLLM but the names of its flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from ..errors import PolicyError
from ..policy import DepthPolicy
from . import ARCHITECTURES


def vllm_args(
    policy: DepthPolicy, policies: Mapping[str, DepthPolicy] | None = None, architecture: str | None = None
) -> list[str]:
    """Flags for `vllm serve`. They contain the policies themselves, so a server needs no policy files.

    Args:
        policy: the policy of requests that name none.
        policies: further policies, by the names that requests use.
        architecture: "llama" and the like; by default, that of the model the policy was made for.

    Raises:
        PolicyError: the architecture is unknown, or the plug-in does not have it.
    """
    architecture = architecture or (policy.model.architecture if policy.model else None)
    known = {name.removesuffix("ForCausalLM").lower(): tapered for name, tapered in ARCHITECTURES.items()}
    if architecture not in known:
        problem = "the policy names no architecture" if architecture is None else f"no architecture {architecture!r}"
        raise PolicyError(problem, f"--architecture {'|'.join(known)}")
    config = {"policy": _data(policy)}
    if policies:
        config["policies"] = {name: _data(named) for name, named in policies.items()}
    return [
        "--hf-overrides",
        _text({"architectures": [known[architecture]]}),
        "--additional-config",
        _text({"taper": config}),
        "--no-enable-prefix-caching",
        "--enforce-eager",
    ]


def _data(policy: DepthPolicy) -> dict[str, object]:
    data: dict[str, object] = json.loads(replace(policy, provenance={}).to_json())
    return data


def _text(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))
