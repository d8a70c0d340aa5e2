"""Scaled rotary embeddings: what config.json and GGUF headers say of them, as divisors of each pair's frequency."""

from __future__ import annotations

import math
from typing import Any

from ..checks import shown
from ..errors import ModelError
from .config import Rope

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def scaled_rope(parameters: dict[str, Any], theta: float, dim: int, interleaved: bool) -> Rope:
    """The embeddings that a `rope_parameters` (or `rope_scaling`) object describes.

    Args:
        parameters: the object; without a type, frequencies are not scaled.
        theta: the base of the frequencies.
        dim: values of a head that are rotated.
        interleaved: as in `Rope`.

    Raises:
        ModelError: a kind of scaling that is not supported, or numbers out of range.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ModelError(f"rope scaling {shown(kind)} is not supported", f"supported: {', '.join(_NEEDED)}")
    numbers = [parameters.get(key) for key in _NEEDED[kind]]
    if not all(isinstance(number, (int, float)) and 0 < number < 1e6 for number in numbers):
        raise ModelError(f"rope scaling {kind!r} needs positive numbers for {', '.join(_NEEDED[kind])}")
    if not (0 < theta < 1e12 and 2 <= dim <= 1024):
        raise ModelError(f"rope_theta is {theta} and {dim} dimensions of a head are rotated; no model has that")
    if kind == "linear":
        return Rope(theta, dim, interleaved, (float(parameters["factor"]),) * (dim // 2))
    return Rope(theta, dim, interleaved, _llama3_factors(parameters, theta, dim) if kind == "llama3" else None)


def _llama3_factors(parameters: dict[str, Any], theta: float, dim: int) -> tuple[float, ...]:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    original = parameters.get("original_max_position_embeddings", 8192)
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    if high == low or not isinstance(original, int):
        raise ModelError("rope scaling 'llama3' needs low_freq_factor below high_freq_factor")
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)
