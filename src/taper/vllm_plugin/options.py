"""What a server allows and what a request asks for. Knows nothing of vLLM: plain data in, policies out.

A server's options are `additional_config["taper"]`: `policy`, the default (a file, a policy's JSON object, or a name
of `policies`; without it every layer runs), and `policies`, further ones by name. A request's are flat scalars:
`taper_policy`, one of those names or "full", and `taper_alpha`, another decay for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import PolicyError, RequestError
from ..policy import DepthPolicy, load_policy

FULL, DEFAULT = "full", "default"
_KEYS = ("policy", "policies")
_REQUEST_KEYS = ("taper_policy", "taper_alpha")


class Options:
    """The policies that requests of one server may use.

    Args:
        default: the policy of a request that names none.
        named: every policy that may be named, "full" and "default" included.
    """

    def __init__(self, default: DepthPolicy, named: Mapping[str, DepthPolicy]) -> None:
        self.default = default
        self.named = dict(named)
        self._with_alpha = lru_cache(maxsize=256)(self._other_alpha)

    @classmethod
    def read(cls, config: object, num_hidden_layers: int) -> Options:
        """Options from `additional_config["taper"]`; policy files are read here.

        Raises:
            PolicyError: an unknown key, a name that is none, a policy that is none or has another number of layers.
        """
        config = {} if config is None else config
        if not isinstance(config, dict) or (unknown := sorted(set(config) - set(_KEYS))):
            wrong = f"has no key {unknown[0]!r}" if isinstance(config, dict) else f"is {config!r}"
            raise PolicyError(f'additional_config["taper"] {wrong}', f"an object with {' and '.join(_KEYS)}")
        policies = config.get("policies", {})
        if not isinstance(policies, dict):
            raise PolicyError(f'additional_config["taper"]["policies"] is {policies!r}', "an object: policies by name")
        named = {name: _policy(source) for name, source in policies.items()}
        if FULL in named:
            raise PolicyError(f"the name {FULL!r} is taken: every layer", "choose another name")
        named[FULL] = DepthPolicy.full(num_hidden_layers)
        source = config.get("policy", FULL)
        default = named[source] if isinstance(source, str) and source in named else _policy(source)
        named.setdefault(DEFAULT, default)
        for policy in named.values():
            policy.check_model(num_hidden_layers, None)
        return cls(default, named)

    def to_config(self) -> dict[str, Any]:
        """The same as plain data with no file names: what `read` gives equal options from."""
        policies = {name: json.loads(policy.to_json()) for name, policy in self.named.items() if name != FULL}
        return {"policy": json.loads(self.default.to_json()), "policies": policies}

    def policy(self, extra_args: Mapping[str, Any] | None) -> DepthPolicy:
        """The policy of a request, the same object each time.

        Raises:
            RequestError: an unknown name or key, or an alpha that its policy cannot have.
        """
        if not extra_args:
            return self.default
        name, alpha = extra_args.get("taper_policy"), extra_args.get("taper_alpha")
        for key in extra_args:
            if key.startswith("taper_") and key not in _REQUEST_KEYS:
                raise RequestError(f"unknown argument {key!r}", f"there are {' and '.join(_REQUEST_KEYS)}")
        if name is not None and (not isinstance(name, str) or name not in self.named):
            raise RequestError(
                f"taper_policy is {name!r}, which this server does not have", f"it has {', '.join(sorted(self.named))}"
            )
        if alpha is None:
            return self.default if name is None else self.named[name]
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise RequestError(f"taper_alpha is {alpha!r}", "a number in (0, 1]")
        try:
            return self._with_alpha(name, float(alpha))
        except PolicyError as error:
            raise RequestError(f"taper_alpha: {error.message}", error.hint) from None

    def _other_alpha(self, name: str | None, alpha: float) -> DepthPolicy:
        return (self.default if name is None else self.named[name]).with_alpha(alpha)


def _policy(source: object) -> DepthPolicy:
    """A policy from its JSON object, or from the path of a file."""
    if isinstance(source, dict):
        return DepthPolicy.from_json(json.dumps(source))
    if isinstance(source, str):
        return load_policy(source)
    raise PolicyError(f"a policy is {source!r}", "the path of a policy file, or its JSON object")
