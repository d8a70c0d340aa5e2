"""Models from GGUF files: metadata into a config, tensors by our names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .facts import read_config
from .families import ARCHITECTURES, find_family
from .gguf_file import DAMAGED, GGUFFile, read_gguf
from .model import LoadedModel, Tensor, check_tensors
from .settings import Settings
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
    "rope.freq_base": "rope_theta",
}
# Rotary tables that some converters leave behind; they are computed from the config instead.
_UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd", "attn_rot_embd.weight")


def load_gguf(path: Path) -> LoadedModel:
    """Read a model from a GGUF file; weights stay in the mapped file.

    Raises:
        ModelError: the file is damaged, or the model is not supported.
    """
    file = read_gguf(path)
    architecture = file.get("general.architecture", str)
    family = find_family(architecture, ARCHITECTURES)
    names = family.gguf_names
    tensors = names.rename({name: t for name, t in file.tensors.items() if not name.endswith(_UNUSED_SUFFIXES)})
    factors = _rope_factors(file, tensors)
    settings = _settings(file, architecture, tensors)
    config = read_config(family, settings, tensors, family.interleaved, factors)
    check_tensors(config, tensors, names)
    return LoadedModel(config, tensors, tokenizer_from_gguf(file.path.name, file.metadata, config.vocab_size))


def _settings(file: GGUFFile, architecture: str, tensors: dict[str, Tensor]) -> Settings:
    """What the header says, by transformers' names."""

    def get(key: str, kind: type, default: Any = None) -> Any:
        return file.get(f"{architecture}.{key}", kind, default)

    for key in ("expert_count", "attention.sliding_window"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise ModelError(f"{file.path.name} has {key}; mixtures of experts and sliding windows are not supported")
    names = {ours: f"{architecture}.{theirs}" for theirs, ours in _KEYS.items()}
    values = {ours: file.metadata.get(theirs) for ours, theirs in names.items()}
    head_dim = values["head_dim"] or get("embedding_length", int) // max(get("attention.head_count", int), 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, int, head_dim) != head_dim:
            message = f"{file.path.name}: keys, values and rotary embeddings must all have {head_dim} dimensions"
            raise ModelError(message)
    if "embed_tokens" not in tensors:
        raise ModelError("tensor token_embd.weight is missing", DAMAGED)
    values["vocab_size"] = tensors["embed_tokens"].shape[0]
    values["tie_word_embeddings"] = "lm_head" not in tensors
    scaling = get("rope.scaling.type", str, "none")
    values["rope_parameters"] = {
        "rope_type": "default" if scaling == "none" else scaling,
        "factor": get("rope.scaling.factor", float, 1.0),
    }
    return Settings(values, file.path.name, names)


def _rope_factors(file: GGUFFile, tensors: dict[str, Tensor]) -> list[float] | None:
    """The table of Llama 3.1's divisors of frequencies, taken out of the tensors; None if there is none."""
    factors = tensors.pop("rope_freqs.weight", None)
    if factors is None:
        return None
    if factors.dtype != "F32":
        raise ModelError(f"{file.path.name}: rope_freqs.weight must be F32")
    values: list[float] = factors.data.view(np.float32).tolist()
    return values
