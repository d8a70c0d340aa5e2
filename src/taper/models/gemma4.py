"""How the layers of Gemma 4 differ, and how GGUF headers and folders say it.

Layers with full attention have larger heads, or fewer of them for keys, which may be their values too. The last layers
have no keys and values of their own: they attend to those of the last layer of their kind that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ModelError
from .config import Experts
from .files import Settings
from .tensors import Tensor, as_f32

SLIDING, FULL = "sliding_attention", "full_attention"
_HEADS = ("head_dim", "num_key_value_heads")


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, by the names there; lists have an item for each layer."""
    heads, inner = (by_layer(settings, key) for key in ("num_key_value_heads", "intermediate_size"))
    kinds = layer_types(settings)
    size, local_size = settings.get("head_dim", int), settings.get("sliding_head_dim", int)
    for key, expected in (("rotary_dim", size), ("sliding_rotary_dim", local_size)):
        if settings.get(key, int, expected) != expected:
            raise settings.error(key, f"it must be {expected}")
    of_kind = [[n for n, own in zip(heads, kinds, strict=False) if own == kind] for kind in (SLIDING, FULL)]
    sliding, full = (numbers[0] if numbers else heads[0] for numbers in of_kind)
    return {
        "attention_multiplier": 1.0,
        "enable_moe_block": bool(settings.values.get("num_local_experts")),
        "global_head_dim": size,
        "head_dim": local_size,
        "intermediate_size": inner[0],
        "layer_types": kinds,
        "num_global_key_value_heads": full,
        "num_key_value_heads": sliding,
        "rope_local_base_freq": settings.get("rope_local_base_freq", float, 1e4),
        "rotary_dim": None,
        "top_k_experts": settings.values.get("num_experts_per_tok"),
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
    }


def layer_types(settings: Settings) -> list[str]:
    """The kind of each layer, of a header that says which ones have a sliding window."""
    slides = settings.get("sliding_window_pattern", list)
    if not slides or not all(type(flag) is bool for flag in slides):
        raise settings.error("sliding_window_pattern", "it must say of each layer whether it has a sliding window")
    return [SLIDING if flag else FULL for flag in slides]


def folder_settings(settings: Settings) -> dict[str, Any]:
    """The sizes of heads in layers with full attention, which newer folders give for each layer."""
    given = settings.values.get("per_layer_config")
    if given is None:
        counts = settings.values if settings.get("attention_k_eq_v", bool, False) else {}
        return {"num_global_key_value_heads": counts.get("num_global_key_value_heads")}
    kinds = settings.get("layer_types", list)
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL}
    sizes = list(given.values()) if isinstance(given, dict) else []
    if not sizes or full != set(given) or not all(_gives_heads(size) and size == sizes[0] for size in sizes):
        raise settings.error("per_layer_config", f"it must give all layers of {FULL} the same {' and '.join(_HEADS)}")
    heads = Settings(sizes[0], settings.source)
    return {
        "global_head_dim": heads.get("head_dim", int, settings.get("head_dim", int)),
        "num_global_key_value_heads": heads.values.get("num_key_value_heads"),
    }


def _gives_heads(size: Any) -> bool:
    return isinstance(size, dict) and not size.keys() - set(_HEADS)


def by_layer(settings: Settings, key: str) -> list[int]:
    """A setting that may have one value for each layer."""
    value = settings.values.get(key)
    values: list[Any] = value if isinstance(value, list) else [value]
    if not values or not all(type(number) is int and number > 0 for number in values):
        raise settings.error(key, "it must be a positive number, or one for each layer")
    return values


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others of the model need not share. Removes the scales from the tensors."""
    get, inner = settings.get, settings.get("intermediate_size", int)
    facts = []
    for layer, lender in enumerate(lenders(settings, windows)):
        full, borrows = windows[layer] is None, lender is not None
        facts.append(
            {
                "head_dim": get("global_head_dim", int) if full else None,
                "num_key_value_heads": _heads(settings) if full else None,
                "keys_are_values": full and f"layers.{layer}.v_proj" not in tensors and not borrows,
                "cells_of": lender,
                "v_norm": True,
                "intermediate_size": 2 * inner if borrows and get("use_double_wide_mlp", bool, False) else None,
                "experts": _experts(settings) if get("enable_moe_block", bool, False) else None,
                "output_scale": _scale(tensors.pop(f"layers.{layer}.output_scale", None)),
            }
        )
    return facts


def lenders(settings: Settings, windows: Sequence[int | None]) -> list[int | None]:
    """To whose keys and values each layer attends: None for its own, else the last layer of its kind that has some."""
    count, shared = len(windows), settings.get("num_kv_shared_layers", int, 0)
    if not 0 <= shared < count:
        raise settings.error("num_kv_shared_layers", f"some of {count} layers must have keys and values of their own")
    own = count - shared
    last = {window is None: layer for layer, window in enumerate(windows[:own])}
    if any((window is None) not in last for window in windows[own:]):
        raise settings.error("num_kv_shared_layers", "layers of both kinds must have keys and values of their own")
    return [None] * own + [last[window is None] for window in windows[own:]]


def _heads(settings: Settings) -> int | None:
    return settings.get("num_global_key_value_heads", int, 0) or None


def _experts(settings: Settings) -> Experts:
    count = settings.get("num_experts" if settings.values.get("num_experts") else "num_local_experts", int)
    return Experts(
        count, settings.get("top_k_experts", int), settings.get("moe_intermediate_size", int), beside="normed"
    )


def _scale(tensor: Tensor | None) -> float:
    if tensor is None:
        return 1.0
    if tensor.shape != (1,) or tensor.dtype not in ("F32", "F16", "BF16"):
        raise ModelError("the scale of a layer's output is not a single number", "the file is damaged")
    return float(as_f32(tensor)[0])
