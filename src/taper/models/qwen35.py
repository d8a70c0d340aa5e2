"""The layers of Qwen 3.5 and 3.6: some have attention with a gate, the others a state (`DeltaNet`).

GGUF files order value heads by the place of each within those that read the same key head; folders by key head. Here
they are as in GGUF files, as ggml wants them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ModelError
from ..policy import MAX_LAYERS
from .config import DeltaNet
from .files import Settings, recurrent_layers
from .tensors import WEIGHT_TYPES, Tensor, decay_rates

_FULL, _RECURRENT = "full_attention", "linear_attention"
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d{1,3})\.")
_MTP = {  # names in folders -> as if they were in the layer, as other families have them
    "mtp.fc.weight": "mtp.layers.0.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "mtp.layers.0.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "mtp.layers.0.hnorm.weight",
    "mtp.norm.weight": "mtp.layers.0.shared_head.norm.weight",
}
_INTERVAL = 4  # every so many layers, one has attention


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, by the names there."""
    get = settings.get
    count = get("num_hidden_layers", int)
    heads, inner = get("linear_num_value_heads", int), get("linear_inner_size", int)
    if heads < 1 or inner % heads:
        raise settings.error("linear_inner_size", f"it must be a multiple of {heads} heads")
    kinds = _layer_types(count, get("full_attention_interval", int, _INTERVAL))
    shared = get("shared_intermediate_size", int, 0)  # of files with experts, whose layers have no other MLP
    sizes = {"intermediate_size": shared} if shared else {}
    return {"linear_value_head_dim": inner // heads, **sizes, **_flags(kinds, settings)}


def folder_settings(settings: Settings) -> dict[str, Any]:
    """Which layers of a folder have a state."""
    if settings.values.get("attn_output_gate", True) is not True:
        raise settings.error("attn_output_gate", "attention without gates is not supported here")
    count = settings.get("num_hidden_layers", int)
    kinds = settings.values.get("layer_types")
    kinds = kinds or _layer_types(count, settings.get("full_attention_interval", int, _INTERVAL))
    shared = settings.get("shared_expert_intermediate_size", int, 0)
    sizes = {"intermediate_size": shared, "shared_intermediate_size": shared} if shared else {}
    return {"shared_expert_intermediate_size": None, **sizes, **_flags(kinds, settings)}


def _layer_types(count: int, interval: int) -> list[str]:
    if not 0 < count <= MAX_LAYERS or interval < 1:
        raise ModelError(f"attention in every {interval}. of {count} layers makes no sense", "the file is damaged")
    return [_RECURRENT if (layer + 1) % interval else _FULL for layer in range(count)]


def _flags(kinds: Any, settings: Settings) -> dict[str, Any]:
    return {"layer_types": None, "recurrent_layers": recurrent_layers(kinds, _RECURRENT, settings.source)}


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others need not share."""
    flags, count = settings.get("recurrent_layers", list), len(windows)
    if len(flags) != count:
        raise settings.error("layer_types", f"it must have an item for each of {count} layers")
    mixer = _mixer(settings)
    return [{"mixer": mixer} if is_recurrent else {"output_gate": True} for is_recurrent in flags]


def _mixer(settings: Settings) -> DeltaNet:
    sizes = {
        name: settings.get(f"linear_{key}", int)
        for name, key in (
            ("num_key_heads", "num_key_heads"),
            ("num_value_heads", "num_value_heads"),
            ("head_dim", "key_head_dim"),
            ("conv_size", "conv_kernel_dim"),
        )
    }
    mixer = DeltaNet(**sizes)
    for name, size in sizes.items():
        if not 1 <= size <= 1 << 12:
            raise ModelError(f"{name} of recurrent layers is {size}; no model has that", "the file is damaged")
    if mixer.conv_size < 2 or mixer.num_value_heads % mixer.num_key_heads:
        raise ModelError(f"recurrent layers have {sizes}; no model has that", "the file is damaged")
    if settings.get("linear_value_head_dim", int) != mixer.head_dim:
        raise settings.error("linear_value_head_dim", f"heads of keys have {mixer.head_dim} dimensions, so must these")
    return mixer


def rearranged(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The tensors of a folder by its names, in the layout of GGUF files; the MTP layer follows the others.

    Raises:
        ModelError: the shapes of recurrent layers do not fit their settings.
    """
    mixer = _mixer(settings)
    keys, dim = 2 * mixer.num_key_heads * mixer.head_dim, mixer.head_dim
    count, result = settings.get("num_hidden_layers", int), {}
    for name, tensor in tensors.items():
        part = name.partition(".linear_attn.")[2]
        name = _MTP_LAYER.sub(lambda match: f"model.layers.{count + int(match[1])}.", _MTP.get(name, name))
        if part == "A_log":
            tensor = decay_rates(name, tensor)
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = _reordered(name, tensor, mixer, dim, keys)
        elif part == "in_proj_z.weight":
            tensor = _reordered(name, tensor, mixer, dim)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            tensor = _reordered(name, tensor, mixer, 1)
        elif part == "out_proj.weight":
            tensor = _reordered(name, tensor, mixer, dim, axis=1)
        result[name] = tensor
    return result


def _misshapen(name: str, tensor: Tensor) -> ModelError:
    return ModelError(f"tensor {name} has shape {list(tensor.shape)}, which does not fit its config")


def _reordered(name: str, tensor: Tensor, mixer: DeltaNet, size: int, before: int = 0, axis: int = 0) -> Tensor:
    """Value heads, each `size` rows or columns after the first `before`, by their place within a key head."""
    if tensor.dtype not in WEIGHT_TYPES or WEIGHT_TYPES[tensor.dtype][1] != 1:
        raise ModelError(f"tensor {name} is of type {tensor.dtype}", "supported: F32, F16, BF16")
    heads, groups = mixer.num_value_heads, mixer.num_key_heads
    if len(tensor.shape) <= axis or tensor.shape[axis] != before + heads * size:
        raise _misshapen(name, tensor)
    order = np.arange(heads * size).reshape(groups, heads // groups, size).swapaxes(0, 1).reshape(-1)
    order = np.concatenate((np.arange(before), before + order))
    bits = {2: np.uint16, 4: np.uint32}[WEIGHT_TYPES[tensor.dtype][2]]
    values = np.frombuffer(tensor.data.tobytes(), bits).reshape(tensor.shape)
    return Tensor(tensor.dtype, tensor.shape, np.ascontiguousarray(values.take(order, axis)).reshape(-1).view(np.uint8))
