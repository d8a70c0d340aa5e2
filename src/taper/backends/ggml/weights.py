"""The weights of a model as ggml tensors: where they lie in the mapped file, converted, or repacked."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import ggml
import numpy as np

from ...errors import QUANTISED_DTYPES, ModelError, RequestError, TaperWarning
from ...models.tensors import WEIGHT_TYPES, Tensor, row_bytes
from .repack import RepackedMatrices, release_pages
from .tensors import ALIGNMENT, TensorContext, aligned

LoadProgress = Callable[[float], None]  # called with the part of the weights that is loaded, 0 to 1

UNQUANTISED = ("F32", "F16", "BF16")
# What takes the place of a type whose blocks do not fit, as in llama-quantize; F16 where that does not fit either.
_FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}

CHUNK = 1 << 20  # weights converted at a time: 4 MB of f32 for each thread

# From this magnitude on, values become infinite: the values themselves, or the scale of a block, which is f16.
# IQ4_NL, Q4_K and Q6_K fit their scales to the block, so theirs are a little lower than need be.
_INFINITE = 65520.0  # in f16
_TOO_LARGE = {"F16": _INFINITE, "BF16": 3.3961775e38} | {
    dtype: factor * _INFINITE
    for dtype, factor in {"Q8_0": 127, "Q6_K": 4000, "Q5_0": 16, "Q4_K": 60, "IQ4_NL": 112, "Q4_0": 8}.items()
}


class Weights:
    """Tensors by our names. The role of a tensor, which is what it is used for, decides how it is stored.

    `quantization`: type of most matrices. `num_bytes`: of each tensor, as stored. `beyond_f16`: bf16 weights have
    values outside the range of f16, so activations may have such values too.

    Args:
        tensors: the model's weights.
        dtype: the type to convert matrices and tables to, one of `DTYPES`; None uses them as they are, but bf16 as
            f16, which is faster, if all values fit.
        repack: copy matrices into the layout that this processor multiplies fastest, if their type has one.
        threads: to convert and copy them with.
        progress: called with the part that is loaded.

    Raises:
        ModelError: a value that `dtype` cannot hold.
        RequestError: `dtype` would quantise weights that are quantised already.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: str | None,
        repack: bool = False,
        threads: int = 1,
        progress: LoadProgress | None = None,
    ) -> None:
        types, self.beyond_f16 = stored_types(tensors, dtype), False
        load = partial(self._load, tensors, repack=repack, threads=threads, progress=progress or (lambda part: None))
        try:
            load(types)
        except ModelError as error:
            if dtype is not None:
                raise
            self.beyond_f16 = True
            warnings.warn(f"{error.message}: running in bf16, which is slower", TaperWarning, stacklevel=2)
            types = stored_types(tensors, dtype, bf16="BF16")
            load(types)
        self.quantization = most_common(tensors, types)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.num_bytes = {name: math.prod(s[:-1]) * row_bytes(types[name], s[-1]) for name, s in shapes.items()}
        if dtype in QUANTISED_DTYPES and (message := fallbacks(tensors, dtype, types)):
            warnings.warn(message, TaperWarning, stacklevel=2)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def get(self, name: str) -> Any:
        """The tensor of a name; None if the model has none."""
        return self._tensors.get(name)

    def _load(
        self, tensors: dict[str, Tensor], types: dict[str, str], repack: bool, threads: int, progress: LoadProgress
    ) -> None:
        """Load tensor by tensor, so that converted weights are in memory twice only until they are repacked."""
        total, done = sum(math.prod(tensor.shape) for tensor in tensors.values()), 0

        def loaded(name: str) -> None:
            nonlocal done
            done += math.prod(tensors[name].shape)
            progress(done / total)

        with ThreadPoolExecutor(threads) as pool:

            def read(name: str) -> np.ndarray:
                return _as_type(name, tensors[name], types[name], pool)

            def release(name: str) -> None:
                release_pages(tensors[name].data)

            matrices = {name: (types[name], t.shape) for name, t in tensors.items() if role(name, t) == "matrix"}
            # Copied while the file is in memory: reading one later would bring back the pages around it.
            vectors = {name: read(name) for name, tensor in tensors.items() if len(tensor.shape) == 1}
            self._repacked = RepackedMatrices(matrices if repack else {}, read, release, loaded, threads)
            rest = {name: tensor.shape for name, tensor in tensors.items() if name not in self._repacked.tensors}
            self._context = TensorContext(len(rest))
            self._tensors = dict(self._repacked.tensors)
            for name, shape in rest.items():
                data = vectors[name] if name in vectors else read(name)
                self._tensors[name] = self._context.over(data, WEIGHT_TYPES[types[name]][0], shape)
                loaded(name)


def _as_type(name: str, tensor: Tensor, dtype: str, pool: Executor) -> np.ndarray:
    """The bytes of a tensor in a type: in place if it is an aligned matrix of that type, else a copy."""
    if dtype != tensor.dtype:
        try:
            data = convert(tensor, dtype, pool)
        except OutOfRangeError as error:
            message = f"tensor {name} has the value {error.args[0]:g}, which {dtype.lower()} cannot hold"
            raise ModelError(message, "leave out --dtype, or use --dtype f32") from None
        release_pages(tensor.data)
        return data
    if tensor.data.ctypes.data % ALIGNMENT == 0 and len(tensor.shape) > 1:
        return tensor.data
    data = aligned(len(tensor.data))
    data[:] = tensor.data
    return data


def role(name: str, tensor: Tensor) -> str:
    """What a tensor is used for: "matrix" (multiplied), "table" (rows are looked up) or "vector" (norms and biases;
    routers too, as they are small)."""
    if len(tensor.shape) == 1 or name.endswith(".router"):
        return "vector"
    return "table" if name == "embed_tokens" else "matrix"


def stored_types(tensors: dict[str, Tensor], dtype: str | None, bf16: str = "F16") -> dict[str, str]:
    """The type each tensor is used in.

    Args:
        tensors: the model's weights, by our names.
        dtype: the type of matrices and tables; None leaves them as they are, except for bf16.
        bf16: the type that replaces bf16 if `dtype` is None.

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
            types[name] = _fitting_type(_llama_quantize_type(name, tensors, dtype), tensor)
            if tensor.dtype not in (*UNQUANTISED, types[name]):
                raise RequestError(
                    f"dtype {dtype} is for f32, f16 and bf16 weights; {name} is {tensor.dtype.lower()} already, and "
                    "quantising twice adds a loss",
                    "leave out --dtype, or take the model's original weights",
                )
    return types


def fallbacks(tensors: dict[str, Tensor], dtype: str, types: dict[str, str]) -> str:
    """One line about matrices that do not run in the quantised type that was asked for; "" if there are none."""
    replaced = Counter(
        types[name].lower()
        for name, tensor in tensors.items()
        if role(name, tensor) != "vector" and _llama_quantize_type(name, tensors, dtype) == dtype.upper() != types[name]
    )
    if not replaced:
        return ""
    matrices = sum(role(name, tensor) != "vector" for name, tensor in tensors.items())
    instead = " and ".join(f"{count} run in {name}" for name, count in replaced.most_common())
    return f"rows of {replaced.total()} of {matrices} matrices do not divide into blocks of {dtype}: {instead}"


def most_common(tensors: dict[str, Tensor], types: dict[str, str]) -> str:
    """The type of most matrices and tables."""
    return Counter(types[name] for name, t in tensors.items() if role(name, t) != "vector").most_common(1)[0][0]


def _llama_quantize_type(name: str, tensors: dict[str, Tensor], dtype: str) -> str:
    """The type that llama-quantize would choose for a matrix of any width; the output head gets more bits."""
    makes_logits = name == ("lm_head" if "lm_head" in tensors else "embed_tokens")
    return "Q6_K" if makes_logits and dtype != "q8_0" else dtype.upper()


def _fitting_type(dtype: str, tensor: Tensor) -> str:
    """The type, or the one that replaces it if rows are not a whole number of its blocks."""
    for candidate in (dtype, _FALLBACKS.get(dtype, "F16")):
        if tensor.shape[-1] % _block(candidate) == 0:
            return candidate
    return "F16"


def _block(dtype: str) -> int:
    """Weights a block."""
    return WEIGHT_TYPES[dtype][1]


class OutOfRangeError(ValueError):
    """A value is outside the range of a type; the value is the only argument."""


def convert(tensor: Tensor, dtype: str, pool: Executor | None = None) -> np.ndarray:
    """The bytes of a tensor as another of ggml's types; uint8 [bytes], aligned.

    Args:
        tensor: the tensor.
        dtype: a name in `WEIGHT_TYPES` whose blocks fit the rows.
        pool: threads that share the rows; None converts on this one.

    Raises:
        OutOfRangeError: a value is outside the range of the type.
    """
    columns = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    width, source_width = row_bytes(dtype, columns), row_bytes(tensor.dtype, columns)
    target, source = aligned(rows * width), np.ascontiguousarray(tensor.data)
    step = max(1, CHUNK // columns)

    def convert_rows(first: int) -> None:
        count = min(step, rows - first)
        floats = _as_floats(source[first * source_width : (first + count) * source_width], tensor.dtype)
        _check_range(floats, _TOO_LARGE.get(dtype))
        pointer = floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        destination = target.ctypes.data + first * width
        ggml.ggml_quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, destination, 0, count, columns, None)

    for _ in (pool.map if pool else map)(convert_rows, range(0, rows, step)):
        pass
    return target


def _as_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """Whole blocks, uint8 [bytes], as float32 [weights]."""
    type_id, block, size = WEIGHT_TYPES[dtype]
    floats = np.empty(len(data) // size * block, np.float32)
    if dtype == "F32":
        floats.view(np.uint8)[:] = data
    else:
        to_float = ggml.ggml_get_type_traits(type_id).contents.to_float
        to_float(data.ctypes.data, floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(floats))
    return floats


def _check_range(values: np.ndarray, too_large: float | None) -> None:
    if too_large is not None:
        for value in (float(values.min()), float(values.max())):  # NaN, if there is one
            if not abs(value) < too_large:
                raise OutOfRangeError(value)
