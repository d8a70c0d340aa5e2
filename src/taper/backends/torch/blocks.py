"""Blocks of a layer in PyTorch: rotary embeddings, masks and attention. They know no weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...models.config import Rope

FEW_TOKENS = 4  # for so many, each gets a copy of its experts


def rotation_table(rope: Rope, context_length: int, device: str) -> torch.Tensor:
    """Cosines and sines of each position, f32 [2, context_length, dim / 2]."""
    pairs = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device)
    frequencies = rope.theta ** (-pairs / rope.dim)
    if factors := rope.factors_for(context_length):
        frequencies /= torch.tensor(factors, dtype=torch.float32, device=device)
    positions = torch.arange(context_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin())) * rope.attention_factor


def visible_cells(positions: torch.Tensor, kv_length: int, window: int | None) -> torch.Tensor:
    """Which cells of its slot each token at positions [N] attends to: bool [N, kv_length]."""
    cells, own = torch.arange(kv_length, device=positions.device), positions.unsqueeze(1)
    visible = cells <= own
    return visible if window is None else visible & (cells > own - window)


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of heads x [n, heads, head_dim] in f32, by cosines and sines [2, n, 1, dim / 2]."""
    pairs, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    cos, sin = rotation
    dim = 2 * cos.shape[-1]
    a, b = x[..., :dim].float().unflatten(-1, pairs).unbind(axis)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), -1)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    slots: torch.Tensor,
    runs: tuple[tuple[int, int, int], ...] | None,
    scale: float,
) -> torch.Tensor:
    """Attention of q [n, heads, head_dim] over caches [slots, kv heads, cells, head_dim]: [n, heads * head_dim]."""
    group = q.shape[1] // keys.shape[1]  # heads that share keys and values
    # Neither way asks PyTorch for grouped queries: with a mask, only its slowest kernels have them on a GPU.
    if runs is None:  # one token a row, the heads of a group as its queries: [n, key-value heads, group, head_dim]
        if len(keys) > 1:  # a single slot is read where it is
            keys, values = keys[slots], values[slots]
        queries, mask = q.unflatten(1, (-1, group)), visible[:, None, None]
        out = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
        return out.flatten(1)
    parts = []
    for slot, first, end in runs:  # the tokens of a slot together: [1, heads, tokens, head_dim]
        end = min(end, len(q))
        if first < end:
            queries = q[first:end].transpose(0, 1).unsqueeze(0)
            k, v = (cache[slot : slot + 1].repeat_interleave(group, 1) for cache in (keys, values))
            out = F.scaled_dot_product_attention(queries, k, v, visible[first:end], scale=scale)
            parts.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


def mixture(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The MLPs of each token's experts, weighted: [n, hidden_size].

    Args:
        x: [n, hidden_size].
        shares: weights of the chosen experts, [n, chosen].
        ids: the chosen experts, [n, chosen].
        gate: of all experts, [experts, intermediate_size, hidden_size]; `up` too.
        up: see `gate`.
        down: of all experts, [experts, hidden_size, intermediate_size].
        activation: of the gate.
    """
    if len(x) <= FEW_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        # For each token a copy of its experts, so that nothing depends on which they are.
        gates, ups = (torch.einsum("nh,nkih->nki", x, matrices[ids]) for matrices in (gate, up))
        outs = torch.einsum("nki,nkhi->nkh", activation(gates) * ups, down[ids])
        return (outs * shares.unsqueeze(-1)).sum(1).to(x.dtype)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        h = activation(F.linear(x[tokens], gate[expert])) * F.linear(x[tokens], up[expert])
        out.index_add_(0, tokens, (F.linear(h, down[expert]) * shares[tokens, place, None]).to(x.dtype))
    return out
