"""How the layers of Llama 4 differ, and how GGUF headers and folders say it.

Some layers have experts beside a shared one, the others a larger MLP. Layers with positions norm queries and keys
without weights; here the weights are ones. They attend within chunks, and layers without positions sharpen attention
from some token on: contexts here end before either matters (`read_config`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policy import MAX_LAYERS
from .files import Settings, head_size
from .tensors import Tensor

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_CHUNK_SIZE, _WITHOUT_NORMS = 8192, 128  # as llama.cpp has them; the second is a number of experts
_STORED = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, or leaves unsaid."""
    get = settings.get
    full = settings.values.get("sliding_window") == 0  # everywhere; then all layers have positions
    return {
        "attention_chunk_size": None if full else _CHUNK_SIZE,
        "attn_temperature_tuning": not full,
        "floor_scale": _CHUNK_SIZE,
        "moe_layers": _layers_with_experts(settings, get("decoder_sparse_step", int)),
        "no_rope_layers": [int(full or flag) for flag in _positions(settings)],
        "norm_topk_prob": False,
        "shared_intermediate_size": get("moe_intermediate_size", int),
        "sliding_window": None,
        "use_qk_norm": get("num_local_experts", int) != _WITHOUT_NORMS,
    }


def folder_settings(settings: Settings) -> dict[str, Any]:
    """What a folder says by its own names. Chunks and sharper attention count where a layer has them."""
    get = settings.get
    kinds, positions = get("layer_types", list, []), get("no_rope_layers", list, []) or _positions(settings)
    if not all(kind in (_CHUNKED, _FULL) for kind in kinds):
        raise settings.error("layer_types", f"each layer must be {_CHUNKED} or {_FULL}")
    for key, least in (("attention_chunk_size", 1), ("floor_scale", 2)):
        if get(key, int, least) < least:
            raise settings.error(key, f"it must be at least {least}")
    has_chunks = _CHUNKED in kinds if kinds else any(positions)
    size, with_experts = get("intermediate_size", int), settings.values.get("moe_layers")
    if with_experts is None:
        with_experts = _layers_with_experts(settings, get("interleave_moe_layer_step", int))
    return {
        "attention_chunk_size": settings.values.get("attention_chunk_size") if has_chunks else None,
        "attn_temperature_tuning": bool(settings.values.get("attn_temperature_tuning")) and not all(positions),
        "intermediate_size": get("intermediate_size_mlp", int),
        "layer_types": None,
        "moe_intermediate_size": size,
        "moe_layers": with_experts,
        "no_rope_layers": positions,
        "shared_intermediate_size": size,
    }


def _layers_with_experts(settings: Settings, step: int) -> list[int]:
    count = settings.get("num_hidden_layers", int)
    return [layer for layer in range(min(count, MAX_LAYERS)) if step > 0 and (layer + 1) % step == 0]


def _positions(settings: Settings) -> list[int]:
    """Whether each layer has them, where nothing else is said: every fourth has not."""
    count, interval = settings.get("num_hidden_layers", int), settings.get("no_rope_layer_interval", int, 4)
    if interval < 1:
        raise settings.error("no_rope_layer_interval", "it must be at least 1")
    return [int((layer + 1) % interval != 0) for layer in range(min(count, MAX_LAYERS))]


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others need not share. Adds the weights of norms to the tensors."""
    with_experts, positions = settings.get("moe_layers", list), settings.get("no_rope_layers", list)
    ones = np.ones(head_size(settings), np.float32)
    norm = Tensor("F32", ones.shape, ones.view(np.uint8))
    facts: list[dict[str, Any]] = []
    for layer in range(len(windows)):
        is_normed = settings.get("use_qk_norm", bool) and bool(positions[layer])
        if is_normed:
            tensors |= {f"layers.{layer}.{name}_norm": norm for name in "qk"}
        dense = {} if layer in with_experts else {"experts": None, "intermediate_size": None}
        facts.append({"qk_norm": "rotated" if is_normed else "", **dense})
    return facts


def rearranged(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The tensors of a folder by its names, with the matrices of experts turned: there, columns are outputs."""
    return {name: _turned(tensor) if ".experts." in name else tensor for name, tensor in tensors.items()}


def _turned(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _STORED or len(tensor.shape) != 3:
        return tensor  # refused later
    matrices = tensor.data.view(_STORED[tensor.dtype]).reshape(tensor.shape).swapaxes(1, 2)
    return Tensor(tensor.dtype, matrices.shape, np.ascontiguousarray(matrices).reshape(-1).view(np.uint8))
