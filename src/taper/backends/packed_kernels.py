"""What `triton_kernels` do with a `PackedMatrix`: its integers are multiplied as they are, the sums with the scales.

An integer is masked out of its word in its place and converted there; the numbers it is multiplied with are divided by
what the place is worth. Chunks of 16 bytes, each of one group or of half a group, are what a thread loads at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_tile(matrix, rows, num_rows, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows of a matrix [num_rows, SIZE] from a column on: words [ROWS, CHUNKS, 4, 1], and what their groups have.

    These are scales and, where there are factors, minimums, if any, and the factors of both: each [ROWS, CHUNKS].
    """
    CHUNK: tl.constexpr = 128 // matrix.bits
    GROUP: tl.constexpr = 16 if matrix.bits == 8 and matrix.has_factors else 32
    chunks = first // CHUNK + tl.arange(0, COLUMNS // CHUNK)
    in_rows, in_columns = rows < num_rows, chunks < SIZE // CHUNK
    inside = in_rows[:, None] & in_columns[None, :]
    # Four dimensions at once, so that the compiler keeps all integers of a word in the thread that loads it.
    words = rows[:, None, None, None].to(tl.int64) * (SIZE // CHUNK * 4) + chunks[None, :, None, None] * 4
    words += tl.arange(0, 4)[None, None, :, None]
    words = tl.load(matrix.words + words, in_rows[:, None, None, None] & in_columns[None, :, None, None], 0)
    # Said not to be contiguous, so that threads load the scales of their own words.
    groups = rows[:, None].to(tl.int64) * (SIZE // GROUP) + (chunks // (GROUP // CHUNK))[None, :]
    groups = tl.max_contiguous(groups, (1, 1))
    if not matrix.has_factors:
        tile = words, tl.load(matrix.scales + groups, inside, 0.0)
    elif matrix.bits == 8:
        tile = words, tl.load(matrix.scales + groups, inside, 0), tl.load(matrix.factors + groups // 16, inside, 0.0)
    else:
        scale, factor = matrix.scales + groups * 2, matrix.factors + groups // 8 * 2
        factors = tl.load(factor, inside, 0.0), tl.load(factor + 1, inside, 0.0)
        tile = words, tl.load(scale, inside, 0), tl.load(scale + 1, inside, 0), factors[0], factors[1]
    return tile


@triton.jit
def _scales(matrix, tile):
    """A weight is its integer less an offset, times a scale, less a minimum; the last two are f32 [ROWS, CHUNKS]."""
    scale = tile[1].to(tl.float32)
    if matrix.has_factors and matrix.bits == 4:
        scale *= tile[3].to(tl.float32)
        minimum, offset = tile[2].to(tl.float32) * tile[4].to(tl.float32), 0
    else:
        if matrix.has_factors:
            scale *= tile[2].to(tl.float32)
        minimum, offset = tl.zeros_like(scale), 128 if matrix.bits == 8 else 8
    return offset, scale, minimum


@triton.jit
def _integers(words, BITS: tl.constexpr):
    """The integers in words [ROWS, CHUNKS, 4, 1], in their places, and what to multiply them with: f32, [..., PER].

    PER: those in a word.
    """
    places = tl.arange(0, 32 // BITS) * BITS
    masks = ((255 if BITS == 8 else 15) << places).to(tl.uint32, bitcast=True)
    worth = ((127 - places) << 23).to(tl.float32, bitcast=True)  # 2 to the power of -places
    return (words.to(tl.uint32, bitcast=True) & masks).to(tl.float32), worth


@triton.jit
def _columns(first, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of the integers in a row of a tile: [CHUNKS, 4, PER]."""
    PER: tl.constexpr = 32 // BITS
    chunks, words, integers = tl.arange(0, COLUMNS // (4 * PER)), tl.arange(0, 4), tl.arange(0, PER)
    return first + (chunks[:, None, None] * 4 + words[None, :, None]) * PER + integers[None, None, :]


@triton.jit
def products(matrix, tile, x, norm, rows, num_rows, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of a matrix times x [SIZE], which is RMS-normed if there is a `norm`: f32 [ROWS]."""
    PER: tl.constexpr = 32 // matrix.bits
    CHUNKS: tl.constexpr = COLUMNS // (4 * PER)
    total = tl.zeros((ROWS, CHUNKS), tl.float32)
    squares = tl.zeros((CHUNKS, 4, PER), tl.float32)
    for first in range(0, SIZE, COLUMNS):
        columns = _columns(first, matrix.bits, COLUMNS)
        h = tl.load(x + columns, columns < SIZE, 0.0).to(tl.float32)
        ahead = first_tile(matrix, rows, num_rows, first + COLUMNS, SIZE, COLUMNS)
        if norm is not None:
            squares += h * h
            h *= tl.load(norm + columns, columns < SIZE, 0.0).to(tl.float32)
        integers, worth = _integers(tile[0], matrix.bits)
        sums = tl.sum(tl.sum(integers * (h * worth)[None, :, :, :], 3), 2)
        offset, scale, minimum = _scales(matrix, tile)
        total += scale * sums - (offset * scale + minimum) * tl.sum(tl.sum(h, 2), 1)[None, :]
        tile = ahead
    out = tl.sum(total, 1)
    return out if norm is None else out * tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / SIZE + eps)


@triton.jit
def numbers(matrix, rows, num_rows, first, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows of a matrix [num_rows, SIZE] from a column on, dequantised: f32 [ROWS, COLUMNS]."""
    tile = first_tile(matrix, rows, num_rows, first, SIZE, COLUMNS)
    integers, worth = _integers(tile[0], matrix.bits)
    offset, scale, minimum = _scales(matrix, tile)
    weights = (integers * worth - offset) * scale[:, :, None, None] - minimum[:, :, None, None]
    return tl.reshape(weights, (ROWS, COLUMNS))


@triton.jit
def dequantise(
    matrix, chosen, out, num_rows, num_chosen, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out [num_chosen, SIZE] = the chosen rows [num_chosen] of a matrix [num_rows, SIZE]; all, if `chosen` is None."""
    places, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    rows = places if chosen is None else tl.load(chosen + places, places < num_chosen, 0)
    columns = first + tl.arange(0, COLUMNS)[None, :]
    inside = (places < num_chosen)[:, None] & (columns < SIZE)
    weights = numbers(matrix, rows, num_rows, first, SIZE, ROWS, COLUMNS)
    tl.store(out + places[:, None].to(tl.int64) * SIZE + columns, weights, inside)
