"""Models from GGUF files: metadata into a config, tensors by our names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .gguf_file import DAMAGED, GGUFFile, read_gguf
from .model import LoadedModel, ModelConfig, Tensor, TensorNames, check_architecture, check_config, check_tensors
from .tokenizer_files import tokenizer_from_gguf

_NAMES = TensorNames(
    "blk.",
    {
        "attn_norm.weight": "input_layernorm",
        "attn_q.weight": "q_proj",
        "attn_k.weight": "k_proj",
        "attn_v.weight": "v_proj",
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "attn_q_norm.weight": "q_norm",
        "attn_k_norm.weight": "k_norm",
        "attn_output.weight": "o_proj",
        "ffn_norm.weight": "post_attention_layernorm",
        "ffn_gate.weight": "gate_proj",
        "ffn_up.weight": "up_proj",
        "ffn_down.weight": "down_proj",
    },
    {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm", "output.weight": "lm_head"},
)
# Rotary tables that some converters leave behind; they are computed from the config instead.
_UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd", "attn_rot_embd.weight")


def load_gguf(path: Path) -> LoadedModel:
    """Read a model from a GGUF file; weights stay in the mapped file.

    Raises:
        ModelError: the file is damaged, or the model is not supported.
    """
    file = read_gguf(path)
    architecture = file.get("general.architecture", str)
    check_architecture(architecture)
    tensors = _NAMES.rename({name: t for name, t in file.tensors.items() if not name.endswith(_UNUSED_SUFFIXES)})
    factors = tensors.pop("rope_freqs.weight", None)
    config = _read_config(file, architecture, tensors, factors)
    check_config(config)
    check_tensors(config, tensors, _NAMES)
    return LoadedModel(config, tensors, tokenizer_from_gguf(file.path.name, file.metadata, config.vocab_size))


def _read_config(file: GGUFFile, architecture: str, tensors: dict[str, Tensor], factors: Tensor | None) -> ModelConfig:
    def get(key: str, kind: type, default: Any = None) -> Any:
        return file.get(f"{architecture}.{key}", kind, default)

    for key in ("expert_count", "attention.sliding_window"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise ModelError(f"{file.path.name} has {key}; mixtures of experts and sliding windows are not supported")
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    head_dim = get("attention.key_length", int, hidden // max(heads, 1))
    if (
        get("attention.value_length", int, head_dim) != head_dim
        or get("rope.dimension_count", int, head_dim) != head_dim
    ):
        raise ModelError(f"{file.path.name}: keys, values and rotary embeddings must all have {head_dim} dimensions")
    scaling = get("rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"rope scaling {scaling!r} is not supported", "supported: none, linear, Llama 3.1 factors")
    if factors is not None and factors.dtype != "F32":
        raise ModelError(f"{file.path.name}: rope_freqs.weight must be F32")
    if "embed_tokens" not in tensors:
        raise ModelError("tensor token_embd.weight is missing", DAMAGED)
    weights = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2)
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=get("block_count", int),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length", int),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=tensors["embed_tokens"].shape[0],
        max_position_embeddings=get("context_length", int),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0),
        rope_interleaved=architecture == "llama",
        rope_scale=1.0 / max(get("rope.scaling.factor", float, 1.0), 1e-6) if scaling == "linear" else 1.0,
        rope_factors=None if factors is None else tuple(factors.data.view(np.float32).tolist()),
        qkv_bias="layers.0.q_bias" in tensors,
        qk_norm="layers.0.q_norm" in tensors,
        tie_word_embeddings="lm_head" not in tensors,
        quantization=weights.most_common(1)[0][0] if weights else "F32",
    )
