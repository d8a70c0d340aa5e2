"""Weights as PyTorch's tensors, and the devices that they may be on."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ModelError, RequestError
from ...loading import Tensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def check_device(device: str) -> None:
    """Check that PyTorch has a device.

    Raises:
        RequestError: it has not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("PyTorch finds no CUDA device", "use --device cpu, or install a CUDA build of PyTorch")


def to_torch(tensor: Tensor | torch.Tensor) -> torch.Tensor:
    """A tensor of ours on the CPU, dequantised; PyTorch's own as it is.

    Raises:
        ModelError: it is quantised, and there is nothing to dequantise it with.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor
    if (stored := DTYPES.get(tensor.dtype.lower())) is not None:
        return torch.from_numpy(tensor.data.copy()).view(stored).reshape(tensor.shape)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError("quantised weights need the gguf package here", 'pip install "taper-llm[torch]"') from None
    rows = tensor.data.reshape(-1, tensor.data.size // int(np.prod(tensor.shape[:-1])))
    try:
        floats = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.dtype])
    except NotImplementedError:
        raise ModelError(f"{tensor.dtype} weights do not run on this device", "use --device cpu") from None
    return torch.from_numpy(floats.reshape(tensor.shape))
