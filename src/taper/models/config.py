"""Facts about what a model and each of its layers compute. Knows no file format and no architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from ..policy import ModelIdentity


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings of the first `dim` dimensions of each head (RoFormer, arXiv 2104.09864).

    Pair i is rotated by position * theta ** (-2i / dim) / factors[i].

    `interleaved`: a pair is (2i, 2i + 1), as in GGUF llama files, instead of (i, i + dim/2).
    `factors`: divisors of each pair's frequency (linear scaling, Llama 3.1, YaRN); None: all 1.
    `long_factors`: the divisors for contexts of more than `original_context` tokens (LongRoPE); None: the same.
    `attention_factor`: multiplies cosines and sines (YaRN, LongRoPE).
    """

    theta: float
    dim: int
    interleaved: bool = False
    factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    original_context: int = 1
    attention_factor: float = 1.0

    def factors_for(self, context_length: int) -> tuple[float, ...] | None:
        """The divisors for a context of this many tokens."""
        return self.long_factors if self.long_factors and context_length > self.original_context else self.factors


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router chooses some of several MLPs for each token, by scores of its logits.

    `scores`: "softmax" or "sigmoid". `has_correction`: those are chosen whose score plus a bias is largest; their
    shares are their scores alone. `norm_topk_prob`: the scores of the chosen experts are divided by their sum. `scale`:
    multiplies their shares. `has_bias`: router and experts add biases. `beside`: "" if there is no ordinary MLP too
    (a shared expert); else how its output is added: "plain", "gated" by the sigmoid of a product of the layer's input,
    or "normed", as that of the experts is, whose router then sees hidden states that are normed apart. `clamp`: None
    for ordinary experts; else (alpha, limit), and the product of one is gate * sigmoid(alpha * gate) * (up + 1), of a
    gate of at most `limit` and an up between -limit and limit. `scales_inputs`: shares multiply the inputs of experts,
    not their outputs.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    has_bias: bool = False
    beside: str = ""
    scores: str = "softmax"
    has_correction: bool = False
    scale: float = 1.0
    clamp: tuple[float, float] | None = None
    scales_inputs: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """What takes the place of attention in a recurrent layer: the gated delta rule (arXiv 2412.06464).

    Queries, keys and values pass through a causal convolution over `conv_size` tokens. Then each value head h has a
    matrix that reads keys of key head h % num_key_heads; it decays, and is corrected by what it should have read.
    """

    num_key_heads: int
    num_value_heads: int
    head_dim: int  # of keys and of values
    conv_size: int

    @property
    def conv_width(self) -> int:
        """Numbers in the queries, keys and values of a token."""
        return (2 * self.num_key_heads + self.num_value_heads) * self.head_dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        """In a state, besides the inputs of the convolution before the next token: how many, and their shape."""
        return self.num_value_heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class ShortConvolution:
    """What takes the place of attention in a recurrent layer of LFM2: a causal convolution over `conv_size` tokens.

    Three products of the layer's input: the first times the third is convolved, and multiplied by the second.
    """

    conv_width: int
    conv_size: int
    matrices = 0, 0, 0  # as in `DeltaNet`


@dataclass(frozen=True)
class Mamba2:
    """What takes the place of attention in a recurrent layer: a state space model (Mamba 2, arXiv 2405.21060).

    Inputs x of each head, and what writes and reads (B and C) of each group of heads, pass through a causal convolution
    over `conv_size` tokens. Then each head h has a matrix, which decays, gets x times the B of group
    h // (num_heads / num_groups), and is read by the C of that group.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_size: int

    @property
    def inner_size(self) -> int:
        """Numbers in the inputs of all heads, and in their outputs."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Numbers in x, B and C of a token."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """As in `DeltaNet`."""
        return self.num_heads, self.head_dim, self.state_size


Mixer = DeltaNet | ShortConvolution | Mamba2


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are products of a latent of each token (MLA, arXiv 2405.04434).

    Cells hold the latent, normed, and a rotated key that all heads share: one head of `cell_dim` numbers, keys and
    values alike. A matrix of each head turns what is not rotated of its query into one for latents. Of what attention
    reads, the first `kv_rank` numbers count, and another matrix of the head makes `value_dim` of them. `q_rank`:
    queries are products of a normed product of this size; None: of the layer's input. Both norms have the epsilon of
    the model, as in llama.cpp; in transformers, it is 1e-6.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int  # of a query, rotated
    nope_dim: int  # of a query, not rotated; it comes first
    value_dim: int

    @property
    def cell_dim(self) -> int:
        """Numbers in the cell of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class LayerSpec:
    """What a layer computes.

    `rope`: None for layers without positions (NoPE). `window`: the size of the sliding window, which includes the token
    itself; None: full attention. `pre_norm`: RMS norms before attention and MLP. `post_norm`: RMS norms after them,
    before the residual is added. `qk_norm`: RMS norms of queries and keys, of each "head", of the "whole" vector, or of
    each head when it is "rotated"; "" for none. `o_bias`: of attention's output. `has_sinks`: each head has a logit
    that takes a share of its attention and gives nothing. `score_cap`: scores are cap * tanh(score / cap), before the
    softmax. `v_norm`: values are normed too, by no weights. `keys_are_values`: before norms and rotation. `cells_of`:
    the layer whose keys and values it attends to; None: it has its own. `output_gate`: attention's outputs are
    multiplied by the sigmoid of as many numbers, which follow the query in each head. `latent`: what keys and values
    are made of, if it is not the layer's input. `mixer`: takes the place of attention, and has a state instead of keys
    and values. `experts`: takes the place of the MLP. `output_scale`:
    multiplies what the layer gives. `laurel_rank`: above 0, a path of this rank runs beside attention, and the sum of
    both is divided by the square root of 2 (LAuReL, arXiv 2411.07501). `sparsity`: the part of the MLP's gates that is
    cut to zero, if they are normally distributed (`gate_cutoff`). `head_dim`, `num_key_value_heads`,
    `intermediate_size`: None: those of the model. `is_elsewhere`: another part of the model runs it (`holding`).
    """

    rope: Rope | None
    attention_scale: float
    window: int | None = None
    pre_norm: bool = True
    post_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    has_sinks: bool = False
    score_cap: float | None = None
    qk_norm: str = ""
    v_norm: bool = False
    keys_are_values: bool = False
    cells_of: int | None = None
    output_gate: bool = False
    latent: LatentAttention | None = None
    mixer: Mixer | None = None
    experts: Experts | None = None
    output_scale: float = 1.0
    laurel_rank: int = 0
    sparsity: float = 0.0
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    is_elsewhere: bool = False

    @property
    def has_cells(self) -> bool:
        """Whether it has keys and values of its own here."""
        return self.cells_of is None and self.mixer is None and not self.is_elsewhere

    @property
    def gate_cutoff(self) -> float | None:
        """Of gates before their activation, what is above the mean by so many standard deviations counts; None: all."""
        return NormalDist().inv_cdf(self.sparsity) if self.sparsity else None


class LayerSizes(NamedTuple):
    """Sizes in which the layers of a model may differ."""

    head_dim: int
    num_key_value_heads: int
    intermediate_size: int

    @property
    def cell_width(self) -> int:
        """Numbers in the keys, and in the values, of a token."""
        return self.head_dim * self.num_key_value_heads


@dataclass(frozen=True)
class ModelConfig:
    """Facts about a decoder-only model, named as in transformers.

    `embedding_scale`, `residual_scale`, `logit_scale`: factors of the embeddings, of the outputs of attention and MLP,
    and of the logits. `logit_cap`: logits are cap * tanh(logit / cap). `activation`: of the MLP, "silu" or
    "gelu_pytorch_tanh". `layer_input_size`: above 0, each layer also adds what it makes of an input of this size: one
    of its own for each token, and a projection of the embedding. `layer_vocab_size`: the tokens that have inputs of
    their own; the others have those of token 0. `num_streams`: above 1, a token has so many hidden states. Each layer
    predicts them all, runs on the first, and corrects them all by what came of it (AltUp, arXiv 2301.13310); its
    layer input goes to all but the first. `has_mtp`: there is one more of `layers`, which no token passes on its way to
    the head. It predicts the token after the next one, from the next one and from what the head read (multi-token
    prediction, arXiv 2412.19437). `quantization`: the type of most weights, in ggml's names.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    quantization: str
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    activation: str = "silu"
    layer_input_size: int = 0
    has_mtp: bool = False
    layer_vocab_size: int = 0
    num_streams: int = 1

    @property
    def hidden_width(self) -> int:
        """Numbers in the hidden states of a token between layers, one stream after the other."""
        return self.num_streams * self.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """How many layers the model has, without the one that predicts a further token."""
        return len(self.layers) - self.has_mtp

    @property
    def rope_theta(self) -> float:
        """The base of rotary frequencies in the first layer that has them."""
        return next(spec.rope.theta for spec in self.layers if spec.rope)

    def sizes(self, layer: int) -> LayerSizes:
        """Those of a layer."""
        spec = self.layers[layer]
        return LayerSizes(
            spec.head_dim or self.head_dim,
            spec.num_key_value_heads or self.num_key_value_heads,
            spec.intermediate_size or self.intermediate_size,
        )

    def source(self, layer: int) -> int:
        """The layer to whose keys and values a layer attends: itself, or one that lends it its own."""
        lender = self.layers[layer].cells_of
        return layer if lender is None else lender

    def fills(self, layer: int, fill: bool) -> bool:
        """Whether tokens that skip a layer write keys and values there, if all layers that have some `fill`."""
        return self.layers[layer].has_cells and (fill or layer in self.lenders)

    @cached_property
    def lenders(self) -> frozenset[int]:
        """The layers to whose keys and values other layers attend. Tokens that skip one write them nevertheless."""
        return frozenset(spec.cells_of for spec in self.layers if spec.cells_of is not None)

    @cached_property
    def last_writer(self) -> int:
        """The last layer with keys and values, or a state, of its own; those above matter only for predictions."""
        layers = self.layers[: self.num_hidden_layers]
        return max(layer for layer, spec in enumerate(layers) if spec.cells_of is None)

    @cached_property
    def recurrent_layers(self) -> dict[int, int]:
        """The layers that have a state instead of keys and values, and the place of each among them."""
        recurrent = (layer for layer, spec in enumerate(self.layers) if spec.mixer is not None)
        return {layer: place for place, layer in enumerate(recurrent)}

    @cached_property
    def mixer(self) -> Mixer | None:
        """That of the recurrent layers, which all have the same; None if there are none."""
        return next((spec.mixer for spec in self.layers if spec.mixer is not None), None)

    def holding(self, layers: range) -> ModelConfig:
        """The same model for a backend that runs these layers only: the others have neither cells nor a state there."""
        specs = (
            spec if layer in layers else replace(spec, mixer=None, is_elsewhere=True)
            for layer, spec in enumerate(self.layers)
        )
        return replace(self, layers=tuple(specs))

    @property
    def identity(self) -> ModelIdentity:
        """The facts by which a policy recognises its model."""
        return ModelIdentity(self.architecture, self.hidden_size, self.vocab_size, self.quantization)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes [out, in] of the tensors of a model with this config."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.vocab_size, c.hidden_size)
    if size := c.layer_input_size:
        width = size * c.num_hidden_layers
        shapes |= {"layer_embeddings": (c.layer_vocab_size, width), "layer_projection": (width, c.hidden_size)}
        shapes["layer_projection_norm"] = (size,)
    for stream in range(1, c.num_streams):
        shapes |= dict.fromkeys((f"streams.embed_{stream}", f"streams.unembed_{stream}"), (c.hidden_size,) * 2)
    for index in range(len(c.layers)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(c, index).items()}
    return shapes


def _layer_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    spec, (head_dim, _, inner_size) = c.layers[layer], c.sizes(layer)
    q_size, kv_size = c.num_attention_heads * head_dim, c.sizes(layer).cell_width
    cells = [] if not spec.has_cells else ["k"] if spec.keys_are_values else ["k", "v"]
    shapes: dict[str, tuple[int, ...]]
    if spec.mixer is not None:
        shapes = _mixer_shapes(c.hidden_size, spec.mixer)
    elif spec.latent is not None:
        shapes = _latent_shapes(c.hidden_size, c.num_attention_heads, spec.latent)
    else:
        shapes = {
            "q_proj": ((1 + spec.output_gate) * q_size, c.hidden_size),
            **{f"{name}_proj": (kv_size, c.hidden_size) for name in cells},
            "o_proj": (c.hidden_size, q_size),
        }
    if spec.experts is None or spec.experts.beside:
        inner: tuple[int, ...] = (inner_size, c.hidden_size)
        shapes |= {"gate_proj": inner, "up_proj": inner, "down_proj": inner[::-1]}
    if spec.experts is not None:
        count, size = spec.experts.num_experts, spec.experts.intermediate_size
        shapes |= {
            "router": (count, c.hidden_size),
            "gate_experts": (count, size, c.hidden_size),
            "up_experts": (count, size, c.hidden_size),
            "down_experts": (count, c.hidden_size, size),
        }
        if spec.experts.has_bias:
            shapes |= {"router_bias": (count,), "down_experts_bias": (count, c.hidden_size)}
            shapes |= {f"{name}_experts_bias": (count, size) for name in ("gate", "up")}
        if spec.experts.has_correction:
            shapes["router_correction"] = (count,)
        if spec.experts.beside == "gated":
            shapes["shared_gate"] = (c.hidden_size,)
        if spec.experts.beside == "normed":
            shapes |= {"router_scale": (c.hidden_size,), "experts_scale": (count,)}
            shapes |= dict.fromkeys(("post_dense_norm", "pre_experts_norm", "post_experts_norm"), (c.hidden_size,))
    if spec.qkv_bias:
        shapes |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if spec.o_bias:
        shapes["o_bias"] = (c.hidden_size,)
    if spec.has_sinks:
        shapes["sinks"] = (c.num_attention_heads,)
    if spec.qk_norm in ("head", "rotated") and spec.mixer is None:
        shapes |= {f"{name}_norm": (head_dim,) for name in ("q", *cells[:1])}
    elif spec.qk_norm == "whole":
        shapes |= {"q_norm": (q_size,), "k_norm": (kv_size,)}
    for place, present in (("pre", spec.pre_norm), ("post", spec.post_norm)):
        if present:
            shapes |= {f"{place}_{part}_norm": (c.hidden_size,) for part in ("attention", "mlp")}
    if size := c.layer_input_size:
        shapes |= {"input_gate": (size, c.hidden_size), "input_proj": (c.hidden_size, size)}
        shapes["post_input_norm"] = (c.hidden_size,)
    if layer == c.num_hidden_layers:
        shapes |= dict.fromkeys(("embedding_norm", "hidden_norm", "head_norm"), (c.hidden_size,))
        shapes["combine_proj"] = (c.hidden_size, 2 * c.hidden_size)
    if rank := spec.laurel_rank:
        shapes |= {"laurel_left": (rank, c.hidden_size), "laurel_right": (c.hidden_size, rank)}
        shapes["post_laurel_norm"] = (c.hidden_size,)
    if (count := c.num_streams) > 1:
        shapes |= {"predict_coefs": (count * count, count), "correct_coefs": (count, count)}
        shapes |= {"stream_router": (count, c.hidden_size)}
        shapes |= dict.fromkeys(("stream_router_norm", "correct_scale"), (c.hidden_size,))
    return shapes


def _latent_shapes(hidden_size: int, heads: int, latent: LatentAttention) -> dict[str, tuple[int, ...]]:
    rank, query_size = latent.q_rank, heads * (latent.nope_dim + latent.rope_dim)
    compressed = {} if rank is None else {"q_a_proj": (rank, hidden_size), "q_a_norm": (rank,)}
    return {
        **compressed,
        "q_proj": (query_size, rank or hidden_size),
        "kv_proj": (latent.cell_dim, hidden_size),
        "kv_norm": (latent.kv_rank,),
        "latent_queries": (heads, latent.kv_rank, latent.nope_dim),
        "latent_values": (heads, latent.value_dim, latent.kv_rank),
        "o_proj": (hidden_size, heads * latent.value_dim),
    }


def _mixer_shapes(hidden_size: int, mixer: Mixer) -> dict[str, tuple[int, ...]]:
    conv = {"conv": (mixer.conv_width, mixer.conv_size)}
    if isinstance(mixer, ShortConvolution):
        width = mixer.conv_width
        return {**conv, "in_proj": (3 * width, hidden_size), "out_proj": (hidden_size, width)}
    if isinstance(mixer, Mamba2):
        return {
            **conv,
            "conv_bias": (mixer.conv_width,),
            "in_proj": (mixer.inner_size + mixer.conv_width + mixer.num_heads, hidden_size),  # gate, x, B, C and dt
            **dict.fromkeys(("dt_bias", "decay", "direct"), (mixer.num_heads,)),
            "mixer_norm": (mixer.inner_size,),
            "out_proj": (hidden_size, mixer.inner_size),
        }
    heads, value_size = mixer.num_value_heads, mixer.num_value_heads * mixer.head_dim
    return {
        **conv,
        "qkv_proj": (mixer.conv_width, hidden_size),
        "beta_proj": (heads, hidden_size),
        "alpha_proj": (heads, hidden_size),
        "dt_bias": (heads,),
        "decay": (heads,),
        "mixer_norm": (mixer.head_dim,),
        "z_proj": (value_size, hidden_size),
        "out_proj": (hidden_size, value_size),
    }
