"""The architectures that run here, listed once: what their files leave unsaid, and how they name tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError
from .model import TensorNames

_FOLDER_MODEL = {"model.embed_tokens.weight": "embed_tokens", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
_FOLDER_LAYER = {
    "self_attn.q_proj.weight": "q_proj",
    "self_attn.k_proj.weight": "k_proj",
    "self_attn.v_proj.weight": "v_proj",
    "self_attn.o_proj.weight": "o_proj",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.gate_proj.weight": "gate_proj",
    "mlp.up_proj.weight": "up_proj",
    "mlp.down_proj.weight": "down_proj",
}
# transformers names a norm by the layers that it knew first: what comes before the MLP comes after attention.
_PRE_NORMS = {"input_layernorm.weight": "pre_attention_norm", "post_attention_layernorm.weight": "pre_mlp_norm"}
FOLDER_NAMES = TensorNames("model.layers.", _FOLDER_LAYER | _PRE_NORMS, _FOLDER_MODEL)

GGUF_NAMES = TensorNames(
    "blk.",
    {
        "attn_norm.weight": "pre_attention_norm",
        "attn_q.weight": "q_proj",
        "attn_k.weight": "k_proj",
        "attn_v.weight": "v_proj",
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "attn_q_norm.weight": "q_norm",
        "attn_k_norm.weight": "k_norm",
        "attn_output.weight": "o_proj",
        "ffn_norm.weight": "pre_mlp_norm",
        "ffn_gate.weight": "gate_proj",
        "ffn_up.weight": "up_proj",
        "ffn_down.weight": "down_proj",
    },
    {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm", "output.weight": "lm_head"},
)


@dataclass(frozen=True)
class Family:
    """What the files of an architecture leave unsaid.

    `architecture`: its name in GGUF files and policies. `interleaved`: GGUF files hold queries and keys permuted, so
    that rotary pairs are neighbours. `defaults`: values that config.json may leave out, as transformers fills them in.
    """

    architecture: str
    interleaved: bool = False
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    folder_names: TensorNames = FOLDER_NAMES
    gguf_names: TensorNames = GGUF_NAMES


# By model_type of config.json.
MODEL_TYPES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True, defaults={"use_sliding_window": True, "sliding_window": 4096}),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", qk_norm=True, defaults={"head_dim": 128}),
}
# By general.architecture of GGUF files.
ARCHITECTURES = {family.architecture: family for family in reversed(MODEL_TYPES.values())}


def find_family(name: str, families: Mapping[str, Family]) -> Family:
    """The family of a name.

    Raises:
        ModelError: it is not among those supported.
    """
    if name not in families:
        raise ModelError(f"architecture {name!r} is not supported", f"supported: {', '.join(sorted(families))}")
    return families[name]
