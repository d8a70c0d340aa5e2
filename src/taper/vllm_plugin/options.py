"""The policies of a server and of its requests. Knows nothing of vLLM: plain data in, policies out.

A server's options are `additional_config["taper"]`, an object with two optional keys: `policies`, policies by name,
and `policy`, the default: one of these names, a policy file or a policy's JSON object. Without it every layer runs.

A request's options are three scalars: `taper_policy`, one of these names, "default" or "full"; `taper_alpha`, which
means what `--alpha` means on the command line: `DepthPolicy.with_alpha`; and `taper_reuse`, "filled" or "exact".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import REUSE, PolicyError, RequestError, TaperError, number
from ..models.policies import load_policy, policy_from_json
from ..policy import DepthPolicy
from . import ARCHITECTURES

logger = logging.getLogger("vllm.taper")

FULL, DEFAULT = "full", "default"
_KEYS = ("policy", "policies")
_REQUEST_KEYS = ("taper_policy", "taper_alpha", "taper_reuse")
FILLED, EXACT = REUSE

_with_alpha = lru_cache(maxsize=256)(DepthPolicy.with_alpha)


class RequestOptions(NamedTuple):
    """What a request asks for. `reuse`: which cached keys and values its prompt may use, "filled" or "exact"."""

    policy: DepthPolicy
    reuse: str

    @property
    def tapers(self) -> bool:
        """Whether any of its tokens may skip a layer."""
        return self.policy.tapers

    @property
    def fills(self) -> bool:
        """Whether its tokens leave keys and values in the layers that they skip, for later prompts to reuse."""
        return self.reuse == FILLED and self.tapers


@dataclass(frozen=True)
class PluginOptions:
    """The policies that requests of one server may use: `named`, "full" and "default" too; `default` without a name."""

    default: DepthPolicy
    named: dict[str, DepthPolicy]

    @classmethod
    def read(cls, config: object, model: Any) -> PluginOptions:
        """Options from `additional_config["taper"]`; policy files are read here.

        Args:
            config: the object, or None for no options.
            model: has `num_hidden_layers`, `hidden_size` and `vocab_size`, as the model's config in transformers.

        Raises:
            PolicyError: an unknown key, something that is not a policy, or a policy for another model.
        """
        config = {} if config is None else config
        if not isinstance(config, dict) or (unknown := sorted(set(config) - set(_KEYS))):
            problem = f"has no key {unknown[0]!r}" if isinstance(config, dict) else f"is {config!r}"
            raise PolicyError(f'additional_config["taper"] {problem}', f"give an object with {' and '.join(_KEYS)}")
        policies = config.get("policies", {})
        if not isinstance(policies, dict):
            raise PolicyError(f'additional_config["taper"]["policies"] is {policies!r}', "give policies by name")
        named = {name: _policy(source) for name, source in policies.items()}
        if FULL in named:
            raise PolicyError(f"the policy name {FULL!r} is reserved: it runs every layer", "choose another name")
        named[FULL] = DepthPolicy.full(model.num_hidden_layers)
        source = config.get("policy", FULL)
        default = named[source] if isinstance(source, str) and source in named else _policy(source)
        named.setdefault(DEFAULT, default)
        sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
        for policy in (default, *named.values()):
            policy.check_model(model.num_hidden_layers, policy.model and replace(policy.model, **sizes))
        return cls(default, named)

    def to_config(self) -> dict[str, Any]:
        """Plain data from which `read` makes the same options, without provenance; it names the files of adapters."""
        policies = {name: _plain(policy) for name, policy in self.named.items() if name != FULL}
        return {"policy": _plain(self.default), "policies": policies}

    def request(self, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """The options of a request.

        Raises:
            RequestError: an unknown name, key or value, or an alpha that is out of range or does nothing.
        """
        reuse = (extra_args or {}).get("taper_reuse")
        if reuse not in (None, FILLED, EXACT):
            raise RequestError(f"taper_reuse is {reuse!r}", f"use {FILLED!r} or {EXACT!r}")
        return RequestOptions(self.policy(extra_args), reuse or FILLED)

    def admitted(self, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """The same; a request that got past the check at admission with wrong options runs every layer."""
        try:
            return self.request(extra_args)
        except TaperError as error:
            logger.error("A request runs at full depth: %s", error)
            return RequestOptions(self.named[FULL], EXACT)

    def policy(self, extra_args: Mapping[str, Any] | None) -> DepthPolicy:
        """The policy that a request asks for: the same object each time; raises what `request` raises."""
        if not extra_args:
            return self.default
        for key in extra_args:
            if key.startswith("taper_") and key not in _REQUEST_KEYS:
                raise RequestError(f"unknown argument {key!r}", f"use {' or '.join(_REQUEST_KEYS)}")
        name, alpha = extra_args.get("taper_policy"), extra_args.get("taper_alpha")
        if name is not None and (not isinstance(name, str) or name not in self.named):
            raise RequestError(
                f"taper_policy is {name!r}, which this server does not have", f"it has {', '.join(sorted(self.named))}"
            )
        policy = self.default if name is None else self.named[name]
        if alpha is None:
            return policy
        try:
            return _with_alpha(policy, number("taper_alpha", alpha, 0, 1, above=True))
        except PolicyError as error:
            raise RequestError(f"taper_alpha: {error.message}", error.hint) from None


def _policy(source: object) -> DepthPolicy:
    """A policy from its JSON object or its file."""
    if isinstance(source, dict):
        return policy_from_json(json.dumps(source), Path())
    if isinstance(source, str):
        return load_policy(source)
    raise PolicyError(f"a policy is {source!r}", "give the path of a policy file, or its JSON object")


def vllm_args(
    policy: DepthPolicy, policies: Mapping[str, DepthPolicy] | None = None, architecture: str | None = None
) -> list[str]:
    """Flags for `vllm serve`. They contain the policies themselves, and the paths of the files with their adapters.

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
    config: dict[str, Any] = {"policy": _plain(policy)}
    if policies:
        config["policies"] = {name: _plain(named) for name, named in policies.items()}
    settings = {"--hf-overrides": {"architectures": [known[architecture]]}, "--additional-config": {"taper": config}}
    words = [word for flag, data in settings.items() for word in (flag, json.dumps(data, separators=(",", ":")))]
    return [*words, "--enforce-eager"]


def _plain(policy: DepthPolicy) -> Any:
    """A policy as plain data without its provenance, and the path of its adapters' file; a PolicyError without one."""
    plain: dict[str, Any] = json.loads(replace(policy, provenance={}, adapters=None).to_json())
    if policy.adapters is None:
        return plain
    if not policy.adapters.file:
        raise PolicyError(f"the adapters of policy {policy.label} are in no file", "write them with save_policy")
    return plain | {"adapters": policy.adapters.file}
