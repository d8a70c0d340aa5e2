"""Recurrent layers in PyTorch: what takes the place of attention, token after token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import DeltaNet, Mamba2
from . import Runs

_TINY = 1e-6  # added to squared lengths

# Of n sequences, f32: what the convolution saw last [n, conv_width, conv_size - 1], and [n, *mixer.matrices], if there
# are some: for `DeltaNet` [n, value heads, head_dim of values, head_dim of keys].
States = tuple[Tensor, ...]
# What a layer makes of tokens before, [n, tokens, ...] each; the outputs [n, tokens, size] and the states after them.
Step = Callable[[tuple[Tensor, ...], States], tuple[Tensor, States]]


def convolve(x: Tensor, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A causal convolution over x [n, tokens, width] and the last inputs before it; the same, and the last inputs.

    `weights` are f32 [width, conv_size].
    """
    series = torch.cat((inputs, x.transpose(1, 2)), -1)
    out = F.conv1d(series, weights.unsqueeze(1), groups=x.shape[-1]).transpose(1, 2)
    return out, series[..., x.shape[1] :]


def short_convolution(weights: Tensor, given: tuple[Tensor, ...], states: States) -> tuple[Tensor, States]:
    """`ShortConvolution` on products [n, tokens, width], before the last gate."""
    out, inputs = convolve(given[0], states[0], weights)
    return out, (inputs,)


def delta_rule(mixer: DeltaNet, weights: Tensor, given: tuple[Tensor, ...], states: States) -> tuple[Tensor, States]:
    """The gated delta rule (arXiv 2412.06464).

    Args:
        mixer: its sizes.
        weights: of the convolution.
        given: queries, keys and values [n, tokens, conv_width], before the convolution; the logarithms of decays, and
            how much of what was read wrongly is corrected, both [n, tokens, value heads].
        states: before the first token.

    Returns:
        The outputs [n, tokens, value heads, head_dim], before norm and gate, and the states after the last token.
    """
    (qkv, decay, beta), (inputs, matrices) = given, states
    mixed, inputs = convolve(qkv, inputs, weights)
    heads = F.silu(mixed).unflatten(-1, (-1, mixer.head_dim))
    q, k, v = heads.split((mixer.num_key_heads, mixer.num_key_heads, mixer.num_value_heads), 2)
    group = mixer.num_value_heads // mixer.num_key_heads
    q, k = (x * (x.square().sum(-1, keepdim=True) + _TINY).rsqrt() for x in (q, k))
    q, k = (x.repeat(1, 1, group, 1) for x in (q * mixer.head_dim**-0.5, k))
    outputs = []
    for token in range(qkv.shape[1]):
        matrices = matrices * decay[:, token, :, None, None].exp()
        read = torch.einsum("nhvk,nhk->nhv", matrices, k[:, token])
        change = (v[:, token] - read) * beta[:, token, :, None]
        matrices = matrices + change.unsqueeze(-1) * k[:, token].unsqueeze(-2)
        outputs.append(torch.einsum("nhvk,nhk->nhv", matrices, q[:, token]))
    return torch.stack(outputs, 1), (inputs, matrices)


def state_space(
    mixer: Mamba2, weights: Mapping[str, Tensor], given: tuple[Tensor, ...], states: States
) -> tuple[Tensor, States]:
    """A state space model (Mamba 2, arXiv 2405.21060).

    Args:
        mixer: its sizes.
        weights: f32: `conv` and `conv_bias` of the convolution; `decay`, and `direct`, by which inputs are multiplied
            to go straight to the outputs, both [heads].
        given: x, B and C [n, tokens, conv_width], before the convolution; and time steps [n, tokens, heads].
        states: before the first token.

    Returns:
        The outputs [n, tokens, inner_size], before gate and norm, and the states after the last token.
    """
    (xbc, dt), (inputs, matrices) = given, states
    mixed, inputs = convolve(xbc, inputs, weights["conv"])
    groups = mixer.num_groups * mixer.state_size
    x, b, c = F.silu(mixed + weights["conv_bias"]).split((mixer.inner_size, groups, groups), -1)
    x = x.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    share = mixer.num_heads // mixer.num_groups
    b, c = (part.unflatten(-1, (mixer.num_groups, -1)).repeat_interleave(share, 2) for part in (b, c))
    decay, new = (dt * weights["decay"]).exp(), x * dt.unsqueeze(-1)
    outputs = []
    for token in range(xbc.shape[1]):
        matrices = matrices * decay[:, token, :, None, None] + new[:, token, ..., None] * b[:, token, :, None]
        outputs.append(torch.einsum("nhds,nhs->nhd", matrices, c[:, token]))
    out = torch.stack(outputs, 1) + x * weights["direct"].unsqueeze(-1)
    return out.flatten(2), (inputs, matrices)


def pass_tokens(
    step: Step, given: tuple[Tensor, ...], held: States, reads: Tensor, writes: Tensor, runs: Runs | None
) -> Tensor:
    """Let the tokens of a batch pass a recurrent layer, and write the states after them: outputs [tokens, ...].

    Args:
        step: what the layer computes.
        given: what it makes of each token before, f32 [tokens, ...] each.
        held: the records of the layer, [records, ...] each.
        reads: the record of each token's slot before the forward, int64 [tokens].
        writes: the same after it.
        runs: None if each slot has one token.
    """
    if runs is None:
        out, after = step(tuple(x.unsqueeze(1) for x in given), tuple(records[reads] for records in held))
        _write(held, writes, after)
        return out[:, 0]
    latest: dict[int, States] = {}
    parts = []
    for slot, first, last in runs:
        end = min(last, len(reads))
        if first < end:
            record = reads[first : first + 1]
            before = latest.get(slot) or tuple(records[record] for records in held)
            out, latest[slot] = step(tuple(x[None, first:end] for x in given), before)
            _write(held, writes[first : first + 1], latest[slot])
            parts.append(out[0])
    return torch.cat(parts)


def _write(held: States, places: Tensor, states: States) -> None:
    for records, state in zip(held, states, strict=True):
        records[places] = state
