"""Taper: language models that run fewer layers per token as the answer grows, without retraining."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibration.run import Calibration, calibrate
    from .errors import TaperError, TaperWarning
    from .healing.run import Healing, heal
    from .llm import LLM, Output
    from .policy import DepthPolicy
    from .sampling import SamplingParams

__all__ = [
    "LLM",
    "Calibration",
    "DepthPolicy",
    "Healing",
    "Output",
    "SamplingParams",
    "TaperError",
    "TaperWarning",
    "calibrate",
    "heal",
]

_HOMES = {
    "LLM": "llm",
    "Output": "llm",
    "Calibration": "calibration.run",
    "calibrate": "calibration.run",
    "Healing": "healing.run",
    "heal": "healing.run",
    "DepthPolicy": "policy",
    "SamplingParams": "sampling",
    "TaperError": "errors",
    "TaperWarning": "errors",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import taper` and `taper --help` stay quick."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("taper-llm")
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
