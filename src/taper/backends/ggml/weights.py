"""The weights of a model as ggml tensors: where they lie in the mapped file, converted, or repacked."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np

from ...adapters import Adapters
from ...errors import QUANTISED_DTYPES, ModelError, RequestError, TaperWarning
from ...models.tensors import WEIGHT_TYPES, Tensor, row_bytes
from .layouts import layouts_for_many, num_bytes
from .library import ggml
from .repack import CopiedTensors, release_pages
from .tensors import ALIGNMENT, TensorContext, aligned

LoadProgress = Callable[[float], None]  # called with the part of the weights that is loaded, 0 to 1

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
    """Tensors by our names.

    `quantization`: type of most matrices. `num_bytes`: of each tensor, as stored. `beyond_f16`: bf16 weights have
    values outside the range of f16, so activations may have such values too. `head`: the name of the output head's
    matrix; `head_type` and `head_rows`, uint8 [vocab_size, bytes of a row]: the same as it lies in the file or was
    converted. `layouts`: how matrices lie in memory, in words.

    Args:
        tensors: the model's weights.
        dtype: the type to convert matrices to, one of `DTYPES`; None uses them as they are, but bf16 as f16, which is
            faster, if all values fit.
        repack: one of `REPACK`, as `LLM` explains; a second layout takes at most half of the memory that is free.
        threads: those that compute; they also convert and copy.
        progress: called with the part that is loaded.
        buffer_type: of the device that holds them; then `repack` says nothing.

    Raises:
        ModelError: a value that `dtype` cannot hold, or a device has not enough memory.
        RequestError: `dtype` would quantise weights that are quantised already.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: str | None,
        repack: str = "never",
        threads: int = 1,
        progress: LoadProgress | None = None,
        buffer_type: Any = None,
    ) -> None:
        self.head, self._buffer_type = _head(tensors), buffer_type
        types, self.beyond_f16 = stored_types(tensors, dtype), False
        try:
            self._load(tensors, types, repack, threads, progress)
        except ModelError as error:
            if dtype is not None:
                raise
            self.beyond_f16 = True
            warnings.warn(f"{error.message}: running in bf16, which is slower", TaperWarning, stacklevel=2)
            types = stored_types(tensors, dtype, bf16="BF16")
            self._load(tensors, types, repack, threads, progress)
        matrices = {name: types[name] for name, tensor in tensors.items() if not _is_vector(name, tensor)}
        self.quantization = Counter(matrices.values()).most_common(1)[0][0]
        self.num_bytes = {name: num_bytes(types[name], tensor.shape) for name, tensor in tensors.items()}
        if dtype in QUANTISED_DTYPES:
            _warn_of_fallbacks(dtype, matrices)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def get(self, name: str) -> Any:
        """The tensor of a name; None if the model has none."""
        return self._tensors.get(name)

    def matrix(self, name: str, tokens: int) -> Any:
        """A matrix in the layout that this many tokens are multiplied with."""
        first, tensor = self._for_many.get(name, (math.inf, None))
        return self._tensors[name] if tokens < first else tensor

    def floats_of_head(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the head by index, int64 [n], as float32 [n, hidden_size]."""
        rows = as_floats(np.ascontiguousarray(self.head_rows[ids]).reshape(-1), self.head_type)
        return rows.reshape(len(ids), -1)

    def _load(
        self,
        tensors: dict[str, Tensor],
        types: dict[str, str],
        repack: str,
        threads: int,
        progress: LoadProgress | None,
    ) -> None:
        """Load tensor by tensor, so that converted weights are in memory twice only until they are repacked."""
        total, done = sum(math.prod(tensor.shape) for tensor in tensors.values()), 0
        shapes = {name: t.shape for name, t in tensors.items() if not _is_vector(name, t)}
        # Matrices of three dimensions are experts, which get few tokens each.
        eligible = {n: s for n, s in shapes.items() if len(s) == 2 and (n == self.head or n != "embed_tokens")}
        on_device = self._buffer_type is not None
        second, self.layouts = layouts_for_many(eligible if repack == "auto" and not on_device else {}, types, threads)
        kept: dict[str, np.ndarray] = {}  # what second layouts are made of

        def loaded(name: str) -> None:
            nonlocal done
            done += math.prod(tensors[name].shape)
            if progress is not None:
                progress(done / total)

        with ThreadPoolExecutor(threads) as pool:

            def read(name: str) -> np.ndarray:
                data = _as_type(name, tensors[name], types[name], pool)
                if name == self.head:
                    self.head_type, self.head_rows = types[name], data.reshape(shapes[name][0], -1)
                if name in second:
                    kept[name] = data
                return data

            # Copied while the file is in memory: reading one later would bring back the pages around it.
            vectors = {name: read(name) for name, tensor in tensors.items() if len(tensor.shape) == 1 and not on_device}
            # Neither the embeddings nor the matrices that each head has of its own are multiplied in another layout.
            plain = ("embed_tokens", "latent_queries", "latent_values")
            multiplied = {name: tensors[name] for name in shapes if not name.endswith(plain) and repack != "never"}
            copied = tensors if on_device else multiplied
            self._copied = CopiedTensors(copied, types, read, loaded, threads, second, self._buffer_type)
            self._tensors = dict(self._copied.tensors)
            rest = [name for name in tensors if name not in self._tensors]
            self._context = TensorContext(len(rest) + len(second))
            for name in rest:
                data = vectors[name] if name in vectors else read(name)
                self._tensors[name] = self._context.over(data, WEIGHT_TYPES[types[name]][0], tensors[name].shape)
                loaded(name)

            def for_many(name: str) -> np.ndarray:
                if second[name].dtype == types[name]:
                    return kept[name]
                return convert(Tensor(types[name], shapes[name], kept[name]), second[name].dtype)

            self._for_many = {}
            for (name, (dtype, tokens)), data in zip(second.items(), pool.map(for_many, second), strict=True):
                self._for_many[name] = tokens, self._context.over(data, WEIGHT_TYPES[dtype][0], shapes[name])


def _as_type(name: str, tensor: Tensor, dtype: str, pool: Executor) -> np.ndarray:
    """The bytes of a tensor in a type: in place if it is an aligned matrix of that type, else a copy."""
    if dtype != tensor.dtype:
        try:
            data = convert(tensor, dtype, pool)
        except OverflowError as error:
            message = f"tensor {name} has the value {error.args[0]:g}, which {dtype.lower()} cannot hold"
            raise ModelError(message, "leave out --dtype, or use --dtype f32") from None
        release_pages(tensor.data)
        return data
    if tensor.data.ctypes.data % ALIGNMENT == 0 and len(tensor.shape) > 1:
        return tensor.data
    data = aligned(len(tensor.data))
    data[:] = tensor.data
    return data


def _is_vector(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a norm or bias, or as small as these. ggml's operations on them take f32."""
    return len(tensor.shape) == 1 or name.endswith((".router", ".stream_router", "_bias", "_coefs", ".conv"))


def stored_types(tensors: dict[str, Tensor], dtype: str | None, bf16: str = "F16") -> dict[str, str]:
    """The type in which each tensor is used, by our names.

    `dtype` is that of matrices; None leaves them as they are, except that those in BF16 are used as `bf16`.

    Raises:
        RequestError: `dtype` would quantise weights that are quantised already.
    """
    types = {}
    for name, tensor in tensors.items():
        if _is_vector(name, tensor):
            types[name] = "F32"
        elif dtype is None:
            types[name] = tensor.dtype.replace("BF16", bf16)
        elif dtype not in QUANTISED_DTYPES or tensor.dtype == dtype.upper():
            types[name] = dtype.upper()
        else:
            asked = _llama_quantize_type(name, tensors, dtype)
            candidates = (asked, _FALLBACKS.get(asked, "F16"), "F16")
            types[name] = next(fit for fit in candidates if tensor.shape[-1] % WEIGHT_TYPES[fit][1] == 0)
            if tensor.dtype not in ("F32", "F16", "BF16", types[name]):
                raise RequestError(
                    f"dtype {dtype} is for f32, f16 and bf16 weights; {name} is {tensor.dtype.lower()} already, and "
                    "quantising twice adds a loss",
                    "leave out --dtype, or take the model's original weights",
                )
    return types


def _llama_quantize_type(name: str, names: Collection[str], dtype: str) -> str:
    """The type that llama-quantize would choose for a matrix of any width; the output head gets more bits."""
    return "Q6_K" if name == _head(names) and dtype != "q8_0" else dtype.upper()


def _head(names: Collection[str]) -> str:
    """The name of the output head's matrix."""
    return "lm_head" if "lm_head" in names else "embed_tokens"


def _warn_of_fallbacks(dtype: str, matrices: dict[str, str]) -> None:
    """Say how many matrices do not run in the quantised type that was asked for, given the types they run in."""
    replaced = Counter(
        stored.lower()
        for name, stored in matrices.items()
        if _llama_quantize_type(name, matrices, dtype) == dtype.upper() != stored
    )
    if replaced:
        rows = f"rows of {replaced.total()} of {len(matrices)} matrices"
        instead = " and ".join(f"{count} run in {name}" for name, count in replaced.most_common())
        warnings.warn(f"{rows} do not divide into blocks of {dtype}: {instead}", TaperWarning, stacklevel=3)


class AdapterTensors(dict[int, tuple[Any, Any]]):
    """The two matrices of each adapter, by layer: in f32 if `exact`, else in q8_0 where its blocks fit."""

    def __init__(self, adapters: Adapters, exact: bool, buffer_type: Any = None) -> None:
        self._context = TensorContext(2 * len(adapters.layers), buffer_type=buffer_type)
        for layer, (down, up) in adapters.layers.items():
            self[layer] = self._matrix(down, exact), self._matrix(up, exact)

    def _matrix(self, matrix: np.ndarray, exact: bool) -> Any:
        dtype = "F32" if exact else "F16" if matrix.shape[1] % WEIGHT_TYPES["Q8_0"][1] else "Q8_0"
        data = convert(Tensor("F16", matrix.shape, np.ascontiguousarray(matrix).reshape(-1).view(np.uint8)), dtype)
        return self._context.over(data, WEIGHT_TYPES[dtype][0], matrix.shape)


def convert(tensor: Tensor, dtype: str, pool: Executor | None = None) -> np.ndarray:
    """The bytes of a tensor as another of ggml's types, whose blocks must fit the rows: uint8 [bytes], aligned.

    The threads of `pool` share the rows; None converts on this one.

    Raises:
        OverflowError: a value, which is its argument, is outside the range of the type.
    """
    columns, rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
    width, source_width = row_bytes(dtype, columns), row_bytes(tensor.dtype, columns)
    target, source = aligned(rows * width), np.ascontiguousarray(tensor.data)
    step = max(1, CHUNK // columns)

    def convert_rows(first: int) -> None:
        count = min(step, rows - first)
        floats = as_floats(source[first * source_width : (first + count) * source_width], tensor.dtype)
        if dtype in _TOO_LARGE:
            for value in (float(floats.min()), float(floats.max())):  # NaN, if there is one
                if not abs(value) < _TOO_LARGE[dtype]:
                    raise OverflowError(value)
        pointer = floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        destination = target.ctypes.data + first * width
        ggml.quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, destination, 0, count, columns, None)

    for _ in (pool.map if pool else map)(convert_rows, range(0, rows, step)):
        pass
    return target


def as_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """Whole blocks, uint8 [bytes], as float32 [weights]."""
    if dtype == "F32":
        return np.frombuffer(data.tobytes(), np.float32)
    type_id, block, size = WEIGHT_TYPES[dtype]
    floats = np.empty(len(data) // size * block, np.float32)
    to_float = ggml.get_type_traits(type_id).contents.to_float
    to_float(data.ctypes.data, floats.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(floats))
    return floats
