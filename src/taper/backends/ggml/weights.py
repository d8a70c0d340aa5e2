"""The weights of a model as ggml tensors: where they lie in the mapped file, or converted."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import ggml
import numpy as np

from ...errors import ModelError, TaperWarning
from ...loading import Tensor
from ...loading.model import WEIGHT_TYPES, row_bytes
from .repack import RepackedMatrices
from .tensors import ALIGNMENT, TensorContext, aligned

# From this size on, values become infinite: those of f16 and bf16, and of q8_0 whose block scale is f16.
_TOO_LARGE = {"F16": 65520.0, "BF16": 3.3961775e38, "Q8_0": 127 * 65520.0}


class Weights:
    """Tensors by our names. What a tensor is used for, its role, decides how it is stored.

    `beyond_f16`: bf16 weights have values that f16 does not, and what is computed from them will too.
    `num_bytes`: of each tensor, as stored.

    Args:
        tensors: the model's weights.
        dtype: "f32", "f16", "bf16" or "q8_0" to convert matrices and tables; None uses them as they are, but bf16 as
            f16, which is quicker, if all values fit.
        repack: copy matrices into the layout that this processor multiplies fastest, if their type has one.
        threads: to copy them with.

    Raises:
        ModelError: a value that `dtype` cannot hold.
    """

    def __init__(self, tensors: dict[str, Tensor], dtype: str | None, repack: bool = False, threads: int = 1) -> None:
        self.beyond_f16 = False
        try:
            stored = _as_stored(tensors, dtype, bf16="F16")
        except ModelError as error:
            if dtype is not None:
                raise
            self.beyond_f16 = True
            warnings.warn(f"{error.message}: running in bf16, which is slower", TaperWarning, stacklevel=2)
            stored = _as_stored(tensors, dtype, bf16="BF16")
        self.num_bytes = {name: tensor.data.nbytes for name, tensor in stored.items()}
        matrices = {name: tensor for name, tensor in stored.items() if role(name, tensor) == "matrix"}
        self._repacked = RepackedMatrices(matrices if repack else {}, threads)
        self._context = TensorContext(len(stored))
        self._tensors = self._repacked.tensors | {
            name: self._context.over(tensor.data, WEIGHT_TYPES[tensor.dtype][0], tensor.shape)
            for name, tensor in stored.items()
            if name not in self._repacked.tensors
        }

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def get(self, name: str) -> Any:
        """The tensor of a name; None if the model has none."""
        return self._tensors.get(name)


class OutOfRangeError(ValueError):
    """A value that a type cannot hold; it is the only argument."""


def role(name: str, tensor: Tensor) -> str:
    """What a tensor is used for: "matrix" (multiplied), "table" (rows are looked up) or "vector" (norms, biases)."""
    if len(tensor.shape) == 1:
        return "vector"
    return "table" if name == "embed_tokens" else "matrix"


def _as_stored(tensors: dict[str, Tensor], dtype: str | None, bf16: str) -> dict[str, Tensor]:
    """Tensors in the types in which they are used; `bf16` is what becomes of that type if no other is asked for."""
    stored = {}
    for name, tensor in tensors.items():
        target = (dtype or tensor.dtype.replace("BF16", bf16)).upper()
        if role(name, tensor) == "vector":
            target = "F32"  # norms and biases are used in f32 by ggml's element-wise operations
        elif target == "Q8_0" and tensor.shape[-1] % 32:
            target = "F16"
        try:
            stored[name] = Tensor(target, tensor.shape, _as_type(tensor, target))
        except OutOfRangeError as error:
            message = f"tensor {name} has the value {error.args[0]:g}, which {target.lower()} cannot hold"
            raise ModelError(message, "leave out --dtype, or use --dtype f32") from None
    return stored


def _as_type(tensor: Tensor, dtype: str) -> np.ndarray:
    """The bytes of a tensor as a type: where they lie, if they are of that type and aligned."""
    if dtype != tensor.dtype:
        return convert(tensor, dtype)
    if tensor.data.ctypes.data % ALIGNMENT == 0:
        return tensor.data
    data = aligned(len(tensor.data))
    data[:] = tensor.data
    return data


def convert(tensor: Tensor, dtype: str) -> np.ndarray:
    """The bytes of a tensor as another of ggml's types, by way of f32; uint8 [bytes], aligned.

    Raises:
        OutOfRangeError: a value that the type cannot hold.
    """
    columns = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    target, width = aligned(rows * row_bytes(dtype, columns)), row_bytes(dtype, columns)
    source, source_width = np.ascontiguousarray(tensor.data), row_bytes(tensor.dtype, columns)
    to_float = ggml.ggml_get_type_traits(WEIGHT_TYPES[tensor.dtype][0]).contents.to_float
    step = max(1, (1 << 22) // columns)  # rows at a time: 16 MB of f32
    floats = np.empty(min(step, rows) * columns, np.float32)
    pointer = floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        start = source[first * source_width : (first + count) * source_width]
        if tensor.dtype == "F32":
            floats[: count * columns] = start.view(np.float32)
        else:
            to_float(start.ctypes.data, pointer, count * columns)
        _check_range(floats[: count * columns], _TOO_LARGE.get(dtype))
        destination = target.ctypes.data + first * width
        ggml.ggml_quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, destination, 0, count, columns, None)
    return target


def _check_range(values: np.ndarray, too_large: float | None) -> None:
    if too_large is not None:
        for value in (float(values.min()), float(values.max())):  # NaN, if there is one
            if not abs(value) < too_large:
                raise OutOfRangeError(value)
