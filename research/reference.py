"""The default model in transformers, f32: what tests compare tokens with, and benchmarks speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from taper.models import load_model

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_from_gguf(path: Path) -> LlamaForCausalLM:
    """A GGUF llama with tied embeddings, dequantised by the gguf package, queries and keys unpermuted."""
    c = load_model(path).config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    state = {}
    for tensor in GGUFReader(path).tensors:
        parts = tensor.name.split(".")
        array = dequantize(tensor.data, tensor.tensor_type)
        if parts[-2] in ("attn_q", "attn_k"):
            array = array.reshape(-1, c.head_dim // 2, 2, c.hidden_size).swapaxes(1, 2).reshape(array.shape)
        layer = f"layers.{parts[1]}." if parts[0] == "blk" else ""
        state[f"model.{layer}{_NAMES[parts[-2]]}.weight"] = torch.from_numpy(np.array(array))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    # Buffers are not in the state: a model built on "meta" has no rotary frequencies yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
