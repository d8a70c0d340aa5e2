"""Scaled rotary embeddings: what config.json and GGUF headers say of them, as divisors of each pair's frequency."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..checks import shown
from ..errors import ModelError
from .config import Rope

_LONG = ("short_factor", "long_factor")


def scaled_rope(parameters: dict[str, Any], theta: float, dim: int, interleaved: bool, max_positions: int) -> Rope:
    """The embeddings that a `rope_parameters` (or `rope_scaling`) object describes.

    Args:
        parameters: the object; without a type, frequencies are not scaled.
        theta: the base of the frequencies.
        dim: values of a head that are rotated.
        interleaved: as in `Rope`.
        max_positions: the longest context, `max_position_embeddings`.

    Raises:
        ModelError: a kind of scaling that is not supported, or numbers out of range.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(f"rope scaling {shown(kind)} is not supported", f"supported: {', '.join(_KINDS)}")
    needed, scaled = _KINDS[kind]
    if not all(_positive(parameters.get(key)) for key in needed):
        raise ModelError(f"rope scaling {kind!r} needs positive numbers for {', '.join(needed)}")
    if not (0 < theta < 1e12 and 2 <= dim <= 1024):
        raise ModelError(f"rope_theta is {theta} and {dim} dimensions of a head are rotated; no model has that")
    parameters = {"original_max_position_embeddings": max_positions} | parameters | {"max_positions": max_positions}
    original = parameters["original_max_position_embeddings"]
    if type(original) is not int or not 2 <= original <= 1 << 30:
        raise ModelError(f"original_max_position_embeddings is {shown(original)}; it must be a whole number above 1")
    return Rope(theta, dim, interleaved, **scaled(parameters, theta, dim))


def _positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and 0 < number < 1e6


def _default(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    return {}


def _linear(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    return {"factors": (float(parameters["factor"]),) * (dim // 2)}


def _llama3(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    original = parameters["original_max_position_embeddings"]
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    if high == low:
        raise ModelError("rope scaling 'llama3' needs low_freq_factor below high_freq_factor")
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return {"factors": tuple(factors)}


def _yarn(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Pairs that turn often are kept, those that turn seldom divided by `factor` (YaRN, arXiv 2309.00071)."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    fast, slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(1.0, max(0.0, (pair - low) / ((high - low) or 0.001))) for pair in range(dim // 2)]
    attention = parameters.get("attention_factor")
    if attention is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        above, below = (above, below) if above and below else (1.0, 0.0)
        attention = _yarn_scale(factor, above) / _yarn_scale(factor, below)
    return {"factors": tuple(1.0 / (part / factor + 1.0 - part) for part in ramp), "attention_factor": float(attention)}


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Two tables of divisors, found by search (LongRoPE, arXiv 2402.13753)."""
    tables = []
    for key in _LONG:
        table = parameters.get(key)
        if not isinstance(table, list) or not all(map(_positive, table)):
            raise ModelError(f"rope scaling 'longrope' needs lists of positive numbers for {', '.join(_LONG)}")
        tables.append(tuple(map(float, table)))
    original, attention = parameters["original_max_position_embeddings"], parameters.get("attention_factor")
    factor = parameters.get("factor") or parameters["max_positions"] / original
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = tables
    return {
        "factors": short,
        "long_factors": long,
        "original_context": original,
        "attention_factor": float(attention),
    }


_Scaled = Callable[[dict[str, Any], float, int], dict[str, Any]]
# Numbers that each kind needs, and what it makes of them.
_KINDS: dict[str, tuple[tuple[str, ...], _Scaled]] = {
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (("factor",), _yarn),
    "longrope": ((), _longrope),
}
