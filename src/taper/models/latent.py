"""Models whose keys and values are made of latents (`LatentAttention`): Mistral Small 4, and those like DeepSeek V3.

Files of llama.cpp and folders give the same sizes by other names. Folders have one matrix for what becomes of a latent;
here it is in two parts, as in newer GGUF files: what queries are multiplied by, turned, and what makes values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ModelError
from .config import LatentAttention
from .files import Settings
from .tensors import Tensor

_UP = ".self_attn.kv_b_proj.weight"
_STORED = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
# Names in transformers.
_SIZES = {
    "kv_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, or leaves unsaid."""
    get, rope = settings.get, dict(settings.values["rope_parameters"])
    if settings.values.get("qk_head_dim") is None:
        old = f"{settings.source} has latent attention as llama.cpp stored it before it kept keys and values apart"
        raise ModelError(old, "take a newer file of this model")
    rope_dim = get("rotary_dim", int)
    if "mscale_all_dim" in rope:  # a tenth of it is there, in f32; published models have the same for `mscale`
        mscale = round(10 * Settings(rope, settings.source).get("mscale_all_dim", float), 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "norm_topk_prob": get("norm_topk_prob", bool, False),
        "qk_nope_head_dim": get("qk_head_dim", int) - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "rope_parameters": rope,
    }


def folder_settings(settings: Settings) -> dict[str, Any]:
    """What a folder says by its own names. To attention, cells are those of one head."""
    get, latent = settings.get, _latent(settings)
    if get("rope_interleave", bool, True) is not True:
        raise settings.error("rope_interleave", "rotary pairs must be neighbours")
    return {
        "head_dim": latent.cell_dim,
        "num_dense_layers": _dense_layers(settings),
        "num_key_value_heads": 1,
        "num_local_experts": get("n_routed_experts", int),
        "rotary_dim": latent.rope_dim,
    }


def _dense_layers(settings: Settings) -> int:
    """How many layers, the first ones, have no experts."""
    kinds = settings.get("mlp_layer_types", list, [])
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise settings.error("mlp_layer_types", "dense layers must come before all sparse ones")
    return dense if kinds else int(settings.get("first_k_dense_replace", int))


def _latent(settings: Settings) -> LatentAttention:
    sizes = {ours: settings.get(theirs, int) for ours, theirs in _SIZES.items()}
    rank = None if settings.values.get("q_lora_rank") is None else settings.get("q_lora_rank", int)
    for name, size in (*sizes.items(), ("q_rank", rank)):
        if size is not None and not 1 <= size <= 1 << 14:
            raise ModelError(f"{name} of latent attention is {size}; no model has that", "the file is damaged")
    return LatentAttention(q_rank=rank, **sizes)


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that other families do not have."""
    latent = _latent(settings)
    for key, expected in (("head_dim", latent.cell_dim), ("num_key_value_heads", 1)):  # of cells
        if settings.get(key, int) != expected:
            raise settings.error(key, f"with latent attention it must be {expected}")
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5 * _sharpness(settings) ** 2
    return [{"latent": latent, "attention_scale": scale}] * len(windows)


def _sharpness(settings: Settings) -> float:
    """By what YaRN multiplies all of queries and of keys, besides what it does to those that are rotated."""
    rope = Settings(
        settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}, settings.source
    )
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    factor, scale = rope.get("factor", float, 1.0), rope.get("mscale_all_dim", float, 0.0)
    return 1.0 if kind == "default" or factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rearranged(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The tensors of a folder by its names, with two in the place of each matrix of latents.

    Raises:
        ModelError: such a matrix does not fit the settings, or is quantised.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_UP):
            keys, values = _apart(name, tensor, _latent(settings), settings.get("num_attention_heads", int))
            result |= {name.replace("kv_b_proj", "k_b_proj"): keys, name.replace("kv_b_proj", "v_b_proj"): values}
        else:
            result[name] = tensor
    return result


def _apart(name: str, tensor: Tensor, latent: LatentAttention, heads: int) -> tuple[Tensor, Tensor]:
    """Of each head what queries are multiplied by [kv_rank, nope_dim], and what makes values [value_dim, kv_rank]."""
    if tensor.dtype not in _STORED:
        raise ModelError(f"tensor {name} is of type {tensor.dtype}", f"supported: {', '.join(_STORED)}")
    rows = latent.nope_dim + latent.value_dim
    if tensor.shape != (heads * rows, latent.kv_rank):
        shape = [heads * rows, latent.kv_rank]
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}; its config asks for {shape}")
    both = np.frombuffer(tensor.data.tobytes(), _STORED[tensor.dtype]).reshape(heads, rows, latent.kv_rank)
    keys, values = (
        Tensor(tensor.dtype, part.shape, np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        for part in (both[:, : latent.nope_dim].swapaxes(1, 2), both[:, latent.nope_dim :])
    )
    return keys, values
