"""Taper: language models that run fewer layers per token as the output grows, without retraining."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ModelError, PolicyError, RequestError, TaperError, TaperWarning
    from .lab.calibration.run import Calibration, calibrate
    from .lab.healing.run import heal
    from .lab.healing.summary import Healing
    from .llm import LLM
    from .models.policies import load_policy, save_policy
    from .policy import DepthPolicy
    from .sampling import SamplingParams
    from .stream import Chunk, Output, Stream

_NAMES = {  # of each module
    "errors": ("ModelError", "PolicyError", "RequestError", "TaperError", "TaperWarning"),
    "lab.calibration.run": ("Calibration", "calibrate"),
    "lab.healing.run": ("heal",),
    "lab.healing.summary": ("Healing",),
    "llm": ("LLM",),
    "models.policies": ("load_policy", "save_policy"),
    "policy": ("DepthPolicy",),
    "sampling": ("SamplingParams",),
    "stream": ("Chunk", "Output", "Stream"),
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
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
