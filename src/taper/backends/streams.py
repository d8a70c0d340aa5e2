"""Several hidden states for each token in PyTorch, of which a layer runs on the first (AltUp, arXiv 2301.13310).

Streams lie side by side in a row, [n, streams * hidden_size].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_SQUARE = 1e-5  # mean square by whose root a stream is divided, at least


def spread(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """The streams before the first layer: embeddings x [n, hidden_size], and products of them, as long as they are."""
    if not matrices:
        return x
    return torch.cat((x, *(_as_long(F.linear(x, matrix), x) for matrix in matrices)), -1)


def merged(streams: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """The mean of the first stream and of products of the others, as long as the first: [n, hidden_size]."""
    if not matrices:
        return streams
    first, *others = streams.chunk(1 + len(matrices), -1)
    products = (_as_long(F.linear(x, matrix), first) for x, matrix in zip(others, matrices, strict=True))
    return torch.stack((first, *products)).mean(0)


def _as_long(x: Tensor, target: Tensor) -> Tensor:
    """Rows x, scaled to the lengths of the target's."""
    own, length = (rows.float().square().mean(-1, keepdim=True) for rows in (x, target))
    return (x * length.sqrt() / own.clamp(min=_LEAST_SQUARE).sqrt()).to(x.dtype)


def predicted(streams: Tensor, modalities: Tensor, weights: Tensor) -> Tensor:
    """What a layer is expected to make of streams.

    Each adds to itself a sum of all, by coefficients that are products of the modalities [n, streams] of the first.
    """
    count = modalities.shape[-1]
    coefs = F.linear(modalities, weights).unflatten(-1, (count, count))  # [n, to, from]
    return streams + (coefs @ streams.unflatten(-1, (count, -1))).flatten(-2)


def corrected(predictions: Tensor, x: Tensor, modalities: Tensor, weights: Tensor) -> Tensor:
    """Predictions, each with a multiple of the error of the first added, which became x [n, hidden_size].

    `modalities` are those of x.
    """
    coefs = F.linear(modalities, weights) + 1  # [n, streams]
    error = x - predictions[..., : x.shape[-1]]
    return predictions + (coefs.unsqueeze(-1) * error.unsqueeze(-2)).flatten(-2)
