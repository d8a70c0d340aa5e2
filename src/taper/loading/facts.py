"""A config of plain facts from what a file says of its model, the same way for every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..checks import shown
from ..errors import ModelError
from .config import LayerSpec, ModelConfig, Rope, check_config, check_layers
from .families import Family
from .model import Tensor
from .rope import scaled_rope
from .settings import Settings


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
    try:
        rope = _rope(settings, interleaved, rope_factors)
        config = _read(family, settings, tensors, rope)
    except (TypeError, ValueError, ArithmeticError) as error:  # a value of a kind that no formula expects
        raise ModelError(f"{settings.source} holds a value that makes no sense: {error}") from None
    check_config(config)
    return config


def _read(family: Family, settings: Settings, tensors: dict[str, Tensor], rope: Rope) -> ModelConfig:
    get, head_dim = settings.get, _head_dim(settings)
    count = get("num_hidden_layers", int)
    check_layers(count)
    spec = LayerSpec(
        rope=rope,
        attention_scale=max(head_dim, 1) ** -0.5,
        qkv_bias="layers.0.q_bias" in tensors,
        qk_norm=family.qk_norm,
    )
    matrices = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1)
    return ModelConfig(
        architecture=family.architecture,
        layers=(spec,) * count,
        hidden_size=get("hidden_size", int),
        intermediate_size=get("intermediate_size", int),
        num_attention_heads=get("num_attention_heads", int),
        num_key_value_heads=get("num_key_value_heads", int, get("num_attention_heads", int)),
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        max_position_embeddings=get("max_position_embeddings", int),
        rms_norm_eps=get("rms_norm_eps", float),
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        quantization=matrices.most_common(1)[0][0] if matrices else "F32",
    )


def _head_dim(settings: Settings) -> int:
    heads: int = settings.get("num_attention_heads", int)
    head_dim: int = settings.get("head_dim", int, settings.get("hidden_size", int) // max(heads, 1))
    return head_dim


def _rope(settings: Settings, interleaved: bool, factors: Sequence[float] | None) -> Rope:
    parameters: Any = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{settings.source}: rope parameters are {shown(parameters)}; they must be an object")
    theta = settings.get("rope_theta", float, parameters.get("rope_theta", 10000.0))
    rope = scaled_rope(parameters, theta, _head_dim(settings), interleaved)
    if factors is None:
        return rope
    scaled = rope.factors or (1.0,) * len(factors)
    return replace(rope, factors=tuple(a * b for a, b in zip(scaled, factors, strict=True)))
