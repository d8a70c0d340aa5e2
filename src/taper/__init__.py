"""Taper: language models that run fewer layers per token as the answer grows, without retraining."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ModelError, PolicyError, RequestError, TaperError, TaperWarning
    from .lab.calibration.run import Calibration, calibrate
    from .lab.healing.run import Healing, heal
    from .llm import LLM, Chunk, Output, Stream
    from .models.policies import load_policy, save_policy
    from .policy import DepthPolicy
    from .sampling import SamplingParams

_HOMES = {
    "LLM": "llm",
    "Calibration": "lab.calibration.run",
    "Chunk": "llm",
    "DepthPolicy": "policy",
    "Healing": "lab.healing.run",
    "ModelError": "errors",
    "Output": "llm",
    "PolicyError": "errors",
    "RequestError": "errors",
    "SamplingParams": "sampling",
    "Stream": "llm",
    "TaperError": "errors",
    "TaperWarning": "errors",
    "calibrate": "lab.calibration.run",
    "heal": "lab.healing.run",
    "load_policy": "models.policies",
    "save_policy": "models.policies",
}
__all__ = [
    "LLM",
    "Calibration",
    "Chunk",
    "DepthPolicy",
    "Healing",
    "ModelError",
    "Output",
    "PolicyError",
    "RequestError",
    "SamplingParams",
    "Stream",
    "TaperError",
    "TaperWarning",
    "calibrate",
    "heal",
    "load_policy",
    "save_policy",
]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import taper` and `taper --help` stay quick."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("taper-llm")
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
