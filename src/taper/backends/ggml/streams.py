"""Several hidden states for each token as nodes of a graph, of which a layer runs on the first (AltUp).

The same as `backends/streams.py`. Shapes in comments are in ggml's order: the dimension that changes fastest comes
first. Streams lie side by side in a row, [streams * hidden_size, n].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .library import ggml

NODES_PER_LAYER, NODES = 32, 96  # at most, for each layer, and before and after all layers
_LEAST_SQUARE = 1e-5  # mean square by whose root a stream is divided, at least
Product = Callable[[Any, int], Any]  # of rows with the matrix of a stream


def first(context: Any, streams: Any, size: int) -> Any:
    """The first stream, of `size` numbers: [size, n]."""
    return _part(context, streams, size, 0)


def _part(context: Any, streams: Any, size: int, number: int) -> Any:
    item, row = streams.contents.nb[:2]
    return ggml.view_2d(context, streams, size, streams.contents.ne[1], row, number * size * item)


def spread(context: Any, x: Any, count: int, times: Product) -> Any:
    """The streams before the first layer: embeddings x [hidden_size, n], and products of them, as long as they are."""
    streams = x
    for number in range(1, count):
        streams = ggml.concat(context, streams, _as_long(context, times(x, number), x), 0)
    return streams


def merged(context: Any, streams: Any, count: int, times: Product) -> Any:
    """The mean of the first stream and of products of the others, as long as the first: [hidden_size, n]."""
    size = streams.contents.ne[0] // count
    parts = [ggml.cont(context, _part(context, streams, size, number)) for number in range(count)]
    total = parts[0]
    for number in range(1, count):
        total = ggml.add(context, total, _as_long(context, times(parts[number], number), parts[0]))
    return ggml.scale(context, total, 1 / count)


def _as_long(context: Any, x: Any, target: Any) -> Any:
    """Rows x, scaled to the lengths of the target's."""
    own, length = (ggml.mean(context, ggml.sqr(context, rows)) for rows in (x, target))
    own = ggml.sqrt(context, ggml.clamp(context, own, _LEAST_SQUARE, math.inf))
    return ggml.div(context, ggml.mul(context, x, ggml.sqrt(context, length)), own)


def predicted(context: Any, streams: Any, coefs: Any) -> Any:
    """What a layer is expected to make of streams: each and a sum of all, by coefs [from * to, n]."""
    width, tokens = streams.contents.ne[:2]
    count = math.isqrt(coefs.contents.ne[0])
    parts = ggml.reshape_3d(context, streams, width // count, count, tokens)
    coefs = ggml.transpose(context, ggml.reshape_3d(context, coefs, count, count, tokens))
    sums = ggml.out_prod(context, parts, coefs)
    return ggml.add(context, streams, ggml.reshape_2d(context, sums, width, tokens))


def corrected(context: Any, predictions: Any, x: Any, coefs: Any) -> Any:
    """Predictions, each with a multiple of the error of the first added, which became x [hidden_size, n].

    The multiples are 1 + coefs [streams, n].
    """
    (size, tokens), count = x.contents.ne[:2], coefs.contents.ne[0]
    error = ggml.sub(context, x, first(context, predictions, size))
    coefs = ggml.scale_bias(context, coefs, 1.0, 1.0)
    change = ggml.out_prod(
        context, ggml.reshape_3d(context, error, size, 1, tokens), ggml.reshape_3d(context, coefs, count, 1, tokens)
    )
    return ggml.add(context, ggml.reshape_2d(context, change, size * count, tokens), predictions)


def add_to_others(context: Any, streams: Any, x: Any) -> Any:
    """Add x [hidden_size, n] to all streams but the first, in place."""
    (size, tokens), (item, row) = x.contents.ne[:2], streams.contents.nb[:2]
    others = streams.contents.ne[0] // size - 1
    strides = size * item, row, row * tokens
    rest = ggml.view_4d(context, streams, size, others, tokens, 1, *strides, size * item)
    return ggml.add_inplace(context, rest, ggml.reshape_3d(context, x, size, 1, tokens))
