"""Which of ggml's types each tensor is stored in: as it is in the file, converted, or quantised as llama-quantize does.

Knows shapes and names of types, and no values.
"""

from __future__ import annotations

from collections import Counter

from ...checks import QUANTISED_DTYPES
from ...errors import RequestError
from ...loading import Tensor
from ...loading.model import WEIGHT_TYPES

UNQUANTISED = ("F32", "F16", "BF16")
# What takes the place of a type whose blocks do not fit, as in llama-quantize; F16 where that does not fit either.
_FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def role(name: str, tensor: Tensor) -> str:
    """What a tensor is used for: "matrix" (multiplied), "table" (rows are looked up) or "vector" (norms, biases, and
    routers, which are as small)."""
    if len(tensor.shape) == 1 or name.endswith(".router"):
        return "vector"
    return "table" if name == "embed_tokens" else "matrix"


def stored_types(tensors: dict[str, Tensor], dtype: str | None, bf16: str = "F16") -> dict[str, str]:
    """The type each tensor is used in.

    Args:
        tensors: the model's weights, by our names.
        dtype: what matrices and tables become; None leaves them as they are, but for bf16.
        bf16: what becomes of bf16 where `dtype` is None.

    Raises:
        RequestError: `dtype` would quantise weights that are quantised already.
    """
    # Norms and biases are used in f32 by ggml's element-wise operations.
    types = {name: "F32" for name, tensor in tensors.items() if role(name, tensor) == "vector"}
    for name, tensor in tensors.items():
        if name in types:
            continue
        if dtype is None:
            types[name] = tensor.dtype.replace("BF16", bf16)
        elif dtype not in QUANTISED_DTYPES:
            types[name] = dtype.upper()
        elif tensor.dtype == dtype.upper():
            types[name] = tensor.dtype
        else:
            types[name] = _that_fits(_asked(name, tensors, dtype), tensor)
            if tensor.dtype not in (*UNQUANTISED, types[name]):
                raise RequestError(
                    f"dtype {dtype} is for f32, f16 and bf16 weights; {name} is {tensor.dtype.lower()} already, and "
                    "quantising twice adds a loss",
                    "leave out --dtype, or take the model's original weights",
                )
    return types


def fallbacks(tensors: dict[str, Tensor], dtype: str, types: dict[str, str]) -> str:
    """Which matrices do not run in the quantised type that was asked for, one line; "" if all do that should."""
    replaced = Counter(
        types[name].lower()
        for name, tensor in tensors.items()
        if role(name, tensor) != "vector" and _asked(name, tensors, dtype) == dtype.upper() != types[name]
    )
    if not replaced:
        return ""
    matrices = sum(role(name, tensor) != "vector" for name, tensor in tensors.items())
    instead = " and ".join(f"{count} run in {name}" for name, count in replaced.most_common())
    return f"rows of {replaced.total()} of {matrices} matrices do not divide into blocks of {dtype}: {instead}"


def most_common(tensors: dict[str, Tensor], types: dict[str, str]) -> str:
    """The type of most matrices and tables."""
    return Counter(types[name] for name, t in tensors.items() if role(name, t) != "vector").most_common(1)[0][0]


def _asked(name: str, tensors: dict[str, Tensor], dtype: str) -> str:
    """The type that llama-quantize would choose for a matrix of any width: more bits for the one that makes logits."""
    makes_logits = name == ("lm_head" if "lm_head" in tensors else "embed_tokens")
    return "Q6_K" if makes_logits and dtype != "q8_0" else dtype.upper()


def _that_fits(dtype: str, tensor: Tensor) -> str:
    """The type, or what takes its place where rows are not a whole number of its blocks."""
    for candidate in (dtype, _FALLBACKS.get(dtype, "F16")):
        if tensor.shape[-1] % _block(candidate) == 0:
            return candidate
    return "F16"


def _block(dtype: str) -> int:
    """Weights a block."""
    return WEIGHT_TYPES[dtype][1]
