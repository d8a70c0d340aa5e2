"""A model of transformers over weights that are on a device already: the slow twin's, and one to compare speed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..loading import ModelConfig
from ..loading.families import FOLDER_NAMES


def transformers_model(config: ModelConfig, weights: Mapping[str, torch.Tensor], attention: str = "sdpa") -> Any:
    """A llama of one of our shapes, which shares the weights; it never ends an output by itself."""
    c, embeddings = config, weights["embed_tokens"]
    theirs = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        attn_implementation=attention,
        dtype=embeddings.dtype,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    model.load_state_dict({FOLDER_NAMES.theirs(name): weight for name, weight in weights.items()}, assign=True)
    # Buffers are not in the state: a model built on "meta" has no rotary frequencies yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(embeddings.device)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)
