"""The experts of gpt-oss folders, brought into the layout of all others: gates, ups and downs as rows of matrices.

Folders hold gates and ups in turn. Weights in MXFP4 (OCP Microscaling Formats 1.0) are blocks of 32 along rows and
their scales, in two tensors; others lie in columns.
"""

from __future__ import annotations

import numpy as np

from ..errors import ModelError
from .files import Settings
from .tensors import WEIGHT_TYPES, Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BOTH, _HALVES = "gate_up_proj", ("gate_proj", "up_proj")
_STORED = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def rearranged(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The tensors of a folder by its names, in which `gate_proj` and `up_proj` take the place of `gate_up_proj`.

    Raises:
        ModelError: blocks and scales, or their shapes, do not fit together.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name or name.endswith(_SCALES):
            result |= {} if name.removesuffix(_SCALES) + _BLOCKS in tensors else {name: tensor}
            continue
        if name.endswith(_BLOCKS):
            name = name.removesuffix(_BLOCKS)
            rows, dtype = _mxfp4(name, tensor, tensors.get(name + _SCALES)), "MXFP4"
        elif tensor.dtype in _STORED:
            rows, dtype = tensor.data.view(_STORED[tensor.dtype]).reshape(tensor.shape), tensor.dtype
            rows = rows.swapaxes(1, -1) if rows.ndim == 3 else rows
        else:
            raise ModelError(f"tensor {name} is of type {tensor.dtype}", "only blocks and scales may be")
        if not 2 <= rows.ndim <= 3:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}", "experts have two or three dimensions")
        parts = {name: rows}
        if _BOTH in name:
            parts = {name.replace(_BOTH, half): rows[:, first::2] for first, half in enumerate(_HALVES)}
        result |= {part: _as_tensor(dtype, values) for part, values in parts.items()}
    return result


def _as_tensor(dtype: str, rows: np.ndarray) -> Tensor:
    _, block, size = WEIGHT_TYPES[dtype]
    shape = (*rows.shape[:-1], rows.shape[-1] * rows.itemsize // size * block)
    return Tensor(dtype, shape, np.ascontiguousarray(rows).reshape(-1).view(np.uint8))


def _mxfp4(name: str, blocks: Tensor, scales: Tensor | None) -> np.ndarray:
    """Rows in ggml's layout, uint8 [experts, rows, bytes].

    A block of a folder is 16 bytes of two neighbours each, the first in the lower half. One of ggml is the scale, and
    16 bytes of which each has one of the first 16 values in its lower half and one of the others in its upper half.
    """
    if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or blocks.shape != (*scales.shape, 16):
        raise ModelError(f"the blocks and scales of {name} do not fit together", "the file is damaged")
    first, second = np.split(blocks.data.reshape(blocks.shape), 2, axis=-1)
    rows = np.empty((*scales.shape, 17), np.uint8)
    rows[..., 0] = scales.data.reshape(scales.shape)
    rows[..., 1::2] = first & 15 | second << 4
    rows[..., 2::2] = first >> 4 | second & 240
    return rows.reshape(*scales.shape[:-1], -1)
