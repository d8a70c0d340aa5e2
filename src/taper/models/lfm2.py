"""The layers of LFM2: some have attention, the others a short convolution (`ShortConvolution`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import ShortConvolution
from .files import Settings, recurrent_layers
from .tensors import Tensor

_FULL, _RECURRENT = "full_attention", "conv"


def folder_settings(settings: Settings) -> dict[str, Any]:
    """What a folder says by its own names."""
    get, count = settings.get, settings.get("num_hidden_layers", int)
    if get("conv_bias", bool, False):
        raise settings.error("conv_bias", "convolutions with biases are not supported")
    kinds = settings.values.get("layer_types")
    if kinds is None:
        attention = get("full_attn_idxs", list)
        kinds = [_FULL if layer in attention else _RECURRENT for layer in range(min(count, 1 << 12))]
    return {
        "intermediate_size": _inner_size(settings),
        "layer_types": None,
        "recurrent_layers": recurrent_layers(kinds, _RECURRENT, settings.source),
        "rms_norm_eps": get("norm_eps", float),
        "tie_word_embeddings": get("tie_embedding", bool, get("tie_word_embeddings", bool, True)),
    }


def _inner_size(settings: Settings) -> int:
    """Two thirds of what the config says, times a factor, rounded up, unless it says otherwise or has experts."""
    get = settings.get
    if settings.values.get("num_experts"):
        return int(get("intermediate_size", int))
    size: int = get("block_ff_dim", int, get("intermediate_size", int, 0))
    if get("block_auto_adjust_ff_dim", bool, True):
        multiple, factor = max(get("block_multiple_of", int, 256), 1), get("block_ffn_dim_multiplier", float, 1.0)
        if not 0 < factor < 100 or not 0 <= size < 1 << 30:
            raise settings.error("block_ffn_dim_multiplier", "no model has that")
        size = int(factor * int(2 * size / 3))
        size = multiple * -(-size // multiple)
    return size


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others need not share."""
    flags, count = settings.get("recurrent_layers", list), len(windows)
    if len(flags) != count:
        raise settings.error("layer_types", f"there must be a kind for each of {count} layers")
    size = settings.get("conv_L_cache", int)
    if not 2 <= size <= 1 << 12:
        raise settings.error("conv_L_cache", "it must be the tokens of a convolution, at least 2")
    mixer = ShortConvolution(settings.get("hidden_size", int), size)
    return [{"mixer": mixer} if is_recurrent else {} for is_recurrent in flags]
