"""How the layers of Gemma 3n differ, and how GGUF headers and folders say it.

The last layers attend to keys and values of earlier ones, as in Gemma 4. The first ones cut most of their MLP's gates:
folders say which part, headers how many standard deviations that is, of a normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from .files import Settings
from .gemma4 import by_layer, layer_types, lenders
from .tensors import Tensor

STREAMS = 4  # of all published models, and the only number that GGUF files can have
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where the settings do not say
_DIGITS = 6  # of a part whose quantile was stored in f32
_UNSAID = {"altup_num_inputs": STREAMS, "final_logit_softcapping": 30.0, "laurel_rank": 64, "rope_local_base_freq": 1e4}


def gguf_settings(settings: Settings) -> dict[str, Any]:
    """What a header says in another way than config.json, or leaves unsaid, by the names there."""
    cutoffs = settings.values.get("activation_sparsity_scale")
    if cutoffs is not None:
        if not isinstance(cutoffs, list) or not all(type(cutoff) is float for cutoff in cutoffs):
            raise settings.error("activation_sparsity_scale", "it must be a number for each layer")
        cutoffs = [round(NormalDist().cdf(cutoff), _DIGITS) for cutoff in cutoffs]
    return {
        **{key: value for key, value in _UNSAID.items() if settings.values.get(key) is None},
        **_inner_sizes(settings),
        "activation_sparsity_pattern": cutoffs,
        "attention_multiplier": 1.0,
        "layer_types": layer_types(settings),
    }


def folder_settings(settings: Settings) -> dict[str, Any]:
    """What a folder says by its own names."""
    if settings.get("altup_correct_scale", bool, True) is not True:
        raise settings.error("altup_correct_scale", "it must be true")
    return {**_inner_sizes(settings), "query_pre_attn_scalar": None}  # of which nothing is made


def _inner_sizes(settings: Settings) -> dict[str, Any]:
    sizes = by_layer(settings, "intermediate_size")
    return {"intermediate_size": sizes[0], "intermediate_sizes": sizes}


def layer_facts(settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each `LayerSpec` that others need not share. Removes keys and values that no layer attends to."""
    get, count = settings.get, len(windows)
    for key, number in (("altup_num_inputs", STREAMS), ("altup_active_idx", 0)):
        if get(key, int, 0) != number:
            raise settings.error(key, f"it must be {number}")
    first, inner = get("intermediate_size", int), get("intermediate_sizes", list)
    inner = inner * count if len(inner) == 1 else inner
    sparsity = settings.values.get("activation_sparsity_pattern")
    if sparsity is None:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        sparsity = [_SPARSITY] * sparse + [0.0] * (count - sparse)
    for key, values in (("intermediate_size", inner), ("activation_sparsity_pattern", sparsity)):
        if not isinstance(values, list) or len(values) != count:
            raise settings.error(key, f"there must be one for each of {count} layers")
    if not all(type(part) in (int, float) and 0 <= part < 1 for part in sparsity):
        raise settings.error("activation_sparsity_pattern", "the part of a layer's gates must be from 0 to below 1")
    facts = []
    for layer, lender in enumerate(lenders(settings, windows)):
        if lender is not None:
            for name in ("k_proj", "v_proj", "k_norm"):  # files have them nevertheless
                tensors.pop(f"layers.{layer}.{name}", None)
        facts.append(
            {
                "cells_of": lender,
                "v_norm": True,
                "laurel_rank": get("laurel_rank", int),
                "sparsity": float(sparsity[layer]),
                "intermediate_size": None if inner[layer] == first else inner[layer],
            }
        )
    return facts
