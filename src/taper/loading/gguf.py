"""Models from GGUF files: metadata into a config, tensors by our names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ModelError
from .facts import read_config
from .families import ARCHITECTURES, MODEL_TYPES, Family, find_family
from .gguf_file import DAMAGED, GGUFFile, read_gguf
from .model import LoadedModel, Tensor, check_tensors, split_fused
from .settings import Settings, head_size
from .tokenizer_files import tokenizer_from_gguf

# Keys of a header, without the architecture before them -> transformers' names.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_ROPE_KEYS = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys that say nothing more of what the model computes, or are checked by themselves.
_OTHER_KEYS = (
    "attention.causal",
    "attention.value_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
)
_ROPE_TABLES = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
# Rotary tables that some converters leave behind; they are computed from the config instead.
_UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd", "attn_rot_embd.weight")


def load_gguf(path: Path) -> LoadedModel:
    """Read a model from a GGUF file; weights stay in the mapped file.

    Raises:
        ModelError: the file is damaged, or the model is not supported.
    """
    file = read_gguf(path)
    architecture = file.get("general.architecture", str)
    # Files of Mixtral say llama.
    mixture = architecture == "llama" and file.metadata.get("llama.expert_count")
    family = MODEL_TYPES["mixtral"] if mixture else find_family(architecture, ARCHITECTURES)
    names = family.gguf_names
    tensors = names.rename({name: t for name, t in file.tensors.items() if not name.endswith(_UNUSED_SUFFIXES)})
    factors = _rope_table(file, tensors, "rope_freqs.weight")
    settings = _settings(file, architecture, family, tensors)
    config = read_config(family, settings, tensors, family.interleaved, factors)
    tensors = split_fused(config, tensors, names)
    check_tensors(config, tensors, names)
    return LoadedModel(config, tensors, tokenizer_from_gguf(file.path.name, file.metadata, config.vocab_size))


def _settings(file: GGUFFile, architecture: str, family: Family, tensors: dict[str, Tensor]) -> Settings:
    """What the header says, by transformers' names; takes tables of rotary factors out of the tensors."""
    header = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key, value in header.items():
        if value and key not in {*_KEYS, *_ROPE_KEYS, *_OTHER_KEYS}:
            raise ModelError(
                f"{file.path.name} has the metadata key {architecture}.{key}, which Taper does not know",
                "this variant is not supported",
            )
    values = {ours: header.get(theirs) for theirs, ours in _KEYS.items()}
    settings = Settings(values, file.path.name, {ours: f"{architecture}.{theirs}" for theirs, ours in _KEYS.items()})
    if header.get("attention.causal", True) is not True:
        raise ModelError(f"{file.path.name} is of a model whose tokens see later ones", "it does not generate text")
    if header.get("attention.value_length", head_dim := head_size(settings)) != head_dim:
        raise ModelError(f"{file.path.name}: keys and values must both have {head_dim} dimensions")
    if "embed_tokens" not in tensors:
        raise ModelError("tensor token_embd.weight is missing", DAMAGED)
    rope = {ours: header[theirs] for theirs, ours in _ROPE_KEYS.items() if theirs in header}
    if rope.get("rope_type") == "none":
        del rope["rope_type"]
    tables = {ours: table for name, ours in _ROPE_TABLES.items() if (table := _rope_table(file, tensors, name))}
    if tables:
        rope |= {"rope_type": "longrope", "attention_factor": rope.get("attention_factor", 1.0), **tables}
    values |= {
        "rope_parameters": rope,
        "tie_word_embeddings": "lm_head" not in tensors,
        "use_sliding_window": bool(values["sliding_window"]),
        "vocab_size": tensors["embed_tokens"].shape[0],
    }
    values |= {key: value for key, value in family.gguf_defaults(settings).items() if values.get(key) is None}
    return settings


def _rope_table(file: GGUFFile, tensors: dict[str, Tensor], name: str) -> list[float] | None:
    """A table of divisors of rotary frequencies, taken out of the tensors; None if there is none."""
    table = tensors.pop(name, None)
    if table is None:
        return None
    if table.dtype != "F32":
        raise ModelError(f"{file.path.name}: {name} must be F32")
    values: list[float] = table.data.view(np.float32).tolist()
    return values
