"""Turns the settings in a model's files into a `ModelConfig`, in the same way for every format, and checks it."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..errors import ModelError, limited_attention, shown
from ..policy import MAX_LAYERS
from .config import Experts, LayerSpec, ModelConfig, Rope
from .families import SWITCHES, Family
from .files import Settings, head_size
from .tensors import Tensor, drop_layers


def read_config(
    family: Family,
    settings: Settings,
    tensors: dict[str, Tensor],
    interleaved: bool = False,
    rope_factors: Sequence[float] | None = None,
) -> ModelConfig:
    """The facts of a model, checked.

    Args:
        family: what the model's files leave unsaid.
        settings: what they say.
        tensors: the weights, by our names. Layers that predict further tokens (MTP) are removed, but for the first one
            of families whose MTP layers run here.
        interleaved: as in `Rope`.
        rope_factors: divisors of the rotary frequencies from a tensor, applied on top of any scaling.

    Raises:
        ModelError: a value is missing, of the wrong type, out of range or not supported.
    """
    for key, neutral in SWITCHES.items():
        if key not in family.reads and settings.values.get(key) not in (None, neutral):
            raise settings.error(key, f"Taper does not know what this means for {family.architecture} models")
    if "num_nextn_predict_layers" in family.reads:
        count = settings.get("num_hidden_layers", int)
        drop_layers(tensors, count + (family.runs_mtp and f"layers.{count}.combine_proj" in tensors))
    try:
        config = _read(family, settings, tensors, *_ropes(family, settings, interleaved, rope_factors))
    except (TypeError, ValueError, ArithmeticError) as error:  # a value of a type that no formula expects
        raise ModelError(f"{settings.source} holds a value that makes no sense: {error}") from None
    _check(config)
    return config


def _read(family: Family, settings: Settings, tensors: dict[str, Tensor], rope: Rope, local_rope: Rope) -> ModelConfig:
    get, head_dim = settings.get, head_size(settings)
    hidden, count = max(get("hidden_size", int), 0), get("num_hidden_layers", int)
    _check_count("num_hidden_layers", count, most=MAX_LAYERS)
    for key in ("hidden_act", "hidden_activation"):
        if settings.values.get(key) not in (None, family.activation):
            raise settings.error(key, f"it must be {family.activation}")
    scale = max(get("query_pre_attn_scalar", float, float(head_dim)), 1.0) ** -0.5
    spec = LayerSpec(
        rope=rope,
        attention_scale=get("attention_multiplier", float, scale),
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        qkv_bias="layers.0.q_bias" in tensors,
        o_bias="layers.0.o_bias" in tensors,
        has_sinks=family.has_sinks,
        score_cap=_optional(settings, "attn_logit_softcapping"),
        qk_norm=family.qk_norm,
    )
    experts = None if family.experts is None else _experts(family.experts, settings)
    shared = _shared_size(settings) if experts is not None and experts.beside else None
    mixture = replace(spec, experts=experts, intermediate_size=shared)
    dense = get("num_dense_layers", int, 0)  # the first so many have ordinary MLPs
    windows, has_rope = _windows(family, settings, count), _has_rope(family, settings, count)
    ropes = [(rope if window is None else local_rope) for window in windows]
    facts = family.layer_facts(settings, windows, tensors) if family.layer_facts else [{}] * count
    layers = tuple(
        replace(spec if i < dense else mixture, window=window, rope=layer_rope if positions else None, **own)
        for i, (window, layer_rope, positions, own) in enumerate(zip(windows, ropes, has_rope, facts, strict=True))
    )
    with_attention = [layer for layer in layers if layer.mixer is None]
    has_mtp = bool(with_attention) and f"layers.{count}.combine_proj" in tensors
    layers += tuple(with_attention[-1:] if has_mtp else ())  # which computes what the last one with attention does
    matrices = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1)
    return ModelConfig(
        architecture=get("gguf_architecture", str, family.architecture),
        layers=layers,
        hidden_size=hidden,
        intermediate_size=get("intermediate_size", int),
        num_attention_heads=get("num_attention_heads", int),
        num_key_value_heads=get("num_key_value_heads", int, get("num_attention_heads", int)),
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        max_position_embeddings=_context(settings),
        rms_norm_eps=get("rms_norm_eps", float),
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        quantization=matrices.most_common(1)[0][0] if matrices else "F32",
        embedding_scale=get("embedding_multiplier", float, hidden**0.5 if family.scales_embeddings else 1.0),
        residual_scale=get("residual_multiplier", float, 1.0),
        logit_scale=1.0 / get("logits_scaling", float, 1.0),
        logit_cap=_optional(settings, "final_logit_softcapping"),
        activation=family.activation,
        layer_input_size=get("hidden_size_per_layer_input", int, 0),
        has_mtp=has_mtp,
        layer_vocab_size=get("vocab_size_per_layer_input", int, get("vocab_size", int)),
        num_streams=get("altup_num_inputs", int, 1),
    )


def _optional(settings: Settings, key: str) -> float | None:
    return None if settings.values.get(key) is None else settings.get(key, float)


def _ropes(family: Family, settings: Settings, interleaved: bool, factors: Sequence[float] | None) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers with full attention, and of those with a sliding window."""
    parameters = _rope_parameters(settings)
    if "rope_local_base_freq" in family.reads:
        outer, inner = parameters.get("full_attention", parameters), parameters.get("sliding_attention")
        if "global_head_dim" in family.reads:
            outer = {"head_dim": settings.get("global_head_dim", int), **outer}
        theta = settings.get("rope_local_base_freq", float, settings.get("rope_theta", float, 10000.0))
        local = {"rope_theta": theta, **(inner or {})}
    else:
        outer = local = parameters
    if any(isinstance(value, dict) for value in outer.values()):
        raise ModelError(f"{settings.source} has rope parameters by layer type", "this variant is not supported")
    ropes = [_rope(family, settings, scaling, interleaved) for scaling in (outer, local)]
    if factors is not None:
        scaled = ropes[0].factors or (1.0,) * len(factors)
        changed = replace(ropes[0], factors=tuple(map(operator.mul, scaled, factors)))
        ropes = [changed, changed if local is outer else ropes[1]]
    return ropes[0], ropes[1]


def _rope_parameters(settings: Settings) -> dict[str, Any]:
    parameters: Any = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{settings.source}: rope parameters are {shown(parameters)}; they must be an object")
    return parameters


def _context(settings: Settings) -> int:
    """Tokens that a model was made for, as transformers documents it for each kind of rope scaling.

    `max_position_embeddings` is the length before it is scaled for "linear" and "yarn", unless the original one is
    given, and the length after it for "llama3" and "longrope". "dynamic" scaling changes with the length of a text,
    which a key-value cache cannot follow, so these models have their original length; so do those that sharpen
    attention beyond it (Ministral 3). Llama 4 sharpens it from token `floor_scale` on, and attends within chunks: its
    length ends before that token, and with the first chunk.
    """
    limit: int = settings.get("max_position_embeddings", int)
    parameters = _rope_parameters(settings)
    parameters = parameters.get("full_attention") or parameters  # by type of layer
    kind, factor = parameters.get("rope_type", parameters.get("type")), parameters.get("factor", 0.0)
    original = settings.values.get("original_max_position_embeddings")
    original = parameters.get("original_max_position_embeddings", original)
    if type(original) is int and (parameters.get(_SHARPENS) or settings.values.get(_SHARPENS)):
        return min(limit, original)
    if kind in ("linear", "yarn") and _positive(factor):
        limit = max(limit, int((original if type(original) is int else limit) * factor))
    chunk: int = settings.get("attention_chunk_size", int, limit)
    sharpens = settings.values.get("attn_temperature_tuning")
    return min(limit, chunk, int(settings.get("floor_scale", int)) - 1 if sharpens else limit)


def _rope(family: Family, settings: Settings, parameters: dict[str, Any], interleaved: bool) -> Rope:
    """The embeddings that a `rope_parameters` (or `rope_scaling`) object describes."""
    # Old files have these values beside the object, new ones inside it. transformers prefers the length beside it.
    both = Settings({**settings.values, **parameters}, settings.source)
    theta, part = both.get("rope_theta", float, 10000.0), both.get("partial_rotary_factor", float, 1.0)
    head_dim, max_positions = head_size(both), settings.get("max_position_embeddings", int)
    part = 1.0 if parameters.get("rope_type") == "proportional" else part  # it rotates the others by nothing
    dim = settings.get("rotary_dim", int, int(head_dim * part))
    if dim != head_dim and "partial_rotary_factor" not in family.reads:
        raise ModelError(f"{settings.source}: {dim} of {head_dim} dimensions of a head are rotated; all must be")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its old name
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(f"rope scaling {shown(kind)} is not supported", f"supported: {', '.join(_KINDS)}")
    needed, scaled = _KINDS[kind]
    if not all(_positive(parameters.get(key)) for key in needed):
        raise ModelError(f"rope scaling {kind!r} needs positive numbers for {', '.join(needed)}")
    if not (0 < theta < 1e12 and 2 <= dim <= 1024):
        raise ModelError(f"rope_theta is {theta} and {dim} dimensions of a head are rotated; no model has that")
    original = settings.values.get("original_max_position_embeddings")
    if original is None:
        original = parameters.get("original_max_position_embeddings", max_positions)
    if type(original) is not int or not 2 <= original <= 1 << 30:
        raise ModelError(f"original_max_position_embeddings is {shown(original)}; it must be an integer above 1")
    parameters = {**parameters, "original_max_position_embeddings": original, "max_positions": max_positions}
    parameters["truncate"] = both.get("truncate", bool, True)
    return Rope(theta, dim, interleaved, **(scaled(parameters, theta, dim) if scaled else {}))


def _experts(facts: Mapping[str, Any], settings: Settings) -> Experts | None:
    """The experts of a family with these facts; None if the model has none."""
    get = settings.get
    count = get("num_experts" if settings.values.get("num_experts") else "num_local_experts", int)
    if not count:
        return None
    experts = Experts(
        num_experts=count,
        num_experts_per_tok=get("num_experts_per_tok", int),
        intermediate_size=get("moe_intermediate_size", int, get("intermediate_size", int)),
        norm_topk_prob=get("norm_topk_prob", bool, True),
        scale=get("routed_scaling_factor", float, 1.0),
        clamp=(get("swiglu_alpha", float), get("swiglu_limit", float)) if facts.get("clamp") else None,
        **{name: fact for name, fact in facts.items() if name != "clamp"},
    )
    expected = _GATING_FUNCTIONS[experts.scores]
    if get("expert_gating_func", int, expected) != expected:
        raise settings.error("expert_gating_func", f"it must be {expected}, which is {experts.scores}")
    return experts if not experts.beside or _shared_size(settings) else replace(experts, beside="")


_GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}  # as GGUF headers number them


def _shared_size(settings: Settings) -> int:
    """The size of the MLP beside the experts: given, or that of so many experts."""
    number, size = settings.get("n_shared_experts", int, 0), settings.get("moe_intermediate_size", int)
    given: int = settings.get("shared_intermediate_size", int, 0)
    return given or min(max(number, 0), 1 << 12) * size


def _windows(family: Family, settings: Settings, count: int) -> list[int | None]:
    """The sliding window of each layer; None for full attention."""
    kinds = settings.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise settings.error("layer_types", "it must be a list")
    if family.slides is None:
        if attention := limited_attention(SimpleNamespace(**{"use_sliding_window": False, **settings.values})):
            unsupported = f"{attention} attention, which {family.architecture} models do not have"
            raise ModelError(f"{settings.source} asks for {unsupported}", "this variant is not supported")
        return [None] * count
    window = settings.get("sliding_window", int, 0) if settings.get("use_sliding_window", bool, True) else 0
    if not kinds:
        return [window if window and family.slides(settings, layer) else None for layer in range(count)]
    if len(kinds) != count or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise settings.error("layer_types", f"each of {count} layers must be full_attention or sliding_attention")
    if "sliding_attention" in kinds and not window:
        raise settings.error("sliding_window", "layers with sliding attention need one")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _has_rope(family: Family, settings: Settings, count: int) -> list[bool]:
    """Whether each layer has rotary embeddings."""
    listed = settings.values.get("no_rope_layers")  # despite its name, 1 where a layer has them
    if listed is None and not family.no_rope_interval:
        return [True] * count
    if listed is None:
        interval = settings.get("no_rope_layer_interval", int, family.no_rope_interval)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(flag in (0, 1) for flag in listed):
        raise settings.error("no_rope_layers", f"it must be a list of 0 or 1 for each of {count} layers")
    return [bool(flag) for flag in listed[:count]]


def _positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and 0 < number < 1e6


def _linear(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    return {"factors": (float(parameters["factor"]),) * (dim // 2)}


def _proportional(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Rotate the first `partial_rotary_factor` of all pairs, at the frequencies that they have among all."""
    rotated, pairs = int(parameters.get("partial_rotary_factor", 1.0) * dim // 2), dim // 2
    return {"factors": (float(parameters.get("factor", 1.0)),) * rotated + (_NO_TURN,) * (pairs - rotated)}


def _llama3(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Divide long wavelengths by `factor`, keep short ones, and blend those between."""
    original = parameters["original_max_position_embeddings"]
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / ((high - low) or 1e-9)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return {"factors": tuple(factors)}


def _yarn(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Keep pairs that turn often and divide those that turn seldom by `factor` (YaRN, arXiv 2309.00071)."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    fast, slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(1.0, max(0.0, (pair - low) / ((high - low) or 0.001))) for pair in range(dim // 2)]
    attention = parameters.get("attention_factor")
    if attention is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        above, below = (above, below) if above and below else (1.0, 0.0)
        attention = _yarn_scale(factor, above) / _yarn_scale(factor, below)
    return {"factors": tuple(1.0 / (part / factor + 1.0 - part) for part in ramp), "attention_factor": float(attention)}


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(parameters: dict[str, Any], theta: float, dim: int) -> dict[str, Any]:
    """Two tables of divisors, found by search (LongRoPE, arXiv 2402.13753)."""
    keys = ("short_factor", "long_factor")
    tables: list[Any] = [parameters.get(key) for key in keys]
    if not all(isinstance(table, list) and all(map(_positive, table)) for table in tables):
        raise ModelError(f"rope scaling 'longrope' needs lists of positive numbers for {', '.join(keys)}")
    original, attention = parameters["original_max_position_embeddings"], parameters.get("attention_factor")
    factor = parameters.get("factor") or parameters["max_positions"] / original
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (tuple(map(float, table)) for table in tables)
    more = {"original_context": original, "attention_factor": float(attention)}
    return {"factors": short, "long_factors": long, **more}


_SHARPENS = "llama_4_scaling_beta"
_NO_TURN = 1e30  # as files of llama.cpp write it
_Scaled = Callable[[dict[str, Any], float, int], dict[str, Any]]
# By kind: the numbers that it needs, and the fields of `Rope` that it makes of them.
_KINDS: dict[str, tuple[tuple[str, ...], _Scaled | None]] = {
    "default": ((), None),
    "linear": (("factor",), _linear),
    "proportional": ((), _proportional),
    "dynamic": (("factor",), None),  # the frequencies change beyond the trained length, which is not offered
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (("factor",), _yarn),
    "longrope": ((), _longrope),
}


def _check(config: ModelConfig) -> None:
    """Reject numbers that no real model has, or that contradict each other, before anything is sized by them."""
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        _check_count(name, getattr(config, name))
    _check_count("num_attention_heads", config.num_attention_heads, most=1 << 16)
    _check_count("head_dim", config.head_dim, most=1024)
    for name in ("rms_norm_eps", "embedding_scale", "residual_scale", "logit_scale", "logit_cap"):
        _check_positive(name, getattr(config, name))
    for sizes in {config.sizes(layer) for layer in range(len(config.layers))}:
        _check_count("head_dim", sizes.head_dim, most=1024)
        _check_count("num_key_value_heads", sizes.num_key_value_heads)
        if config.num_attention_heads % sizes.num_key_value_heads:
            heads = f"{config.num_attention_heads} heads and {sizes.num_key_value_heads} key-value heads"
            raise ModelError(f"{heads}: the first must be a multiple of the second")
    if config.layer_input_size:
        _check_count("hidden_size_per_layer_input", config.layer_input_size, most=1 << 16)
        _check_count("vocab_size_per_layer_input", config.layer_vocab_size)
    _check_count("altup_num_inputs", config.num_streams, most=1 << 8)
    if len({spec.mixer for spec in config.layers} - {None}) > 1:
        raise ModelError("recurrent layers differ in their sizes", "this variant is not supported")
    for spec in set(config.layers):
        for name in ("attention_scale", "score_cap"):
            _check_positive(name, getattr(spec, name))
        if not math.isfinite(spec.output_scale):
            raise ModelError(f"a layer's output is multiplied by {spec.output_scale}", "the file is damaged")
        if spec.window is not None:
            _check_count("sliding_window", spec.window)
        if spec.laurel_rank:
            _check_count("laurel_rank", spec.laurel_rank)
        if spec.experts is not None:
            _check_experts(spec.experts)
        if spec.rope is not None:
            _check_rope(spec.rope, spec.head_dim or config.head_dim)


def _check_experts(experts: Experts) -> None:
    _check_count("num_experts", experts.num_experts, most=1 << 12)
    for name in ("num_experts_per_tok", "intermediate_size"):
        _check_count(name, getattr(experts, name))
    if experts.num_experts_per_tok > experts.num_experts:
        chosen = f"{experts.num_experts_per_tok} of {experts.num_experts} experts"
        raise ModelError(f"a token cannot have {chosen}", "the file is damaged")
    _check_positive("routed_scaling_factor", experts.scale)
    for name, number in zip(("swiglu_alpha", "swiglu_limit"), experts.clamp or (), strict=False):
        _check_positive(name, number)


def _check_rope(rope: Rope, head_dim: int) -> None:
    _check_positive("attention_factor", rope.attention_factor)  # `_rope` has checked theta and the original context
    if rope.dim % 2 or rope.dim > head_dim:
        raise ModelError(f"{rope.dim} dimensions of a head are rotated; it must be an even number up to {head_dim}")
    for factors in (rope.factors, rope.long_factors):
        if factors is not None and not (len(factors) == rope.dim // 2 and all(0 < f < math.inf for f in factors)):
            raise ModelError(f"rope factors must be {rope.dim // 2} positive numbers")


def _check_count(name: str, value: int, most: int = 1 << 30) -> None:
    if not 1 <= value <= most:
        raise ModelError(f"{name} is {value}; no model has that", "the file is damaged or not a model")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and 0 < value < 1e12):
        raise ModelError(f"{name} is {value}; it must be a positive number")
