"""Recurrent layers as nodes of a graph, and their states as ggml tensors.

Shapes in comments are in ggml's order: the dimension that changes fastest comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...models.config import DeltaNet, Mamba2, Mixer, ModelConfig
from .. import Runs
from ..states import Passage
from .library import ggml
from .tensors import Copies, TensorContext


class Tokens(NamedTuple):
    """Tokens that pass through a recurrent layer in one operation: as many of each of several slots."""

    place: int  # of the first of these slots among those of the batch
    slots: int  # how many
    first: int  # the first token, and the end of the last
    end: int


def together(runs: Runs, active: int) -> list[Tokens]:
    """What passes in one operation of the first `active` tokens: one token of each slot, or each run by itself."""
    runs = tuple((slot, first, min(end, active)) for slot, first, end in runs if first < active)
    slots = list(dict.fromkeys(slot for slot, _, _ in runs))
    if len(slots) == len(runs) == active:
        return [Tokens(0, active, 0, active)]
    return [Tokens(slots.index(slot), 1, first, end) for slot, first, end in runs]


class StateTensors:
    """The states of all recurrent layers: records of the inputs of convolutions, and of matrices, if there are any.

    On a CPU, memory is taken as it is written.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer, num_records: int, buffer_type: Any = None) -> None:
        layers, (heads, *shape) = len(config.recurrent_layers), mixer.matrices
        inputs = np.zeros((layers, num_records, mixer.conv_width * (mixer.conv_size - 1)), np.float32)
        # A row for each head, so that threads share the copying of a record.
        matrices = np.zeros((layers, num_records * heads, math.prod(shape)), np.float32)
        self._heads, context = heads, TensorContext(2 * layers + 1, buffer_type=buffer_type)
        self._context = context
        held = (inputs, matrices) if heads else (inputs,)
        self._tensors = [tuple(context.over(part) for part in parts) for parts in zip(*held, strict=True)]
        self.order = context.over(np.arange(num_records, dtype=np.int32))  # 0, 1, 2 and so on

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        """The inputs [width * (conv_size - 1), records] and matrices [their sizes, records * heads] of a layer."""
        return self._tensors[place]

    def rows(self, records: np.ndarray) -> np.ndarray:
        """The rows of the matrices of records [layers, slots]: [layers, slots, heads]."""
        rows: np.ndarray = records[..., None] * self._heads + np.arange(self._heads)
        return rows

    def copies(self, passage: Passage) -> Copies:
        """What copies the contents of a state's records to others."""
        copies = Copies(2 * len(self._tensors))
        for tensors, read, written in zip(self._tensors, passage.reads, passage.writes, strict=True):
            for tensor, rows in zip(tensors, (1, self._heads), strict=False):
                size = rows * tensor.contents.ne[0]
                copies.add(tensor, int(read) * size, int(written) * size, size)
        return copies


_BEGINS = 64  # bytes; where tensors begin that Vulkan's recurrent operations take: drivers ask for at most this
_READ, _WRITTEN = ("reads", "rows read"), ("writes", "rows written")  # inputs of a graph: of records, and of matrices


def state_inputs(mixer: Mixer, layers: int, slots: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """The inputs of a graph that say which records it reads and writes: their shapes and types."""
    shapes = (layers, slots), (layers, slots, mixer.matrices[0])
    kinds = ((_READ, np.int32), (_WRITTEN, np.int64))
    return {
        name: (shape, dtype) for names, dtype in kinds for name, shape in zip(names, shapes, strict=True) if all(shape)
    }


def fill_state_inputs(inputs: dict[str, np.ndarray], states: StateTensors, passages: Sequence[Passage]) -> None:
    """Write these inputs."""
    for (name, rows), records in (
        (_READ, [passage.reads for passage in passages]),
        (_WRITTEN, [passage.writes for passage in passages]),
    ):
        inputs[name][:] = np.stack(records, 1)
        if rows in inputs:
            inputs[rows][:] = states.rows(inputs[name])


States = tuple[Any, ...]  # the last inputs of the convolution [conv_size - 1, width, slots], and matrices
# Of some tokens, with the states before them: outputs [size, tokens], and the states after them.
Pass = Callable[[Tokens, States], tuple[Any, States]]


class RecurrentLayer:
    """One recurrent layer in a graph: what it reads of earlier forwards, and what it leaves to later ones."""

    def __init__(
        self, context: Any, run: Callable[[Any], None], mixer: Mixer, held: States, inputs: dict[str, Any], place: int
    ) -> None:
        self._context, self._run, self._mixer, self._held = context, run, mixer, held
        self._inputs, self._place = inputs, place

    def outputs(self, tokens: list[Tokens], one: Pass) -> Any:
        """What the layer makes of its first tokens: [size, active]. The states after them are written."""
        context, latest = self._context, dict[int, States]()
        num_slots = max(part.place + part.slots for part in tokens)
        states, outputs = self._read(num_slots), None
        for part in tokens:
            before = states if part.slots == num_slots else tuple(_part(context, state, part) for state in states)
            out, latest[part.place] = one(part, latest.get(part.place, before))
            outputs = out if outputs is None else ggml.concat(context, outputs, out, 1)
        for part in {part.place: part for part in tokens}.values():
            for held, new, name in zip(self._held, latest[part.place], _WRITTEN, strict=False):
                ids = self._ids(name, part.slots, part.place)
                new = new if ggml.is_contiguous(new) else ggml.cont(context, new)
                rows = ggml.reshape_2d(context, new, held.contents.ne[0], ids.contents.ne[0])
                self._run(ggml.set_rows(context, held, rows, ids))
        return outputs

    def _read(self, num_slots: int) -> States:
        """The states of the first slots of the batch."""
        context, mixer = self._context, self._mixer
        shapes = (
            (mixer.conv_size - 1, mixer.conv_width, num_slots, 1),
            (*mixer.matrices[::-1], num_slots),
        )
        rows = (
            ggml.get_rows(context, held, self._ids(name, num_slots))
            for held, name in zip(self._held, _READ, strict=False)
        )
        return tuple(ggml.reshape_4d(context, part, *shape) for part, shape in zip(rows, shapes, strict=False))

    def _ids(self, name: str, slots: int, place: int = 0) -> Any:
        """The records, or rows, of neighbouring slots in this layer."""
        ids = self._inputs[name]
        each, all_slots = ids.contents.ne[:2] if name in (_READ[1], _WRITTEN[1]) else (1, ids.contents.ne[0])
        first = (self._place * all_slots + place) * each * ids.contents.nb[0]
        return ggml.view_1d(self._context, ids, slots * each, first)


def convolved(context: Any, x: Any, part: Tokens, inputs: Any, weights: Any) -> tuple[Any, Any]:
    """A causal convolution over the tokens of a part of x [width, active], and its last inputs.

    Args:
        context: of the graph.
        x: what is convolved.
        part: the tokens.
        inputs: the last ones before them, [conv_size - 1, width, slots].
        weights: [conv_size, width].

    Returns:
        [width, rows, slots], and [conv_size - 1, width, slots].
    """
    (size, width), rows = weights.contents.ne[:2], (part.end - part.first) // part.slots
    new = ggml.transpose(context, _columns(context, x, part))
    series = ggml.concat(context, inputs, new, 0)  # [conv_size - 1 + rows, width, slots]
    item, channel, slot = series.contents.nb[:3]
    strides = channel, slot, slot * part.slots
    inputs = ggml.view_4d(context, series, size - 1, width, part.slots, 1, *strides, rows * item)
    return ggml.ssm_conv(context, series, weights), inputs


def delta_rule(
    context: Any, mixer: DeltaNet, part: Tokens, mixed: Any, decay: Any, beta: Any, matrices: Any, eps: float
) -> tuple[Any, Any]:
    """The gated delta rule on the tokens of a part.

    Args:
        context: of the graph.
        mixer: its sizes.
        part: the tokens.
        mixed: queries, keys and values [conv_width, rows, slots].
        decay: logarithms, [heads, active].
        beta: [heads, active].
        matrices: [head_dim, head_dim, heads, slots], before them.
        eps: least length by which queries and keys are divided.

    Returns:
        Outputs [heads * head_dim, tokens], before norm and gate, and the matrices after them.
    """
    rows, slots, dim = (part.end - part.first) // part.slots, part.slots, mixer.head_dim
    keys, heads, tokens = mixer.num_key_heads, mixer.num_value_heads, part.end - part.first
    item, row, slot = mixed.contents.nb[:3]

    def in_heads(first: int, number: int) -> Any:
        strides = dim * item, row, slot
        return ggml.view_4d(context, mixed, dim, number, rows, slots, *strides, first * dim * item)

    q, k = (ggml.l2_norm(context, in_heads(first, keys), eps) for first in (0, keys))
    g, b = (ggml.reshape_4d(context, _columns(context, gate, part), 1, heads, rows, slots) for gate in (decay, beta))
    packed = ggml.gated_delta_net(context, q, k, in_heads(2 * keys, heads), g, b, matrices, 1)
    size, item = dim * heads, packed.contents.nb[0]
    out = ggml.view_2d(context, packed, size, tokens, size * item, 0)
    strides = dim * item, dim * dim * item, dim * size * item
    return out, ggml.view_4d(context, packed, dim, dim, heads, slots, *strides, tokens * size * item)


def state_space(
    context: Any,
    mixer: Mamba2,
    part: Tokens,
    mixed: Any,
    dt: Any,
    weights: dict[str, Any],
    matrices: Any,
    order: Any,
) -> tuple[Any, Any]:
    """A state space model on the tokens of a part.

    Args:
        context: of the graph.
        mixer: its sizes.
        part: the tokens.
        mixed: x, B and C [conv_width, rows, slots], after the convolution.
        dt: time steps before softplus, [heads, active].
        weights: `decay` and `direct`, both [heads].
        matrices: [state_size, head_dim, heads, slots], before them.
        order: 0, 1, 2 and so on, at least as many as slots.

    Returns:
        Outputs [inner_size, tokens], before gate and norm, and the matrices after them.
    """
    rows, slots, tokens = (part.end - part.first) // part.slots, part.slots, part.end - part.first
    heads, dim, size, inner = mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.inner_size
    item, row, slot = mixed.contents.nb[:3]

    def parts(width: int, number: int, first: int) -> Any:
        return ggml.view_4d(context, mixed, width, number, rows, slots, width * item, row, slot, first * item)

    x, b = parts(dim, heads, 0), parts(size, mixer.num_groups, inner)
    c = parts(size, mixer.num_groups, inner + mixer.num_groups * size)
    decay, direct = (ggml.reshape_2d(context, weights[name], 1, heads) for name in ("decay", "direct"))
    ids = ggml.view_1d(context, order, slots, 0)
    packed = ggml.ssm_scan(context, matrices, x, _columns(context, dt, part), decay, b, c, ids, 1)
    out = ggml.view_4d(context, packed, dim, heads, rows, slots, dim * item, inner * item, rows * inner * item, 0)
    out = ggml.reshape_2d(context, ggml.add(context, ggml.mul(context, x, direct), out), inner, tokens)
    strides = size * item, dim * size * item, inner * size * item
    return out, ggml.view_4d(context, packed, size, dim, heads, slots, *strides, tokens * inner * item)


def _part(context: Any, x: Any, part: Tokens) -> Any:
    """The slots of a part of states, whose last dimension they are."""
    last = 2 if x.contents.ne[3] == 1 else 3
    sizes, strides = list(x.contents.ne[:4]), list(x.contents.nb[:4])
    sizes[last] = part.slots
    return ggml.view_4d(context, x, *sizes, *strides[1:], part.place * strides[last])


def _columns(context: Any, x: Any, part: Tokens) -> Any:
    """Those of a part of x [width, active]: [width, rows, slots]."""
    width, row, rows = x.contents.ne[0], x.contents.nb[1], (part.end - part.first) // part.slots
    first = part.first * row
    columns = ggml.view_4d(context, x, width, rows, part.slots, 1, row, rows * row, rows * part.slots * row, first)
    return columns if first % _BEGINS == 0 else ggml.cont(context, columns)
