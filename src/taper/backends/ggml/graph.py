"""One forward as a ggml graph: the layers that run, on the tokens that run them.

Shapes in comments are in ggml's order: the dimension that changes fastest comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from ...adapters import EPS, Adapters
from ...errors import ModelError
from ...models.config import DeltaNet, Experts, LatentAttention, Mamba2, Mixer, ModelConfig
from .. import Runs
from ..passing import Plan
from . import streams
from .cache import KeyValueCache
from .library import ggml
from .recurrent import (
    RecurrentLayer,
    States,
    StateTensors,
    Tokens,
    convolved,
    delta_rule,
    state_inputs,
    state_space,
    together,
)
from .shortlist import PreviewTensors
from .tensors import Computation, TensorContext, array_of, capped, new_input
from .weights import Weights

_NODES_PER_LAYER, _NODES_PER_RUN, _NODES_PER_EXPERT, _OTHER_NODES = 96, 48, 2, 48
_ROPE_NEIGHBOURS, _ROPE_HALVES = 0, 2
_GELU_A = 2 * math.sqrt(2 / math.pi)
_GELU_B = 0.044715 * _GELU_A


class GraphKey(NamedTuple):
    """What a prepared graph depends on."""

    num_active: tuple[int, ...]
    runs: Runs
    num_outputs: int
    num_previews: int
    kv_length: int
    first_layer: int
    output_hidden_states: tuple[int, ...]
    head_inputs: bool
    adapters: Adapters | None
    fill: bool
    plan: Plan | None = None  # of what it leaves; with none, it fills the cells itself
    only_cells: bool = False  # only write keys and values of `first_layer`, for states that have passed it


@dataclass(frozen=True)
class Model:
    """What every graph of a model reads."""

    config: ModelConfig
    weights: Weights
    cache: KeyValueCache
    rope_factors: tuple[Any, ...]  # of each layer: a tensor, or None
    exact: bool  # computes in f32 throughout; ggml's own gelu looks it up in a table of f16
    passed: Any  # a tensor, [hidden_width, places]: the states that wait
    tile: int  # tokens of a slot from which on flash attention is faster than products
    states: StateTensors | None = None  # of recurrent layers
    preview: PreviewTensors | None = None


class _Results(NamedTuple):
    """What a forward computes; what is not asked for is missing."""

    hidden_states: dict[int, Any]  # by layer: [hidden_size, tokens]
    logits: Any = None  # [vocab_size, outputs]
    previews: Any = None  # [vocab_size, previews]
    states: Any = None  # of the previewed rows, what the head reads: [hidden_size, previews]
    head_inputs: Any = None  # [hidden_size, tokens]


class Graph(Computation):
    """A prepared forward. Set `inputs`, compute, then read the results: all numpy views, or copies on a device.

    `logits`, and for previewed rows `previews`, the approximations, and `states`, what the head is multiplied with;
    `hidden_states` by layer; `head_inputs`, if they are asked for.

    `windows`: the windows of its layers, and the names of their masks among the inputs. `elements`: the same for the
    widths of cells, and for where the numbers of values go.

    Raises:
        ModelError: there is not enough memory for its intermediate results.
    """

    def __init__(self, model: Model, key: GraphKey, adapters: Mapping[int, tuple[Any, Any]], allocator: Any) -> None:
        super().__init__()
        self._model, self._key, self._adapters = model, key, adapters
        self._layer_inputs: Any = None
        config, count = model.config, key.runs[-1][2]
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "positions": ((count,), np.int32),
            "cells": ((count,), np.int64),
        }
        widths = {config.sizes(layer).cell_width for layer, spec in enumerate(config.layers) if spec.mixer is None}
        self.elements = {width: f"elements of {width}" for width in widths}
        parts = model.cache.num_elements
        shapes |= {name: ((count, parts(width)), np.int64) for width, name in self.elements.items()}
        if key.only_cells:
            shapes["waiting"] = ((count,), np.int32)
        elif key.first_layer:
            shapes["hidden_states"] = ((count, config.hidden_width), np.float32)
        if key.plan:
            shapes["places"] = ((len(key.plan.tokens),), np.int64)
        self._is_mtp = len(key.num_active) > config.num_hidden_layers
        if not (key.first_layer or key.only_cells) or config.layer_input_size or self._is_mtp:
            shapes["tokens"] = ((count,), np.int32)
        if config.layer_input_size:
            shapes["layer_tokens"] = ((count,), np.int32)
        if config.mixer is not None:
            num_slots = len({slot for slot, _, _ in key.runs})
            shapes |= state_inputs(config.mixer, len(config.recurrent_layers), num_slots)
        active = zip(config.layers, key.num_active, strict=False)  # an MTP layer runs alone
        self.windows = {spec.window: f"mask of {spec.window}" for spec, n in active if n}
        shapes |= dict.fromkeys(self.windows.values(), ((count, key.kv_length), np.float16))
        if key.num_outputs + key.num_previews:
            shapes["rows"] = ((key.num_outputs + key.num_previews,), np.int32)
        chosen = max(spec.experts.num_experts_per_tok if spec.experts else 0 for spec in config.layers)
        nodes_per_layer = _NODES_PER_LAYER + _NODES_PER_EXPERT * chosen + _NODES_PER_RUN * len(key.runs)
        nodes = config.num_hidden_layers * nodes_per_layer + _OTHER_NODES
        if config.num_streams > 1:
            nodes += config.num_hidden_layers * streams.NODES_PER_LAYER + streams.NODES
        self._context = TensorContext(nodes, graph_nodes=nodes)
        self._inputs = {name: new_input(self._context, shape, dtype) for name, (shape, dtype) in shapes.items()}
        self.pointer = ggml.new_graph_custom(self._context.pointer, nodes, False)
        results = self._build()
        if not ggml.gallocr_alloc_graph(allocator, self.pointer):
            raise ModelError("there is not enough memory for this many tokens", "lower --context or shorten the prompt")
        # An input that no retained layer reads has no memory; what is written to it goes nowhere.
        self.inputs = {
            name: array_of(tensor, *shapes[name], self.sent) if tensor.contents.data else np.empty(*shapes[name])
            for name, tensor in self._inputs.items()
        }
        self.hidden_states = {
            layer: array_of(tensor, (count, config.hidden_width), np.float32, self.fetched)
            for layer, tensor in results.hidden_states.items()
        }
        self.logits, self.previews, self.states, self.head_inputs = (
            np.empty((rows, width), np.float32)
            if tensor is None
            else array_of(tensor, (rows, width), np.float32, self.fetched)
            for tensor, rows, width in (
                (results.logits, key.num_outputs, config.vocab_size),
                (results.previews, key.num_previews, config.vocab_size),
                (results.states, key.num_previews, config.hidden_size),
                (results.head_inputs, count, config.hidden_size),
            )
        )

    def _build(self) -> _Results:
        """Add the nodes in the order in which they run."""
        key, context, weights = self._key, self._context.pointer, self._model.weights
        if key.only_cells:
            x = ggml.get_rows(context, self._model.passed, self._inputs["waiting"])
            x = self._first(self._expected(x, key.first_layer))
            self._write_cells(self._norm(x, f"layers.{key.first_layer}.pre_attention_norm"), key.first_layer)
            return _Results({})
        if "tokens" in self._inputs:
            x = ggml.get_rows(context, weights["embed_tokens"], self._inputs["tokens"])
            x = self._scaled(x, self._model.config.embedding_scale)  # [hidden_size, tokens]
            self._layer_inputs = self._inputs_of_layers(x)
            x = streams.spread(context, x, self._model.config.num_streams, partial(self._times_stream, "embed"))
        if key.first_layer:
            given = self._inputs["hidden_states"]
            x = self._combined(x, given) if self._is_mtp else given
        results = _Results({})
        layers = len(key.num_active)
        for layer in range(key.first_layer, layers + 1):
            if layer in key.output_hidden_states:
                # A copy, made before a later layer updates x in place.
                results.hidden_states[layer] = self._output(ggml.dup(context, x))
            self._leave(x, layer)
            if layer < layers and (self._fills(layer) or key.num_active[layer]):
                x = self._layer(x, layer, key.num_active[layer])
            if layer in self._adapters and key.num_active[layer] < key.runs[-1][2]:
                x = self._adapter(x, layer, key.num_active[layer])
        if key.head_inputs:
            x = self._output(self._read_by_head(x))
            results = results._replace(head_inputs=x)
        if num_rows := key.num_outputs + key.num_previews:
            rows = ggml.get_rows(context, x, self._inputs["rows"])
            rows = rows if key.head_inputs else self._read_by_head(rows)
            if key.num_outputs:
                head = weights.matrix(weights.head, key.num_outputs)
                whole = ggml.mul_mat(context, head, _rows(context, rows, 0, key.num_outputs))
                config = self._model.config
                logits = self._output(capped(context, whole, config.logit_scale, config.logit_cap))
                results = results._replace(logits=logits)
            if (preview := self._model.preview) is not None and key.num_previews:
                states = self._output(ggml.dup(context, _rows(context, rows, key.num_outputs, num_rows)))
                inner = ggml.add(context, ggml.mul_mat(context, preview.rotation, states), preview.shift)
                previews = ggml.add(context, ggml.mul_mat(context, preview.table, inner), preview.bias)
                results = results._replace(previews=self._output(previews), states=states)
        return results

    def _run(self, tensor: Any) -> None:
        ggml.build_forward_expand(self.pointer, tensor)

    def _output(self, tensor: Any) -> Any:
        ggml.set_output(tensor)
        self._run(tensor)
        return tensor

    def _scaled(self, x: Any, scale: float) -> Any:
        return capped(self._context.pointer, x, scale, None)

    def _norm(self, x: Any, name: str) -> Any:
        """RMS norm along rows, where the model has one of this name; else x itself."""
        context, weight = self._context.pointer, self._model.weights.get(name)
        if weight is None:
            return x
        return ggml.mul(context, ggml.rms_norm(context, x, self._model.config.rms_norm_eps), weight)

    def _layer(self, x: Any, layer: int, active: int) -> Any:
        """Run a layer on the first `active` tokens of x [hidden_width, tokens]; to fill, the rest write their cells."""
        context, count, config = self._context.pointer, self._key.runs[-1][2], self._model.config
        spec = config.layers[layer]
        expected = self._expected(x if self._fills(layer) else _rows(context, x, 0, active), layer)
        h = self._norm(self._first(expected), f"layers.{layer}.pre_attention_norm")
        if spec.has_cells:
            self._write_cells(h, layer)
        if not active:
            return x
        expected, has_streams = _rows(context, expected, 0, active), config.num_streams > 1
        prefix = self._first(expected)
        # A part of x is updated in place: the rest keeps its value, and a token may re-enter at a later layer.
        add = ggml.add if active == count or has_streams else ggml.add_inplace
        h = _rows(context, h, 0, active)
        attended = self._attention(h, layer) if spec.mixer is None else self._mixed(h, layer, spec.mixer)
        prefix = add(context, prefix, self._added(attended, f"layers.{layer}.post_attention_norm"))
        if spec.laurel_rank:
            prefix = self._with_laurel(prefix, h, layer)
        prefix = add(context, prefix, self._added(self._mlp(prefix, layer), f"layers.{layer}.post_mlp_norm"))
        if has_streams:
            prefix = self._corrected(expected, prefix, layer)
            prefix = prefix if active == count else ggml.cpy(context, prefix, _rows(context, x, 0, active))
        elif self._layer_inputs is not None:
            h = self._norm(self._of_layer_input(prefix, layer), f"layers.{layer}.post_input_norm")
            prefix = add(context, prefix, h)
        if spec.output_scale != 1.0:
            scale = ggml.scale if active == count else ggml.scale_inplace
            prefix = scale(context, prefix, spec.output_scale)
        self._run(prefix)
        return prefix if active == count else x

    def _combined(self, x: Any, given: Any) -> Any:
        """What enters the MTP layer, of embeddings and of what the head read: all [hidden_size, tokens]."""
        layer = self._key.first_layer
        normed = (
            self._norm(part, f"layers.{layer}.{name}_norm") for name, part in (("embedding", x), ("hidden", given))
        )
        return self._times(ggml.concat(self._context.pointer, *normed, 0), layer, "combine_proj")

    def _read_by_head(self, x: Any) -> Any:
        """What the head reads, [hidden_size, n], of hidden states x [hidden_width, n]."""
        if (count := self._model.config.num_streams) > 1:
            x = streams.merged(self._context.pointer, x, count, partial(self._times_stream, "unembed"))
        return self._norm(x, f"layers.{self._key.first_layer}.head_norm" if self._is_mtp else "norm")

    def _times_stream(self, name: str, x: Any, stream: int) -> Any:
        """Rows x times a matrix of a stream."""
        matrix = self._model.weights.matrix(f"streams.{name}_{stream}", x.contents.ne[1])
        return ggml.mul_mat(self._context.pointer, matrix, x)

    def _first(self, x: Any) -> Any:
        """The hidden state that layers run on, [hidden_size, n], of those of a token, x [hidden_width, n]."""
        config = self._model.config
        return x if config.num_streams == 1 else streams.first(self._context.pointer, x, config.hidden_size)

    def _expected(self, x: Any, layer: int) -> Any:
        """What a layer starts from: hidden states x [hidden_width, n]; of several streams, what it predicts of them."""
        if self._model.config.num_streams == 1:
            return x
        coefs = self._times(self._modalities(self._first(x), layer), layer, "predict_coefs")
        return streams.predicted(self._context.pointer, x, coefs)

    def _modalities(self, x: Any, layer: int) -> Any:
        """What coefficients of streams are made of: [streams, n], of the first stream x [hidden_size, n]."""
        routed = self._times(self._norm(x, f"layers.{layer}.stream_router_norm"), layer, "stream_router")
        return capped(self._context.pointer, routed, 1 / self._model.config.hidden_size, 1.0)

    def _corrected(self, expected: Any, x: Any, layer: int) -> Any:
        """Streams [hidden_width, n] after a layer: the first became x; the others get what comes of its input too."""
        context, name = self._context.pointer, f"layers.{layer}"
        after = streams.corrected(context, expected, x, self._times(self._modalities(x, layer), layer, "correct_coefs"))
        if self._layer_inputs is not None:
            scaled = ggml.mul(context, self._first(after), self._model.weights[f"{name}.correct_scale"])
            given = self._norm(self._of_layer_input(scaled, layer), f"{name}.post_input_norm")
            self._run(streams.add_to_others(context, after, given))
        return after

    def _with_laurel(self, x: Any, h: Any, layer: int) -> Any:
        """x [hidden_size, active] and what runs beside attention on the same input h, over the square root of 2."""
        context, beside = (
            self._context.pointer,
            self._times(self._times(h, layer, "laurel_left"), layer, "laurel_right"),
        )
        beside = ggml.add(context, h, self._norm(beside, f"layers.{layer}.post_laurel_norm"))
        return ggml.scale(context, ggml.add(context, x, beside), 0.5**0.5)

    def _inputs_of_layers(self, embeddings: Any) -> Any:
        """What layers get besides hidden states: [layer_input_size, layers, tokens]; None if they get nothing."""
        context, config, weights = self._context.pointer, self._model.config, self._model.weights
        size, tokens = config.layer_input_size, embeddings.contents.ne[1]
        if not size:
            return None
        own = ggml.get_rows(context, weights["layer_embeddings"], self._inputs["layer_tokens"])
        projection = weights.matrix("layer_projection", tokens)
        projected = ggml.scale(context, ggml.mul_mat(context, projection, embeddings), config.hidden_size**-0.5)
        own, projected = (
            ggml.reshape_3d(context, part, size, config.num_hidden_layers, tokens) for part in (own, projected)
        )
        projected = self._norm(projected, "layer_projection_norm")
        return ggml.scale(context, ggml.add(context, projected, ggml.scale(context, own, size**0.5)), 0.5**0.5)

    def _of_layer_input(self, x: Any, layer: int) -> Any:
        """What a layer makes of its own input for the first tokens, x [hidden_size, active]."""
        inputs = self._layer_inputs
        (_, row, token), size = inputs.contents.nb[:3], inputs.contents.ne[0]
        own = ggml.view_2d(self._context.pointer, inputs, size, x.contents.ne[1], token, layer * row)
        return self._times(self._gated(self._times(x, layer, "input_gate"), own), layer, "input_proj")

    def _adapter(self, x: Any, layer: int, active: int) -> Any:
        """Let the tokens of x [hidden_size, tokens] that skip a layer pass through its adapter."""
        context = self._context.pointer
        down, up = self._adapters[layer]
        rest = _rows(context, x, active, x.contents.ne[1])
        h = ggml.mul_mat(context, down, ggml.rms_norm(context, rest, EPS))
        h = ggml.mul_mat(context, up, ggml.silu_inplace(context, h))
        if not active:
            return ggml.add(context, x, h)
        self._run(ggml.add_inplace(context, rest, h))
        return x

    def _added(self, h: Any, norm: str) -> Any:
        """What attention or MLP adds to hidden states."""
        return self._scaled(self._norm(h, norm), self._model.config.residual_scale)

    def _times(self, h: Any, layer: int, name: str) -> Any:
        """Rows h times a matrix of a layer."""
        matrix = self._model.weights.matrix(f"layers.{layer}.{name}", h.contents.ne[1])
        return ggml.mul_mat(self._context.pointer, matrix, h)

    def _plus_bias(self, x: Any, layer: int, name: str) -> Any:
        """Rows x plus a bias of a layer, where the model has one of this name."""
        bias = self._model.weights.get(f"layers.{layer}.{name}_bias")
        return x if bias is None else ggml.add(self._context.pointer, x, bias)

    def _mlp(self, x: Any, layer: int) -> Any:
        """The MLP, or what takes its place or stands beside it, on hidden states x [hidden_size, active]."""
        experts, name = self._model.config.layers[layer].experts, f"layers.{layer}"
        h = self._norm(x, f"{name}.pre_mlp_norm")
        if experts is not None and not experts.beside:
            return self._mixture(h, h, layer, experts)
        gate, up = self._times(h, layer, "gate_proj"), self._times(h, layer, "up_proj")
        if (cutoff := self._model.config.layers[layer].gate_cutoff) is not None:
            gate = self._cut(gate, cutoff)
        dense = self._times(self._gated(gate, up), layer, "down_proj")
        if experts is None:
            return dense
        context, config = self._context.pointer, self._model.config
        if experts.beside != "normed":
            if experts.beside == "gated":
                gate = ggml.sum_rows(context, ggml.mul(context, h, self._model.weights[f"{name}.shared_gate"]))
                dense = ggml.mul(context, dense, ggml.sigmoid(context, gate))
            return ggml.add(context, self._mixture(h, h, layer, experts), dense)
        routed = ggml.scale(context, self._norm(x, f"{name}.router_scale"), config.hidden_size**-0.5)
        mixed = self._mixture(self._norm(x, f"{name}.pre_experts_norm"), routed, layer, experts)
        dense, mixed = self._norm(dense, f"{name}.post_dense_norm"), self._norm(mixed, f"{name}.post_experts_norm")
        return ggml.add(context, dense, mixed)

    def _mixture(self, h: Any, routed: Any, layer: int, experts: Experts) -> Any:
        """The MLPs of the experts that the router chooses for each row of h, weighted: [hidden_size, active]."""
        context, weights = self._context.pointer, self._model.weights
        chosen, (size, active) = experts.num_experts_per_tok, h.contents.ne[:2]
        logits = self._plus_bias(self._times(routed, layer, "router"), layer, "router")
        shares = (ggml.sigmoid if experts.scores == "sigmoid" else ggml.soft_max)(context, logits)
        correction = weights.get(f"layers.{layer}.router_correction")
        scores = logits if correction is None else ggml.add(context, shares, correction)
        ids = ggml.argsort_top_k(context, scores, chosen)  # [chosen, active]

        def of_chosen(values: Any) -> Any:
            rows = ggml.get_rows(context, ggml.reshape_3d(context, values, 1, experts.num_experts, active), ids)
            return ggml.reshape_2d(context, rows, chosen, active)

        total = ggml.sum_rows(context, of_chosen(shares)) if experts.norm_topk_prob else None
        if (scale := weights.get(f"layers.{layer}.experts_scale")) is not None:
            shares = ggml.mul(context, shares, scale)
        shares = of_chosen(shares)
        shares = shares if total is None else ggml.div(context, shares, total)
        shares = shares if experts.scale == 1.0 else ggml.scale(context, shares, experts.scale)
        shares = ggml.reshape_3d(context, shares, 1, chosen, active)

        def times(rows: Any, name: str) -> Any:
            out = ggml.mul_mat_id(context, weights[f"layers.{layer}.{name}"], rows, ids)
            return ggml.add_id(context, out, weights[f"layers.{layer}.{name}_bias"], ids) if experts.has_bias else out

        rows = ggml.reshape_3d(context, h, size, 1, active)
        gate, up = times(rows, "gate_experts"), times(rows, "up_experts")
        if experts.scales_inputs:  # products of scaled inputs are scaled products
            gate, up = ggml.mul(context, gate, shares), ggml.mul(context, up, shares)
        inner = ggml.swiglu_oai(context, gate, up, *experts.clamp) if experts.clamp else self._gated(gate, up)
        out = times(inner, "down_experts")  # [hidden_size, chosen, active]
        out = out if experts.scales_inputs else ggml.mul(context, out, shares)
        _, stride, row = out.contents.nb[:3]
        parts = [ggml.view_2d(context, out, size, active, row, place * stride) for place in range(chosen)]
        return reduce(partial(ggml.add, context), parts)

    def _gated(self, gate: Any, up: Any) -> Any:
        """The activation of `gate`, times `up`."""
        context = self._context.pointer
        if self._model.config.activation == "silu":
            return ggml.swiglu_split(context, gate, up)
        if not self._model.exact:
            return ggml.geglu_split(context, gate, up)
        # gelu(x) = x * sigmoid(x * (a + b * x * x)) in its tanh form (arXiv 1606.08415).
        factor = ggml.scale_bias(context, ggml.sqr(context, gate), _GELU_B, _GELU_A)
        inner = ggml.mul(context, gate, factor)
        return ggml.mul(context, ggml.mul(context, gate, ggml.sigmoid(context, inner)), up)

    def _cut(self, gate: Any, cutoff: float) -> Any:
        """What of each row is above its mean by more than `cutoff` standard deviations; 0 for the rest."""
        context = self._context.pointer
        centred = ggml.sub(context, gate, ggml.mean(context, gate))
        deviation = ggml.sqrt(context, ggml.mean(context, ggml.sqr(context, centred)))
        return ggml.relu(context, ggml.sub(context, centred, ggml.scale(context, deviation, cutoff)))

    def _write_cells(self, h: Any, layer: int) -> None:
        """Write keys and values of h [hidden_size, n], the first n tokens."""
        context, (keys, values), (k, v) = self._context.pointer, self._model.cache[layer], self._keys_values(h, layer)
        width, count = self._model.config.sizes(layer).cell_width, h.contents.ne[1]
        cells = ggml.view_1d(context, self._inputs["cells"], count, 0)
        self._run(ggml.set_rows(context, keys, ggml.reshape_2d(context, k, width, count), cells))
        rows = count * self._model.cache.num_elements(width)
        elements = ggml.view_1d(context, self._inputs[self.elements[width]], rows, 0)
        self._run(ggml.set_rows(context, values, ggml.reshape_2d(context, v, count * width // rows, rows), elements))

    def _keys_values(self, h: Any, layer: int) -> tuple[Any, Any]:
        """Keys and values, each [head_dim, key-value heads, n], of h [hidden_size, n], the first n tokens."""
        config = self._model.config
        spec, heads = config.layers[layer], config.sizes(layer).num_key_value_heads
        if spec.latent is not None:
            cells = self._latent_cells(h, layer, spec.latent)
            return cells, cells
        k = self._projected(h, layer, "k")
        v = k if spec.keys_are_values else self._projected(h, layer, "v")
        v = self._in_heads(v, layer, "v", heads)
        v = ggml.rms_norm(self._context.pointer, v, config.rms_norm_eps) if spec.v_norm else v
        return self._rotated(self._in_heads(k, layer, "k", heads), layer, "k"), v

    def _fills(self, layer: int) -> bool:
        """Whether tokens that skip a layer write keys and values there."""
        return self._model.config.fills(layer, self._key.fill and self._key.plan is None)

    def _leave(self, x: Any, layer: int) -> None:
        """Leave those of the hidden states x [hidden_width, tokens] before a layer that the plan names."""
        context, first = self._context.pointer, 0  # of the states that are left
        for part in self._key.plan.parts if self._key.plan else ():
            if part.layer == layer:
                places = self._inputs["places"]
                places = ggml.view_1d(context, places, part.end - part.first, first * places.contents.nb[0])
                states = _rows(context, x, part.first, part.end)
                self._run(ggml.set_rows(context, self._model.passed, states, places))
            first += part.end - part.first

    def _attention(self, h: Any, layer: int) -> Any:
        """Let the first tokens, h [hidden_size, active], attend; returns [hidden_size, active]."""
        context, config, active = self._context.pointer, self._model.config, h.contents.ne[1]
        spec, (q, gate) = config.layers[layer], self._gated_queries(h, layer)
        mask, (_, head, token) = self._inputs[self.windows[spec.window]], q.contents.nb[:3]
        outputs: Any = None
        sinks = self._model.weights.get(f"layers.{layer}.sinks")
        for slot, count, first, end in _side_by_side(self._key.runs, active):
            rows = (end - first) // count  # of each slot
            sizes, strides = (*q.contents.ne[:2], rows, count), (head, token, rows * token)
            queries = ggml.permute(context, ggml.view_4d(context, q, *sizes, *strides, first * token), 0, 2, 1, 3)
            visible = ggml.reshape_4d(context, _rows(context, mask, first, end), self._key.kv_length, rows, 1, count)
            cached = self._model.cache.slots(context, config.source(layer), slot, count, self._key.kv_length)
            attend = self._attend_in_tiles if rows >= self._model.tile else self._attend
            out = attend(queries, *cached, visible, spec.attention_scale, spec.score_cap, sinks)
            out = ggml.reshape_3d(context, out, *q.contents.ne[:2], end - first)
            outputs = out if outputs is None else ggml.concat(context, outputs, out, 2)
        if spec.latent is not None:
            outputs = self._latent_values(outputs, layer, spec.latent)
        outputs = ggml.reshape_2d(context, outputs, math.prod(outputs.contents.ne[:2]), active)
        if gate is not None:
            outputs = ggml.mul(context, outputs, ggml.sigmoid(context, gate))
        return self._plus_bias(self._times(outputs, layer, "o_proj"), layer, "o")

    def _gated_queries(self, h: Any, layer: int) -> tuple[Any, Any]:
        """Queries [head_dim, heads, n] of h [hidden_size, n], and the gates of what they read, where there are some."""
        spec = self._model.config.layers[layer]
        if spec.latent is not None:
            return self._latent_queries(h, layer, spec.latent), None
        q = self._projected(h, layer, "q")
        q, gate = self._halves(q, layer) if spec.output_gate else (q, None)
        return self._rotated(self._in_heads(q, layer, "q", self._model.config.num_attention_heads), layer, "q"), gate

    def _halves(self, x: Any, layer: int) -> tuple[Any, Any]:
        """The queries and the gates of x [2 * heads * head_dim, n]: both [heads * head_dim, n]."""
        context, dim = self._context.pointer, self._model.config.sizes(layer).head_dim
        heads, count = self._model.config.num_attention_heads, x.contents.ne[1]
        item, row = x.contents.nb[:2]
        strides = 2 * dim * item, row, row * count
        views = (ggml.view_4d(context, x, dim, heads, count, 1, *strides, first) for first in (0, dim * item))
        q, gate = (ggml.reshape_2d(context, ggml.cont(context, part), dim * heads, count) for part in views)
        return q, gate

    def _latent_queries(self, h: Any, layer: int, latent: LatentAttention) -> Any:
        """Queries [cell_dim, heads, n] of latents, and of the rotated key beside each."""
        if latent.q_rank is not None:
            h = self._norm(self._times(h, layer, "q_a_proj"), f"layers.{layer}.q_a_norm")
        heads, sizes = self._model.config.num_attention_heads, (latent.nope_dim, latent.rope_dim)
        own, rotated = self._two_parts(self._times(h, layer, "q_proj"), heads, *sizes)
        return ggml.concat(
            self._context.pointer, self._by_head(own, layer, "latent_queries"), self._rotated(rotated, layer, "q"), 0
        )

    def _latent_cells(self, h: Any, layer: int, latent: LatentAttention) -> Any:
        """Latents, and the rotated key beside each: [cell_dim, 1, n]."""
        own, key = self._two_parts(self._times(h, layer, "kv_proj"), 1, latent.kv_rank, latent.rope_dim)
        own = self._norm(own, f"layers.{layer}.kv_norm")
        return ggml.concat(self._context.pointer, own, self._rotated(key, layer, "k"), 0)

    def _latent_values(self, attended: Any, layer: int, latent: LatentAttention) -> Any:
        """Values [value_dim, heads, n], of what attention read of cells [cell_dim, heads, n]."""
        (_, head, token), sizes = attended.contents.nb[:3], attended.contents.ne[1:3]
        read = ggml.view_3d(self._context.pointer, attended, latent.kv_rank, *sizes, head, token, 0)
        return self._contiguous(self._by_head(read, layer, "latent_values"))

    def _two_parts(self, x: Any, heads: int, first: int, second: int) -> tuple[Any, Any]:
        """The parts of each head of x [heads * (first + second), n]: [first, heads, n] and [second, heads, n]."""
        context, count, (item, row) = self._context.pointer, x.contents.ne[1], x.contents.nb[:2]
        head = (first + second) * item
        return (
            ggml.view_3d(context, x, first, heads, count, head, row, 0),
            ggml.view_3d(context, x, second, heads, count, head, row, first * item),
        )

    def _by_head(self, x: Any, layer: int, name: str) -> Any:
        """Each head of x [size, heads, n] times its own matrix: [other size, heads, n], not contiguous."""
        context, matrices = self._context.pointer, self._model.weights[f"layers.{layer}.{name}"]
        out = ggml.mul_mat(context, matrices, ggml.permute(context, x, 0, 2, 1, 3))
        return ggml.permute(context, out, 0, 2, 1, 3)

    def _mixed(self, h: Any, layer: int, mixer: Mixer) -> Any:
        """Let the first tokens, h [hidden_size, active], pass through a recurrent layer; the same of its outputs."""
        context, place, states = self._context.pointer, self._model.config.recurrent_layers[layer], self._model.states
        assert states is not None
        nodes = RecurrentLayer(context, self._run, mixer, states[place], self._inputs, place)
        tokens = together(self._key.runs, h.contents.ne[1])
        if isinstance(mixer, DeltaNet):
            out = self._by_delta_rule(h, layer, mixer, nodes, tokens)
        elif isinstance(mixer, Mamba2):
            out = self._by_state_space(h, layer, mixer, nodes, tokens, states.order)
        else:
            out = self._by_convolution(h, layer, nodes, tokens)
        return self._times(out, layer, "out_proj")

    def _by_delta_rule(self, h: Any, layer: int, mixer: DeltaNet, nodes: RecurrentLayer, tokens: list[Tokens]) -> Any:
        """`DeltaNet`, before the last product: [heads * head_dim, active]."""
        context, weights, eps = self._context.pointer, self._model.weights, self._model.config.rms_norm_eps
        name = f"layers.{layer}"
        qkv, z, beta, alpha = (self._times(h, layer, f"{part}_proj") for part in ("qkv", "z", "beta", "alpha"))
        decay = ggml.softplus(context, ggml.add(context, alpha, weights[f"{name}.dt_bias"]))
        decay, beta = ggml.mul(context, decay, weights[f"{name}.decay"]), ggml.sigmoid(context, beta)

        def one(part: Tokens, before: States) -> tuple[Any, States]:
            inputs, matrices = before
            mixed, inputs = convolved(context, qkv, part, inputs, weights[f"{name}.conv"])
            mixed = ggml.silu(context, mixed)
            out, matrices = delta_rule(context, mixer, part, mixed, decay, beta, matrices, eps)
            return out, (inputs, matrices)

        out = nodes.outputs(tokens, one)
        heads = ggml.reshape_3d(context, out, mixer.head_dim, mixer.num_value_heads, h.contents.ne[1])
        out = ggml.reshape_2d(context, self._norm(heads, f"{name}.mixer_norm"), *out.contents.ne[:2])
        return ggml.mul(context, out, ggml.silu(context, z))

    def _by_state_space(
        self, h: Any, layer: int, mixer: Mamba2, nodes: RecurrentLayer, tokens: list[Tokens], order: Any
    ) -> Any:
        """`Mamba2`, before the last product: [inner_size, active]."""
        context, count, inner = self._context.pointer, h.contents.ne[1], mixer.inner_size
        names = ("conv", "conv_bias", "dt_bias", "decay", "direct", "mixer_norm")
        weights = {name: self._model.weights[f"layers.{layer}.{name}"] for name in names}
        products = self._times(h, layer, "in_proj")
        item, row = products.contents.nb[:2]

        def columns(width: int, first: int) -> Any:
            return ggml.view_2d(context, products, width, count, row, first * item)

        z, xbc = columns(inner, 0), columns(mixer.conv_width, inner)
        dt = ggml.add(context, columns(mixer.num_heads, inner + mixer.conv_width), weights["dt_bias"])

        def one(part: Tokens, before: States) -> tuple[Any, States]:
            mixed, inputs = convolved(context, xbc, part, before[0], weights["conv"])
            mixed = ggml.silu(context, ggml.add(context, mixed, weights["conv_bias"]))
            out, matrices = state_space(context, mixer, part, mixed, dt, weights, before[1], order)
            return out, (inputs, matrices)

        gated = ggml.swiglu_split(context, z, nodes.outputs(tokens, one))
        groups = ggml.reshape_3d(context, gated, inner // mixer.num_groups, mixer.num_groups, count)
        normed = ggml.rms_norm(context, groups, self._model.config.rms_norm_eps)
        return ggml.mul(context, ggml.reshape_2d(context, normed, inner, count), weights["mixer_norm"])

    def _by_convolution(self, h: Any, layer: int, nodes: RecurrentLayer, tokens: list[Tokens]) -> Any:
        """`ShortConvolution`, before the last product: [hidden_size, active]."""
        context, weights = self._context.pointer, self._model.weights
        products = self._times(h, layer, "in_proj")
        width, count, (item, row) = products.contents.ne[0] // 3, h.contents.ne[1], products.contents.nb[:2]
        b, c, x = (ggml.view_2d(context, products, width, count, row, place * width * item) for place in range(3))
        bx = ggml.mul(context, b, x)

        def one(part: Tokens, before: States) -> tuple[Any, States]:
            out, inputs = convolved(context, bx, part, before[0], weights[f"layers.{layer}.conv"])
            return ggml.reshape_2d(context, out, width, part.end - part.first), (inputs,)

        return ggml.mul(context, nodes.outputs(tokens, one), c)

    def _attend(
        self, queries: Any, keys: Any, values: Any, mask: Any, scale: float, cap: float | None, sinks: Any
    ) -> Any:
        """Attention by products, in which the queries of heads that share keys stand side by side.

        Args:
            queries: [head_dim, rows, heads, slots].
            keys: [head_dim, length, key-value heads, slots].
            values: [length, head_dim, key-value heads, slots].
            mask: [length, rows, 1, slots].
            scale: of the scores.
            cap: of the scores, or None.
            sinks: [heads], or None.

        Returns:
            [head_dim, heads, rows, slots].
        """
        context, (dim, rows, heads, slots) = self._context.pointer, queries.contents.ne[:4]
        length, shared = keys.contents.ne[1], keys.contents.ne[2]
        columns = (rows * heads // shared, shared, slots)
        scores = ggml.mul_mat(context, keys, ggml.reshape_4d(context, self._contiguous(queries), dim, *columns))
        scores = ggml.reshape_4d(context, scores, length, rows, heads, slots)
        if cap is not None:
            scores, scale = capped(context, scores, scale, cap), 1.0
        shares = ggml.soft_max_ext(context, scores, mask, scale, 0.0)
        if sinks is not None:
            ggml.soft_max_add_sinks(shares, sinks)
        out = ggml.mul_mat(context, values, ggml.reshape_4d(context, shares, length, *columns))
        out = ggml.reshape_4d(context, out, dim, rows, heads, slots)
        return self._contiguous(ggml.permute(context, out, 0, 2, 1, 3))

    def _attend_in_tiles(
        self, queries: Any, keys: Any, values: Any, mask: Any, scale: float, cap: float | None, sinks: Any
    ) -> Any:
        """The same by flash attention."""
        context = self._context.pointer
        values = ggml.permute(context, values, 1, 0, 2, 3)
        if values.contents.nb[0] != keys.contents.nb[0]:
            values = ggml.cont(context, values)
        out = ggml.flash_attn_ext(context, queries, keys, values, mask, scale, 0.0, cap or 0.0)
        if sinks is not None:
            ggml.flash_attn_ext_add_sinks(out, sinks)
        return out

    def _contiguous(self, x: Any) -> Any:
        return x if ggml.is_contiguous(x) else ggml.cont(self._context.pointer, x)

    def _projected(self, h: Any, layer: int, name: str) -> Any:
        """One of q, k, v of h [hidden_size, n], before norms."""
        return self._plus_bias(self._times(h, layer, f"{name}_proj"), layer, name)

    def _in_heads(self, x: Any, layer: int, name: str, heads: int) -> Any:
        """One of q, k, v, before rotation, as [head_dim, heads, n]."""
        kind, norm = self._model.config.layers[layer].qk_norm, f"layers.{layer}.{name}_norm"
        x = self._norm(x, norm) if kind == "whole" else x
        head_dim, count = self._model.config.sizes(layer).head_dim, x.contents.ne[1]
        x = ggml.reshape_3d(self._context.pointer, x, head_dim, heads, count)
        return self._norm(x, norm) if kind == "head" else x

    def _rotated(self, x: Any, layer: int, name: str) -> Any:
        """Heads of the first tokens of q or k, x [head_dim, heads, n], rotated by their positions."""
        context, spec = self._context.pointer, self._model.config.layers[layer]
        rope = spec.rope
        if rope is None:
            return x
        mode = _ROPE_NEIGHBOURS if rope.interleaved else _ROPE_HALVES
        positions = ggml.view_1d(context, self._inputs["positions"], x.contents.ne[2], 0)
        factors, scaling = self._model.rope_factors[layer], (rope.theta, 1.0, 0.0, rope.attention_factor, 0.0, 0.0)
        x = ggml.rope_ext(context, x, positions, factors, rope.dim, mode, 0, *scaling)
        return self._norm(x, f"layers.{layer}.{name}_norm") if spec.qk_norm == "rotated" else x


def _side_by_side(runs: Runs, active: int) -> list[tuple[int, int, int, int]]:
    """What attends in one operation: tokens of one slot, or single tokens of slots that lie side by side.

    Returns:
        The first slot, how many slots, and the first token and the end of each, of the first `active` tokens.
    """
    groups: list[tuple[int, int, int, int]] = []
    for slot, first, end in runs:
        if first >= active:
            break
        before, count, start, _ = groups[-1] if groups else (slot, 0, first, first)
        if end - first == 1 and first - start == count and slot == before + count:
            groups[-1:] = [(before, count + 1, start, end)]
        else:
            groups.append((slot, 1, first, min(end, active)))
    return groups


def _rows(context: Any, x: Any, first: int, end: int) -> Any:
    """Rows `first` to `end`, excluded, of x [width, rows]; x itself where these are all."""
    width, count = x.contents.ne[:2]
    if (first, end) == (0, count):
        return x
    row = x.contents.nb[1]
    return ggml.view_2d(context, x, width, end - first, row, first * row)
