"""What files of Granite say in their own way, and those layers of Granite 4 that have a state (`Mamba2`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ModelError
from ..policy import MAX_LAYERS
from .config import Mamba2
from .files import Settings, layers_without_heads, recurrent_layers
from .tensors import Tensor, decay_rates

_RECURRENT = "linear_attention"
_OTHER_NAMES = {"attention": "full_attention", "mamba": _RECURRENT}  # of types of layers, in published folders
_NO_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
_SIZES = {  # of `Mamba2`: names in folders, and keys of headers
    "num_heads": ("mamba_n_heads", "linear_num_value_heads"),
    "state_size": ("mamba_d_state", "linear_key_head_dim"),
    "num_groups": ("mamba_n_groups", "linear_num_key_heads"),
    "conv_size": ("mamba_d_conv", "linear_conv_kernel_dim"),
}


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, by the names there."""
    get = settings.get
    result: dict[str, Any] = {"num_local_experts": get("num_local_experts", int, 0)}
    if settings.values.get("shared_intermediate_size") is not None:
        result |= _inner_sizes(settings)
    if isinstance(settings.values.get("num_key_value_heads"), list):
        result |= layers_without_heads(settings)
    if any(result.get("recurrent_layers", ())):
        result |= {theirs: get(key, int) for theirs, key in _SIZES.values()}
        result["mamba_d_head"] = get("linear_inner_size", int) // max(result["mamba_n_heads"], 1)
    return result | (_without_positions(settings) if settings.values.get("rope_finetuned") is False else {})


def folder_settings(settings: Settings) -> dict[str, Any]:
    """What a folder of Granite 4 says by its own names."""
    get = settings.get
    kinds = [_OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in get("layer_types", list)]
    flags = recurrent_layers(kinds, _RECURRENT, settings.source)
    result = {"layer_types": None, "recurrent_layers": flags, **_inner_sizes(settings)}
    if not any(flags):
        if get("num_local_experts", int, 0):
            raise settings.error("num_local_experts", "experts are supported only beside recurrent layers")
        result["gguf_architecture"] = "granite"
    elif get("mamba_proj_bias", bool, False) or not get("mamba_conv_bias", bool, True):
        hint = "this variant is not supported"
        raise ModelError(f"{settings.source}: in recurrent layers, the convolution alone must have a bias", hint)
    elif settings.values.get("time_step_limit") not in _NO_LIMITS:
        raise settings.error("time_step_limit", "limits of time steps are not supported")
    elif settings.values.get("mamba_d_head") == "auto":
        result["mamba_d_head"] = get("mamba_expand", int) * get("hidden_size", int) // max(get("mamba_n_heads", int), 1)
    return result | (_without_positions(settings) if settings.values.get("position_embedding_type") != "rope" else {})


def _inner_sizes(settings: Settings) -> dict[str, Any]:
    """The sizes of MLPs. Where there are experts, the usual name is theirs, and that of the others is another."""
    size = settings.get("shared_intermediate_size", int)
    if not settings.values.get("num_local_experts"):
        return {"intermediate_size": size, "shared_intermediate_size": None}
    return {"intermediate_size": size, "moe_intermediate_size": settings.get("intermediate_size", int)}


def _without_positions(settings: Settings) -> dict[str, Any]:
    return {"no_rope_layers": [0] * min(settings.get("num_hidden_layers", int), MAX_LAYERS)}


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others need not share."""
    flags, count = settings.get("recurrent_layers", list), len(windows)
    if len(flags) != count:
        raise settings.error("layer_types", f"there must be a kind for each of {count} layers")
    if not any(flags):
        return [{}] * count
    sizes = {ours: settings.get(theirs, int) for ours, (theirs, _) in _SIZES.items()}
    mixer = Mamba2(**sizes, head_dim=settings.get("mamba_d_head", int))
    for name, size in (*sizes.items(), ("head_dim", mixer.head_dim)):
        if not 1 <= size <= 1 << 12:
            raise ModelError(f"{name} of recurrent layers is {size}; no model has that", "the file is damaged")
    if mixer.conv_size < 2 or mixer.num_heads % mixer.num_groups:
        raise ModelError(f"recurrent layers have {sizes}; no model has that", "the file is damaged")
    return [{"mixer": mixer} if is_recurrent else {} for is_recurrent in flags]


def rearranged(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The tensors of a folder by its names; decays are as in GGUF files."""
    return {
        name: decay_rates(name, tensor) if name.endswith(".mamba.A_log") else tensor for name, tensor in tensors.items()
    }
