"""Quantised matrices as GPUs read them fast: integers of 4 or 8 bits, and what groups of them are multiplied with.

Nothing is lost: `PackedMatrix.dequantised` has the numbers that the file means. `packed_kernels` compute with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..models.tensors import WEIGHT_TYPES
from ..models.tensors import Tensor as StoredTensor


class PackedMatrix(NamedTuple):
    """A matrix [rows, columns]: each row consecutive integers without a sign, from the lowest bits of its words on.

    A weight is its integer, less half of what the bits can hold, times the scale of its group of 32. There are two
    kinds with `factors`. Of 8 bits: groups of 16, and a scale is multiplied with the factor of its sixteen groups. Of
    4 bits: the integer times scale times first factor, of eight groups, less minimum times second factor.
    """

    words: Tensor  # int32 [rows, columns * bits / 32]
    scales: Tensor  # f16 [rows, groups]; int8 with factors, or uint8 [rows, groups, 2], scales and minimums
    factors: Tensor | None  # f16 [rows, groups / 16], or [rows, groups / 8, 2]
    bits: int  # 4 or 8

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """Of all its parts."""
        return sum(part.nbytes for part in (self.words, self.scales, self.factors) if part is not None)

    def dequantised(self) -> Tensor:
        """F32 [rows, columns]; the slow twin of the kernels."""
        rows, groups = self.scales.shape[:2]
        places = torch.arange(0, 32, self.bits, dtype=torch.int32, device=self.words.device)
        integers = (self.words[..., None] >> places & (1 << self.bits) - 1).view(rows, groups, -1).float()
        if self.factors is None or self.bits == 8:
            scales = self.scales.float()
            if self.factors is not None:
                scales *= self.factors.float().repeat_interleave(16, 1)
            return ((integers - (1 << self.bits - 1)) * scales[..., None]).flatten(1)
        scales = self.scales.view(rows, -1, 8, 2).float() * self.factors[:, :, None].float()
        scale, minimum = scales.view(rows, groups, 1, 2).unbind(-1)
        return (integers * scale - minimum).flatten(1)


def can_pack(tensor: StoredTensor | Tensor) -> bool:
    """Whether `packed` takes a tensor: a matrix of one of these types."""
    return (
        isinstance(tensor, StoredTensor) and tensor.dtype in ("Q8_0", "Q4_0", "Q4_K", "Q6_K") and len(tensor.shape) == 2
    )


def packed(tensor: StoredTensor, device: torch.device) -> PackedMatrix:
    """A quantised matrix on a device, where its bytes are put in order."""
    rows, size = tensor.shape[0], WEIGHT_TYPES[tensor.dtype][2]
    blocks = torch.from_numpy(tensor.data.copy()).to(device).view(rows, -1, size)
    if tensor.dtype == "Q8_0":  # a scale, 32 integers
        return PackedMatrix(_words(blocks[..., 2:] ^ 128), _halves(blocks[..., :2])[..., 0], None, 8)
    if tensor.dtype == "Q4_0":  # a scale, 16 integers in lower halves of bytes and 16 in upper ones
        return PackedMatrix(_words(_nibbles(blocks[..., 2:], 16)), _halves(blocks[..., :2])[..., 0], None, 4)
    if tensor.dtype == "Q6_K":  # four lower bits, twice 128 of them; two upper ones of all; 16 scales, and their factor
        lower, upper = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
        lower = torch.cat((lower & 15, lower >> 4), -2).flatten(-3)
        upper = torch.cat([upper >> places & 3 for places in (0, 2, 4, 6)], -2).flatten(-3)
        scales = blocks[..., 192:208].flatten(1).contiguous().view(torch.int8)
        return PackedMatrix(_words((lower | upper << 4) + 96), scales, _halves(blocks[..., 208:])[..., 0], 8)
    # Two factors; 8 scales and 8 minimums of 6 bits in 12 bytes; twice as many integers as in Q4_0 at a time.
    first, second, last = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)
    scales = torch.stack((scales, minimums), -1).view(rows, -1, 2)
    return PackedMatrix(_words(_nibbles(blocks[..., 16:], 32)), scales, _halves(blocks[..., :4]), 4)


def _nibbles(stored: Tensor, count: int) -> Tensor:
    """Two integers to a byte, consecutive ones; stored are `count` in lower halves, and those after them in upper ones.

    Both are uint8 [rows, blocks, bytes].
    """
    halves = stored.unflatten(-1, (-1, count))
    integers = torch.stack((halves & 15, halves >> 4), -2).flatten(-3)
    return integers[..., ::2] | integers[..., 1::2] << 4


def _words(stored: Tensor) -> Tensor:
    """Bytes [rows, blocks, bytes] as int32 [rows, words]."""
    return stored.flatten(1).contiguous().view(torch.int32)


def _halves(stored: Tensor) -> Tensor:
    """Bytes as f16."""
    return stored.contiguous().view(torch.float16)
