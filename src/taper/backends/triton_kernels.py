"""Triton kernels for one token: products of matrices and a vector, and attention. `fused` launches them.

Norms, rotations, activations and residuals are computed inside them, in f32. With OVERLAPS, a kernel starts while the
one before it still runs: its programs fetch what they read first, and wait there for its results (programmatic
dependent launch). What they fetch before they wait is therefore never what the kernel before writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _first_tile(weights, rows, num_rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the first columns of some rows of weights [num_rows, SIZE], and their values."""
    columns = tl.arange(0, COLUMNS)
    pointers = weights + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
    return pointers, tl.load(pointers, (rows < num_rows)[:, None] & (columns < SIZE)[None, :], 0.0)


@triton.jit
def _products(
    pointers, tile, x, norm, rows, num_rows, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Rows of weights times x [SIZE], which is RMS-normed if there is a `norm`: f32 [ROWS]."""
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, SIZE, COLUMNS):
        inside = first + columns < SIZE
        h = tl.load(x + first + columns, inside, 0.0).to(tl.float32)
        following = first + COLUMNS + columns < SIZE
        ahead = tl.load(pointers + first + COLUMNS, (rows < num_rows)[:, None] & following[None, :], 0.0)
        if norm is not None:
            squares += h * h
            h *= tl.load(norm + first + columns, inside, 0.0).to(tl.float32)
        total += tile.to(tl.float32) * h[None, :]
        tile = ahead
    out = tl.sum(total, 1)
    return out if norm is None else out * tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)


@triton.jit
def _begin(OVERLAPS: tl.constexpr):
    """Wait for the kernel before, and let the next one start."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def linear(
    x, norm, weights, residual, out, num_rows, eps, scale,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out [num_rows] = residual + scale * weights [num_rows, SIZE] @ x; x is RMS-normed if there is a `norm`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pointers, tile = _first_tile(weights, rows, num_rows, SIZE, COLUMNS)
    _begin(OVERLAPS)
    result = scale * _products(pointers, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    if residual is not None:
        result += tl.load(residual + rows, rows < num_rows, 0.0).to(tl.float32)
    tl.store(out + rows, result, rows < num_rows)


@triton.jit
def _project(
    x, norm, weights, bias, out, rows, num_rows, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    pointers, tile = _first_tile(weights, rows, num_rows, SIZE, COLUMNS)
    _begin(OVERLAPS)
    result = _products(pointers, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    if bias is not None:
        result += tl.load(bias + rows, rows < num_rows, 0.0).to(tl.float32)
    tl.store(out + rows, result, rows < num_rows)


@triton.jit
def queries_keys_values(
    x, norm, q_weights, k_weights, v_weights, q_bias, k_bias, v_bias, out, eps,
    Q_SIZE: tl.constexpr, KV_SIZE: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of x [SIZE] before rotation, one after another in out."""
    block = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    num_q: tl.constexpr = (Q_SIZE + ROWS - 1) // ROWS
    num_kv: tl.constexpr = (KV_SIZE + ROWS - 1) // ROWS
    if block < num_q:
        rows += block * ROWS
        _project(x, norm, q_weights, q_bias, out, rows, Q_SIZE, eps, SIZE, ROWS, COLUMNS, OVERLAPS)
    elif block < num_q + num_kv:
        rows += (block - num_q) * ROWS
        _project(x, norm, k_weights, k_bias, out + Q_SIZE, rows, KV_SIZE, eps, SIZE, ROWS, COLUMNS, OVERLAPS)
    else:
        rows += (block - num_q - num_kv) * ROWS
        out += Q_SIZE + KV_SIZE
        _project(x, norm, v_weights, v_bias, out, rows, KV_SIZE, eps, SIZE, ROWS, COLUMNS, OVERLAPS)


@triton.jit
def gate_up(
    x, norm, gate_weights, up_weights, out, num_rows, eps,
    SILU: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out [num_rows] = activation(gate @ h) * (up @ h) for h, the RMS norm of x [SIZE]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_pointers, gate_tile = _first_tile(gate_weights, rows, num_rows, SIZE, COLUMNS)
    up_pointers, up_tile = _first_tile(up_weights, rows, num_rows, SIZE, COLUMNS)
    _begin(OVERLAPS)
    gate = _products(gate_pointers, gate_tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    up = _products(up_pointers, up_tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    if SILU:
        gate *= tl.sigmoid(gate)
    else:
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + rows, gate * up, rows < num_rows)


@triton.jit
def _head(
    projected, norm, rotation, position, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """One head of the queries or keys [DIM], normed if there is a `norm`, its first ROTATED dimensions rotated: f32."""
    dims = tl.arange(0, DIM)
    head = tl.load(projected + dims).to(tl.float32)
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(head * head, 0) / DIM + eps)
        head *= scale * tl.load(norm + dims).to(tl.float32)
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        if INTERLEAVED:
            partners, pairs, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            partners, pairs, is_first = (dims + half) % ROTATED, dims % half, dims < half
        rotates = dims < ROTATED
        partner = tl.load(projected + partners, rotates, 0.0).to(tl.float32)
        if norm is not None:
            partner *= scale * tl.load(norm + partners, rotates, 0.0).to(tl.float32)
        cosines = tl.load(rotation + position * half + pairs, rotates, 1.0)
        sines = tl.load(rotation + (CONTEXT + position) * half + pairs, rotates, 0.0)
        head = head * cosines + tl.where(is_first, -partner, partner) * sines
    return head


@triton.jit
def attend(
    projected, q_norm, k_norm, rotation, keys, values, positions, slots, out, sums, tops, weights, counts,
    scale, window, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONTEXT: tl.constexpr, CELLS: tl.constexpr, PER_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attention of one head over its share of the cells; the last program adds up the shares: out [HEADS * DIM].

    Writes the token's own key and value into the cache. A share leaves the sum of its values [DIM], the largest score
    and the sum of weights in `sums`, `tops` and `weights`; `counts` [HEADS] has how many are done.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, DIM)
    position, slot = tl.load(positions), tl.load(slots)
    own_split = (position // PER_SPLIT).to(tl.int32)
    if split > own_split:
        _begin(OVERLAPS)
        return
    kv_head = head // (HEADS // KV_HEADS)
    cache = (slot * KV_HEADS + kv_head) * CONTEXT * DIM
    cells = split * PER_SPLIT + tl.arange(0, CELLS)
    inside = (cells < position) & (cells > position - window)
    block = cache + cells[:, None] * DIM + dims[None, :]
    k_tile, v_tile = tl.load(keys + block, inside[:, None], 0.0), tl.load(values + block, inside[:, None], 0.0)
    _begin(OVERLAPS)
    q = scale * _head(projected + head * DIM, q_norm, rotation, position, eps, DIM, ROTATED, INTERLEAVED, CONTEXT)
    top, weight, total = -float("inf"), 0.0, tl.zeros((DIM,), tl.float32)
    if split == own_split:
        own = projected + (HEADS + kv_head) * DIM
        k = _head(own, k_norm, rotation, position, eps, DIM, ROTATED, INTERLEAVED, CONTEXT).to(k_tile.dtype)
        v = tl.load(own + KV_HEADS * DIM + dims).to(v_tile.dtype)
        top, weight, total = tl.sum(q * k.to(tl.float32), 0), 1.0, v.to(tl.float32)
        if head % (HEADS // KV_HEADS) == 0:
            tl.store(keys + cache + position * DIM + dims, k)
            tl.store(values + cache + position * DIM + dims, v)
    for first in range(0, PER_SPLIT, CELLS):
        scores = tl.where(inside, tl.sum(k_tile.to(tl.float32) * q[None, :], 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # no cell of the share is visible
        parts, old = tl.exp(scores - shift), tl.exp(top - shift)
        weight = weight * old + tl.sum(parts, 0)
        total = total * old + tl.sum(parts[:, None] * v_tile.to(tl.float32), 0)
        top = new_top
        cells += CELLS
        inside = (cells < position) & (cells > position - window) & (first + CELLS < PER_SPLIT)
        block = cache + cells[:, None] * DIM + dims[None, :]
        k_tile, v_tile = tl.load(keys + block, inside[:, None], 0.0), tl.load(values + block, inside[:, None], 0.0)
    place = head * SPLITS + split
    tl.store(sums + place * DIM + dims, total)
    tl.store(tops + place, top)
    tl.store(weights + place, weight)
    tl.debug_barrier()  # all threads have stored before one of them counts
    if tl.atomic_add(counts + head, 1) == own_split:
        shares = tl.arange(0, SPLITS)
        done, places = shares <= own_split, head * SPLITS + shares
        all_tops = tl.load(tops + places, done, -float("inf"))
        factors = tl.exp(all_tops - tl.max(all_tops, 0))
        whole = tl.sum(factors * tl.load(weights + places, done, 0.0), 0)
        all_sums = tl.load(sums + places[:, None] * DIM + dims[None, :], done[:, None], 0.0)
        tl.store(out + head * DIM + dims, tl.sum(factors[:, None] * all_sums, 0) / whole)
        tl.store(counts + head, 0)
