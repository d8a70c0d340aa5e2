"""Triton kernels for one token: products of matrices and a vector, and attention. `fused` launches them.

Norms, rotations, activations and residuals are computed inside them, in f32. Those whose names begin with `rows` do the
same for up to 64 rows, a token each: matrices are multiplied with all of them at once, and norms are a kernel of their
own, as are keys and values, which other rows of the same slot read. A layer runs on the first `active` ones, a number
on the device, and writes nothing for the rest.

With OVERLAPS, a kernel starts while the one before it still runs: its programs fetch what they read first, and wait
there for its results (programmatic dependent launch). What they fetch before they wait is therefore never what the
kernel before writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import packed_kernels


@triton.jit
def _first_tile(weights, rows, num_rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the first columns of some rows of weights [num_rows, SIZE], and their values.

    Of a `PackedMatrix`, that of all words and what `packed_kernels.first_tile` returns.
    """
    if isinstance(weights, tl.tensor):
        columns = tl.arange(0, COLUMNS)
        pointers = weights + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
        tile = tl.load(pointers, (rows < num_rows)[:, None] & (columns < SIZE)[None, :], 0.0)
    else:
        pointers, tile = weights.words, packed_kernels.first_tile(weights, rows, num_rows, 0, SIZE, COLUMNS)
    return pointers, tile


@triton.jit
def _products(
    weights, pointers, tile, x, norm, rows, num_rows, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of weights times x [SIZE], which is RMS-normed if there is a `norm`: f32 [ROWS]."""
    if isinstance(weights, tl.tensor):
        out = _dense_products(pointers, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    else:
        out = packed_kernels.products(weights, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    return out


@triton.jit
def _dense_products(
    pointers, tile, x, norm, rows, num_rows, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
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
    result = scale * _products(weights, pointers, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
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
    result = _products(weights, pointers, tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
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
    gate = _products(gate_weights, gate_pointers, gate_tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    up = _products(up_weights, up_pointers, up_tile, x, norm, rows, num_rows, eps, SIZE, COLUMNS, ROWS)
    tl.store(out + rows, _activated(gate, SILU) * up, rows < num_rows)


@triton.jit
def _activated(gate, SILU: tl.constexpr):
    """SiLU of gate, or GELU by tanh."""
    if SILU:
        gate *= tl.sigmoid(gate)
    else:
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate


@triton.jit
def _head(
    projected, norm, rotation, position, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """One head of the queries or keys [DIM], normed if there is a `norm`, its first ROTATED dimensions rotated: f32.

    With `projected` [heads, 1], so many heads.
    """
    dims = tl.arange(0, DIM)
    head = tl.load(projected + dims).to(tl.float32)
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(head * head, len(head.shape) - 1, keep_dims=True) / DIM + eps)
        head *= scale * tl.load(norm + dims).to(tl.float32)
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        if INTERLEAVED:
            partners, pairs, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            partners, pairs, is_first = (dims + half) % ROTATED, dims % half, dims < half
        rotates = dims < ROTATED
        partner = tl.load(projected + partners).to(tl.float32)  # of dimensions that stay, any of the head
        if norm is not None:
            partner *= scale * tl.load(norm + partners).to(tl.float32)
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
        tl.store(out + head * DIM + dims, _summed_shares(sums, tops, weights, head, own_split, DIM, SPLITS))
        tl.store(counts + head, 0)


@triton.jit
def _summed_shares(sums, tops, weights, head, last, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """What the shares of a head up to the `last` one make together: f32 [DIM]."""
    dims, shares = tl.arange(0, DIM), tl.arange(0, SPLITS)
    done, places = shares <= last, head * SPLITS + shares
    all_tops = tl.load(tops + places, done, -float("inf"))
    factors = tl.exp(all_tops - tl.max(all_tops, 0))
    whole = tl.sum(factors * tl.load(weights + places, done, 0.0), 0)
    all_sums = tl.load(sums + places[:, None] * DIM + dims[None, :], done[:, None], 0.0)
    return tl.sum(factors[:, None] * all_sums, 0) / whole


@triton.jit
def rows_norm(
    x, norm, out, active, passed, places, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """out [N, SIZE] = the RMS norm of the active rows of x [N, SIZE].

    With `places` [N], the others go there in `passed` [places, SIZE], those with a place below 0 excepted.
    """
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = columns < SIZE
    is_active = row < tl.load(active)
    _begin(OVERLAPS)
    if is_active:
        h = tl.load(x + row * SIZE + columns, inside, 0.0).to(tl.float32)
        h *= tl.rsqrt(tl.sum(h * h, 0) / SIZE + eps) * tl.load(norm + columns, inside, 0.0).to(tl.float32)
        tl.store(out + row * SIZE + columns, h, inside)
    elif places is not None:
        place = tl.load(places + row)
        if place >= 0:
            tl.store(passed + place * SIZE + columns, tl.load(x + row * SIZE + columns, inside, 0.0), inside)


@triton.jit
def _rows_products(
    weights, others, x, active, outs, num_outs, SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, OUTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some rows `outs` of weights [num_outs, SIZE], and of `others` if there are, times the active rows of x [N, SIZE].

    Only in the columns of this program: f32 [OUTS, ROWS] twice, of which the second means nothing without `others`.
    """
    rows, begin = tl.arange(0, ROWS), tl.program_id(1) * PER_SPLIT
    in_x = (rows < tl.load(active))[None, :]
    x += rows[None, :] * SIZE + begin + tl.arange(0, COLUMNS)[:, None]
    first = _rows_tile(weights, x, outs, num_outs, begin, SIZE, OUTS, COLUMNS)
    if others is not None:
        first_of_others = _rows_tile(others, x, outs, num_outs, begin, SIZE, OUTS, COLUMNS)
    _begin(OVERLAPS)
    total = tl.zeros((OUTS, ROWS), tl.float32)
    total_of_others = total
    for ahead in range(COLUMNS, tl.minimum(PER_SPLIT, SIZE - begin), COLUMNS):
        h = tl.load(x + ahead, in_x, 0.0)
        tile = _rows_tile(weights, x, outs, num_outs, begin + ahead, SIZE, OUTS, COLUMNS)
        total = tl.dot(tile, h, total, input_precision="ieee")
        if others is not None:
            tile_of_others = _rows_tile(others, x, outs, num_outs, begin + ahead, SIZE, OUTS, COLUMNS)
            total_of_others = tl.dot(tile_of_others, h, total_of_others, input_precision="ieee")
    h = tl.load(x, in_x, 0.0)  # the first tile comes last: what lies ahead is on its way the sooner
    total = tl.dot(first, h, total, input_precision="ieee")
    if others is not None:
        total_of_others = tl.dot(first_of_others, h, total_of_others, input_precision="ieee")
    return total, total_of_others


@triton.jit
def _rows_tile(weights, x, outs, num_outs, first, SIZE: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns from `first` on, of some rows of weights [num_outs, SIZE]: [OUTS, COLUMNS] in the dtype of x."""
    if isinstance(weights, tl.tensor):
        columns = first + tl.arange(0, COLUMNS)
        tile = weights + outs[:, None].to(tl.int64) * SIZE + columns[None, :]
        tile = tl.load(tile, (outs < num_outs)[:, None], 0.0)
    else:
        tile = packed_kernels.numbers(weights, outs, num_outs, first, SIZE, OUTS, COLUMNS).to(x.dtype.element_ty)
    return tile


@triton.jit
def _rows_sum(total, sums, counts, SPLITS: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr):
    """The sum of what all splits of a block have, and whether this program is the one that knows it, the last.

    `sums` is where they leave what they have; `counts` [blocks] has how many are done.
    """
    is_last = True
    if SPLITS > 1:
        block, size = tl.program_id(0), OUTS * ROWS
        places = sums + block * SPLITS * size + tl.arange(0, OUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(places + tl.program_id(1) * size, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        is_last = tl.atomic_add(counts + block, 1) == SPLITS - 1
        if is_last:
            total = tl.load(places)
            for split in range(1, SPLITS):
                total += tl.load(places + split * size)
            tl.store(counts + block, 0)
    return total, is_last


@triton.jit
def rows_linear(
    x, weights, residual, out, active, sums, counts, num_outs, scale,
    SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out [N, num_outs] = residual + scale * x [N, SIZE] @ the transpose of weights [num_outs, SIZE]."""
    outs, rows = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS)
    total, _ = _rows_products(weights, None, x, active, outs, num_outs, SIZE, PER_SPLIT, OUTS, ROWS, COLUMNS, OVERLAPS)
    total, is_last = _rows_sum(total, sums, counts, SPLITS, OUTS, ROWS)
    if is_last:
        places = rows[None, :].to(tl.int64) * num_outs + outs[:, None]
        inside = (outs < num_outs)[:, None] & (rows < tl.load(active))[None, :]
        total *= scale
        if residual is not None:
            total += tl.load(residual + places, inside, 0.0).to(tl.float32)
        tl.store(out + places, total, inside)


@triton.jit
def _rows_project(
    x, weights, bias, out, active, sums, counts, block, num_outs,
    STRIDE: tl.constexpr, SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr, OUTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    outs, rows = block * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS)
    total, _ = _rows_products(weights, None, x, active, outs, num_outs, SIZE, PER_SPLIT, OUTS, ROWS, COLUMNS, OVERLAPS)
    total, is_last = _rows_sum(total, sums, counts, SPLITS, OUTS, ROWS)
    if is_last:
        if bias is not None:
            total += tl.load(bias + outs, outs < num_outs, 0.0).to(tl.float32)[:, None]
        inside = (outs < num_outs)[:, None] & (rows < tl.load(active))[None, :]
        tl.store(out + rows[None, :] * STRIDE + outs[:, None], total, inside)


@triton.jit
def rows_queries_keys_values(
    x, q_weights, k_weights, v_weights, q_bias, k_bias, v_bias, out, active, sums, counts,
    Q_SIZE: tl.constexpr, KV_SIZE: tl.constexpr, SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    OUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of x [N, SIZE] before rotation, one after another in each row of out."""
    block = tl.program_id(0)
    num_q: tl.constexpr = (Q_SIZE + OUTS - 1) // OUTS
    num_kv: tl.constexpr = (KV_SIZE + OUTS - 1) // OUTS
    if isinstance(q_weights, tl.tensor) and isinstance(k_weights, tl.tensor) and isinstance(v_weights, tl.tensor):
        # One product for all three: each in a branch of its own would take its own shared memory.
        weights, bias, num_outs = q_weights, q_bias, Q_SIZE
        if block >= num_q:
            block -= num_q
            out += Q_SIZE
            weights, bias, num_outs = k_weights, k_bias, KV_SIZE
            if block >= num_kv:
                block -= num_kv
                out += KV_SIZE
                weights, bias = v_weights, v_bias
        _rows_project(
            x, weights, bias, out, active, sums, counts, block, num_outs,
            Q_SIZE + 2 * KV_SIZE, SIZE, PER_SPLIT, SPLITS, OUTS, ROWS, COLUMNS, OVERLAPS,
        )  # fmt: skip
    elif block < num_q:
        _rows_project(
            x, q_weights, q_bias, out, active, sums, counts, block, Q_SIZE,
            Q_SIZE + 2 * KV_SIZE, SIZE, PER_SPLIT, SPLITS, OUTS, ROWS, COLUMNS, OVERLAPS,
        )  # fmt: skip
    elif block < num_q + num_kv:
        _rows_project(
            x, k_weights, k_bias, out + Q_SIZE, active, sums, counts, block - num_q, KV_SIZE,
            Q_SIZE + 2 * KV_SIZE, SIZE, PER_SPLIT, SPLITS, OUTS, ROWS, COLUMNS, OVERLAPS,
        )  # fmt: skip
    else:
        _rows_project(
            x, v_weights, v_bias, out + (Q_SIZE + KV_SIZE), active, sums, counts, block - (num_q + num_kv), KV_SIZE,
            Q_SIZE + 2 * KV_SIZE, SIZE, PER_SPLIT, SPLITS, OUTS, ROWS, COLUMNS, OVERLAPS,
        )  # fmt: skip


@triton.jit
def rows_gate_up(
    x, gate_weights, up_weights, out, active, num_outs,
    SILU: tl.constexpr, SIZE: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out [N, num_outs] = activation(gate @ h) * (up @ h) for each row h of x [N, SIZE]."""
    outs, rows = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS)
    gate, up = _rows_products(
        gate_weights, up_weights, x, active, outs, num_outs, SIZE, SIZE, OUTS, ROWS, COLUMNS, OVERLAPS
    )
    inside = (outs < num_outs)[:, None] & (rows < tl.load(active))[None, :]
    tl.store(out + rows[None, :] * num_outs + outs[:, None], _activated(gate, SILU) * up, inside)


@triton.jit
def rows_keys_values(
    projected, k_norm, rotation, keys, values, positions, slots, active, eps,
    Q_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONTEXT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of a row into the cache, for one head of them."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    is_active = row < tl.load(active)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    dims = tl.arange(0, DIM)
    cell = ((slot * KV_HEADS + kv_head) * CONTEXT + position) * DIM + dims
    _begin(OVERLAPS)
    if is_active:
        own = projected + row * (Q_SIZE + 2 * KV_HEADS * DIM) + Q_SIZE + kv_head * DIM
        k = _head(own, k_norm, rotation, position, eps, DIM, ROTATED, INTERLEAVED, CONTEXT)
        tl.store(keys + cell, k)
        tl.store(values + cell, tl.load(own + KV_HEADS * DIM + dims))


@triton.jit
def rows_attend(
    projected, q_norm, rotation, keys, values, positions, slots, active, out, sums, tops, weights, counts,
    scale, window, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONTEXT: tl.constexpr, CELLS: tl.constexpr, PER_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attention of a row's heads with the same keys, a GROUP, over their share of the cells; as in `attend`.

    HEADS, of which those beyond a GROUP are repeated ones, are as many as a product of matrices needs.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, slot = tl.load(positions + row).to(tl.int32), tl.load(slots + row)
    own_split = position // PER_SPLIT
    if (row >= tl.load(active)) | (split > own_split):
        _begin(OVERLAPS)
        return
    dims, members = tl.arange(0, DIM), tl.arange(0, HEADS)
    cache = (slot * KV_HEADS + kv_head) * CONTEXT * DIM
    keys += cache
    values += cache
    projected += row * (KV_HEADS * (GROUP + 2)) * DIM
    _begin(OVERLAPS)
    heads = projected + (kv_head * GROUP + members % GROUP)[:, None] * DIM
    q = _head(heads, q_norm, rotation, position, eps, DIM, ROTATED, INTERLEAVED, CONTEXT).to(keys.dtype.element_ty)
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    weight, total = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, DIM), tl.float32)
    begin = tl.maximum(split * PER_SPLIT, (position - window + 1) // CELLS * CELLS)
    for first in range(begin, tl.minimum(position + 1, (split + 1) * PER_SPLIT), CELLS):
        cells = first + tl.arange(0, CELLS)
        inside = (cells <= position) & (cells > position - window)
        block = cells[:, None] * DIM + dims[None, :]
        k_tile, v_tile = tl.load(keys + block, inside[:, None], 0.0), tl.load(values + block, inside[:, None], 0.0)
        scores = scale * tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # a cell is visible in each block
        parts, old = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        weight = weight * old + tl.sum(parts, 1)
        total = tl.dot(parts.to(q.dtype), v_tile, total * old[:, None], input_precision="ieee")
        top = new_top
    heads_of_row = row * KV_HEADS * GROUP + kv_head * GROUP + members
    places, is_head = heads_of_row * SPLITS + split, members < GROUP
    tl.store(sums + places[:, None] * DIM + dims[None, :], total, is_head[:, None])
    tl.store(tops + places, top, is_head)
    tl.store(weights + places, weight, is_head)
    tl.debug_barrier()  # all threads have stored before one of them counts
    count = counts + row * KV_HEADS + kv_head
    if tl.atomic_add(count, 1) == own_split:
        for member in range(GROUP):
            head = (row * KV_HEADS + kv_head) * GROUP + member
            tl.store(out + head * DIM + dims, _summed_shares(sums, tops, weights, head, own_split, DIM, SPLITS))
        tl.store(count, 0)
