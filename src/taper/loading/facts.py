"""A config of plain facts from what a file says of its model, the same way for every format."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..checks import limited_attention, shown
from ..errors import ModelError
from .config import Experts, LayerSpec, ModelConfig, Rope, check_config, check_layers
from .families import SWITCHES, Family
from .model import Tensor
from .rope import scaled_rope
from .settings import Settings, head_size


def read_config(
    family: Family,
    settings: Settings,
    tensors: dict[str, Tensor],
    interleaved: bool = False,
    rope_factors: Sequence[float] | None = None,
) -> ModelConfig:
    """The facts of a model, checked.

    Args:
        family: what its files leave unsaid.
        settings: what they say.
        tensors: its weights, by our names.
        interleaved: as in `Rope`.
        rope_factors: divisors of frequencies that stand in a tensor, on top of any scaling.

    Raises:
        ModelError: a value is missing, of the wrong kind, out of range or not supported.
    """
    for key, neutral in SWITCHES.items():
        if key not in family.reads and settings.values.get(key) not in (None, neutral):
            raise settings.error(key, f"Taper does not know what this means for {family.architecture} models")
    try:
        ropes = _ropes(family, settings, interleaved, rope_factors)
        config = _read(family, settings, tensors, *ropes)
    except (TypeError, ValueError, ArithmeticError) as error:  # a value of a kind that no formula expects
        raise ModelError(f"{settings.source} holds a value that makes no sense: {error}") from None
    check_config(config)
    return config


def _read(family: Family, settings: Settings, tensors: dict[str, Tensor], rope: Rope, local_rope: Rope) -> ModelConfig:
    get, head_dim = settings.get, head_size(settings)
    hidden, count = max(get("hidden_size", int), 0), get("num_hidden_layers", int)
    check_layers(count)
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
        qk_norm=family.qk_norm,
        experts=_experts(settings) if family.experts else None,
    )
    windows, positions = _windows(family, settings, count), _positions(family, settings, count)
    by_window = zip((rope if window is None else local_rope for window in windows), positions, strict=True)
    ropes = [each if there else None for each, there in by_window]
    matrices = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1)
    return ModelConfig(
        architecture=family.architecture,
        layers=tuple(replace(spec, window=window, rope=each) for window, each in zip(windows, ropes, strict=True)),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size", int),
        num_attention_heads=get("num_attention_heads", int),
        num_key_value_heads=get("num_key_value_heads", int, get("num_attention_heads", int)),
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        max_position_embeddings=get("max_position_embeddings", int),
        rms_norm_eps=get("rms_norm_eps", float),
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        quantization=matrices.most_common(1)[0][0] if matrices else "F32",
        embedding_scale=get("embedding_multiplier", float, hidden**0.5 if family.scales_embeddings else 1.0),
        residual_scale=get("residual_multiplier", float, 1.0),
        logit_scale=1.0 / get("logits_scaling", float, 1.0),
        activation=family.activation,
    )


def _ropes(family: Family, settings: Settings, interleaved: bool, factors: Sequence[float] | None) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers that attend to all, and of those with a window."""
    parameters: Any = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{settings.source}: rope parameters are {shown(parameters)}; they must be an object")
    if "rope_local_base_freq" in family.reads:
        outer, inner = parameters.get("full_attention", parameters), parameters.get("sliding_attention")
        local = {"rope_theta": settings.get("rope_local_base_freq", float), **(inner or {})}
    else:
        outer = local = parameters
    if any(isinstance(value, dict) for value in outer.values()):
        raise ModelError(f"{settings.source} gives layers other rope parameters", "this variant is not supported")
    ropes = [_rope(family, settings, each, interleaved) for each in (outer, local)]
    if factors is not None:
        scaled = ropes[0].factors or (1.0,) * len(factors)
        ropes = [replace(rope, factors=tuple(map(operator.mul, scaled, factors))) for rope in ropes]
    return ropes[0], ropes[1]


def _rope(family: Family, settings: Settings, parameters: dict[str, Any], interleaved: bool) -> Rope:
    # Old files have these beside the object, new ones inside it; transformers prefers the length beside it.
    both = Settings({**settings.values, **parameters}, settings.source)
    theta, part = both.get("rope_theta", float, 10000.0), both.get("partial_rotary_factor", float, 1.0)
    if (original := settings.values.get("original_max_position_embeddings")) is not None:
        parameters = {**parameters, "original_max_position_embeddings": original}
    head_dim = head_size(settings)
    dim = settings.get("rotary_dim", int, int(head_dim * part))
    if dim != head_dim and "partial_rotary_factor" not in family.reads:
        raise ModelError(f"{settings.source}: {dim} of {head_dim} dimensions of a head are rotated; it must be all")
    return scaled_rope(parameters, theta, dim, interleaved, settings.get("max_position_embeddings", int))


def _experts(settings: Settings) -> Experts:
    count = settings.get("num_experts" if settings.values.get("num_experts") else "num_local_experts", int)
    return Experts(
        num_experts=count,
        num_experts_per_tok=settings.get("num_experts_per_tok", int),
        intermediate_size=settings.get("moe_intermediate_size", int, settings.get("intermediate_size", int)),
        norm_topk_prob=settings.get("norm_topk_prob", bool, True),
    )


def _windows(family: Family, settings: Settings, count: int) -> list[int | None]:
    """The window of each layer's attention; None where it attends to all."""
    kinds = settings.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise settings.error("layer_types", "it must be a list")
    if family.slides is None:
        if attention := limited_attention(SimpleNamespace(**{"use_sliding_window": False, **settings.values})):
            message = (
                f"{settings.source} asks for {attention} attention, which {family.architecture} models do not have"
            )
            raise ModelError(message, "this variant is not supported")
        return [None] * count
    window = settings.get("sliding_window", int, 0) if settings.get("use_sliding_window", bool, True) else 0
    if not kinds:
        return [window if window and family.slides(settings, layer) else None for layer in range(count)]
    if len(kinds) != count or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise settings.error("layer_types", f"each of {count} layers must be full_attention or sliding_attention")
    if "sliding_attention" in kinds and not window:
        raise settings.error("sliding_window", "layers with sliding attention need one")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _positions(family: Family, settings: Settings, count: int) -> list[bool]:
    """Whether the attention of each layer has positions."""
    if not family.no_rope_interval:
        return [True] * count
    listed = settings.values.get("no_rope_layers")  # in spite of its name, 1 where a layer has them
    if listed is None:
        interval = settings.get("no_rope_layer_interval", int, family.no_rope_interval)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(one in (0, 1) for one in listed):
        raise settings.error("no_rope_layers", f"it must be a list of 0 or 1 for each of {count} layers")
    return [bool(one) for one in listed[:count]]
