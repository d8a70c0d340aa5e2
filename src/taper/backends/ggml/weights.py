"""The weights of a model as ggml tensors: where they lie in the mapped file, converted, or repacked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ...checks import QUANTISED_DTYPES
from ...errors import ModelError, TaperWarning
from ...loading import Tensor
from ...loading.model import WEIGHT_TYPES, row_bytes
from .convert import OutOfRangeError, convert
from .repack import RepackedMatrices, give_back
from .tensors import ALIGNMENT, TensorContext, aligned
from .types import fallbacks, most_common, role, stored_types

ReportProgress = Callable[[float], None]  # told what part is loaded, 0 to 1


class Weights:
    """Tensors by our names. What a tensor is used for, its role, decides how it is stored.

    `quantization`: type of most matrices. `num_bytes`: of each tensor, as stored. `beyond_f16`: bf16 weights have
    values that f16 does not, and what is computed from them will too.

    Args:
        tensors: the model's weights.
        dtype: what to convert matrices and tables to, one of `DTYPES`; None uses them as they are, but bf16 as f16,
            which is quicker, if all values fit.
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
        progress: ReportProgress | None = None,
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
        self, tensors: dict[str, Tensor], types: dict[str, str], repack: bool, threads: int, progress: ReportProgress
    ) -> None:
        """Tensor by tensor, so that what is converted is in memory once more only until it is repacked."""
        total, done = sum(math.prod(tensor.shape) for tensor in tensors.values()), 0

        def loaded(name: str) -> None:
            nonlocal done
            done += math.prod(tensors[name].shape)
            progress(done / total)

        with ThreadPoolExecutor(threads) as pool:

            def read(name: str) -> np.ndarray:
                return _as_type(name, tensors[name], types[name], pool)

            def let_go(name: str) -> None:
                give_back(tensors[name].data)

            matrices = {name: (types[name], t.shape) for name, t in tensors.items() if role(name, t) == "matrix"}
            # Copies, made while the file is in memory: a touch of one would bring back what lies around it.
            vectors = {name: read(name) for name, tensor in tensors.items() if len(tensor.shape) == 1}
            self._repacked = RepackedMatrices(matrices if repack else {}, read, let_go, loaded, threads)
            rest = {name: tensor.shape for name, tensor in tensors.items() if name not in self._repacked.tensors}
            self._context = TensorContext(len(rest))
            self._tensors = dict(self._repacked.tensors)
            for name, shape in rest.items():
                data = vectors[name] if name in vectors else read(name)
                self._tensors[name] = self._context.over(data, WEIGHT_TYPES[types[name]][0], shape)
                loaded(name)


def _as_type(name: str, tensor: Tensor, dtype: str, pool: Executor) -> np.ndarray:
    """The bytes of a tensor as a type: where they lie, if it is a matrix of that type and aligned; else a copy."""
    if dtype != tensor.dtype:
        try:
            data = convert(tensor, dtype, pool)
        except OutOfRangeError as error:
            message = f"tensor {name} has the value {error.args[0]:g}, which {dtype.lower()} cannot hold"
            raise ModelError(message, "leave out --dtype, or use --dtype f32") from None
        give_back(tensor.data)
        return data
    if tensor.data.ctypes.data % ALIGNMENT == 0 and len(tensor.shape) > 1:
        return tensor.data
    data = aligned(len(tensor.data))
    data[:] = tensor.data
    return data
