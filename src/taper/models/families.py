"""The architectures that run here: what their files leave unsaid, and how they name tensors.

To add one, add a `Family` to `MODEL_TYPES`; if it computes something new, a fact of `LayerSpec` or `ModelConfig` too,
which `read_config` fills in and the backends obey. `tests/tiny.py` lists the variants that are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError
from .files import Settings
from .gpt_oss import rearranged
from .tensors import Tensor, TensorNames


@dataclass(frozen=True)
class Family:
    """What the files of an architecture leave unsaid.

    `architecture`: its name in GGUF files and policies. `interleaved`: GGUF files hold queries and keys permuted, so
    that rotary pairs are neighbours. `pre_norm`, `post_norm`, `qk_norm`, `activation`: as in `config.py`.
    `no_rope_interval`: every so many layers, one has no positions. `slides`: whether a layer has a sliding window,
    where a file gives the window's size without `layer_types`; None: no layer has one. `reads`: the `SWITCHES` that it
    supports. `experts`: every MLP is a mixture of experts, which have biases with `experts_bias`. `has_sinks`: as in
    `config.py`. `scales_embeddings`: by the square root of the hidden size. `norm_offset`: a constant to add to the
    norm weights of folders. `defaults`: values that config.json may omit, as in transformers; `gguf_defaults`: the same
    for GGUF headers, as in llama.cpp. `rearranged`: brings the tensors of a folder into the layout of other families;
    such a folder may be in MXFP4. `layer_names`, `gguf_layer_names`: names of tensors besides those that all families
    share, as in `TensorNames`; default: norms before attention and MLP.
    """

    architecture: str
    interleaved: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    no_rope_interval: int = 0
    slides: Callable[[Settings, int], bool] | None = None
    reads: tuple[str, ...] = ()
    activation: str = "silu"
    experts: bool = False
    experts_bias: bool = False
    has_sinks: bool = False
    scales_embeddings: bool = False
    norm_offset: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Callable[[Settings], Mapping[str, Any]] | None = None
    rearranged: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    layer_names: Mapping[str, str] | None = None
    gguf_layer_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder_names(self) -> TensorNames:
        """The names of tensors in safetensors files."""
        return TensorNames("model.layers.", {**_FOLDER_LAYER, **(self.layer_names or _PRE_NORMS)}, _FOLDER_MODEL)

    @property
    def gguf_names(self) -> TensorNames:
        """The names of tensors in GGUF files."""
        return TensorNames("blk.", {**_GGUF_LAYER, **self.gguf_layer_names}, _GGUF_MODEL)


# Names of tensors -> ours, in some families. `post_attention_layernorm` comes before the MLP where pre-norms are used.
_PRE_NORMS = {"input_layernorm.weight": "pre_attention_norm", "post_attention_layernorm.weight": "pre_mlp_norm"}
_POST_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_FOUR_NORMS = {
    "input_layernorm.weight": "pre_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_mlp_norm",
    **_POST_NORMS,
}
# "*" stands for the number of an expert; Granite stacks all experts in one tensor.
_MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate.weight": "router",
    "block_sparse_moe.experts.*.w1.weight": "gate_experts.*",
    "block_sparse_moe.experts.*.w2.weight": "down_experts.*",
    "block_sparse_moe.experts.*.w3.weight": "up_experts.*",
}
_QWEN_EXPERTS = {
    "mlp.gate.weight": "router",
    **{f"mlp.experts.*.{name}_proj.weight": f"{name}_experts.*" for name in ("gate", "up", "down")},
}
_GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer.weight": "router",
    "block_sparse_moe.input_linear.weight": "gate_experts+up_experts",
    "block_sparse_moe.output_linear.weight": "down_experts",
}
_GPT_OSS_EXPERTS = {  # as `rearranged` names them
    "self_attn.sinks": "sinks",
    "mlp.router.weight": "router",
    "mlp.router.bias": "router_bias",
    **{f"mlp.experts.{name}_proj": f"{name}_experts" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_proj_bias": f"{name}_experts_bias" for name in ("gate", "up", "down")},
}
# Fused tensors: the rows of their parts follow each other in this order.
_QKV, _GATE_UP = "q_proj+k_proj+v_proj", "gate_proj+up_proj"
_FUSED_FOLDER = {"self_attn.qkv_proj.weight": _QKV, "mlp.gate_up_proj.weight": _GATE_UP}
_FUSED_GGUF = {"attn_qkv.weight": _QKV, "ffn_up.weight": _GATE_UP}


def _every_layer(settings: Settings, layer: int) -> bool:
    return True


def _later_layers(settings: Settings, layer: int) -> bool:
    return layer >= int(settings.get("max_window_layers", int))


def _every_other(settings: Settings, layer: int) -> bool:
    return layer % 2 == 0


def _all_but_every_sixth(settings: Settings, layer: int) -> bool:
    return (layer + 1) % int(settings.get("sliding_window_pattern", int, 6)) != 0


def _gemma_header(settings: Settings, most_layers: int) -> dict[str, Any]:
    # The largest model of a generation is the one that does not scale attention by the size of a head.
    largest = settings.get("num_hidden_layers", int) == most_layers
    size = settings.get("hidden_size", int) // max(settings.get("num_attention_heads", int), 1)
    return {"query_pre_attn_scalar": size if largest else head_size(settings)}


def _gemma2_header(settings: Settings) -> dict[str, Any]:
    return {**_CAPS, **_gemma_header(settings, 46)}


def _gemma3_header(settings: Settings) -> dict[str, Any]:
    return {"rope_local_base_freq": 1e4, **_gemma_header(settings, 62)}


_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss_header(settings: Settings) -> dict[str, Any]:
    return {**_SWIGLU, "truncate": False}  # of the ends of yarn's ramp, which llama.cpp rounds and the model does not


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")

# By `model_type` of config.json.
MODEL_TYPES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True, slides=_every_layer, defaults={"sliding_window": 4096}),
    "qwen2": Family("qwen2", slides=_later_layers, defaults=_QWEN),
    "qwen3": Family("qwen3", slides=_later_layers, qk_norm="head", defaults={**_QWEN, "head_dim": 128}),
    "phi3": Family(
        "phi3",
        slides=_every_layer,
        reads=("partial_rotary_factor",),
        layer_names=_PRE_NORMS | _FUSED_FOLDER,
        gguf_layer_names=_FUSED_GGUF,
    ),
    "smollm3": Family(
        "smollm3",
        interleaved=True,
        no_rope_interval=4,
        reads=("no_rope_layer_interval", "no_rope_layers"),
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "olmo2": Family("olmo2", pre_norm=False, post_norm=True, qk_norm="whole", layer_names=_POST_NORMS),
    "gemma2": Family(
        "gemma2",
        post_norm=True,
        slides=_every_other,
        reads=("query_pre_attn_scalar", *_CAPS),
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
        norm_offset=1.0,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
        | _CAPS,
        gguf_defaults=_gemma2_header,
        layer_names=_FOUR_NORMS,
    ),
    "gemma3_text": Family(
        "gemma3",
        post_norm=True,
        qk_norm="head",
        slides=_all_but_every_sixth,
        reads=("query_pre_attn_scalar", "rope_local_base_freq"),
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
        norm_offset=1.0,
        defaults={"tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256}
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096},
        gguf_defaults=_gemma3_header,
        layer_names=_FOUR_NORMS,
    ),
    "granite": Family("granite", interleaved=True, reads=_MULTIPLIERS, defaults={"attention_multiplier": 1.0}),
    "granitemoe": Family(
        "granitemoe",
        interleaved=True,
        experts=True,
        reads=(*_MULTIPLIERS, "num_local_experts"),
        defaults={"attention_multiplier": 1.0},
        layer_names=_PRE_NORMS | _GRANITE_EXPERTS,
    ),
    "mixtral": Family(
        "llama",
        interleaved=True,
        experts=True,
        slides=_every_layer,
        reads=("num_local_experts",),
        layer_names=_PRE_NORMS | _MIXTRAL_EXPERTS,
    ),
    "qwen3_moe": Family(
        "qwen3moe",
        qk_norm="head",
        experts=True,
        slides=_later_layers,
        reads=("num_experts", "num_local_experts"),
        defaults={**_QWEN, "max_window_layers": 0, "norm_topk_prob": False},
        layer_names=_PRE_NORMS | _QWEN_EXPERTS,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        experts=True,
        experts_bias=True,
        has_sinks=True,
        slides=_every_other,
        reads=("num_experts", "num_local_experts", *_SWIGLU),
        defaults={**_SWIGLU, "sliding_window": 128, "head_dim": 64, "rope_theta": 150000.0},
        gguf_defaults=_gpt_oss_header,
        rearranged=rearranged,
        layer_names=_PRE_NORMS | _GPT_OSS_EXPERTS,
        gguf_layer_names={"post_attention_norm.weight": "pre_mlp_norm"},  # its place and its name differ
    ),
}
# By `general.architecture` of GGUF files; where model types share one, the first of them.
ARCHITECTURES = {family.architecture: family for family in reversed(MODEL_TYPES.values())}


def find_family(name: str, families: Mapping[str, Family]) -> Family:
    """The family with this name; a ModelError if there is none."""
    if name not in families:
        raise ModelError(f"architecture {name!r} is not supported", f"supported: {', '.join(sorted(families))}")
    return families[name]


def head_size(settings: Settings) -> int:
    """`head_dim` as the file gives it, else an equal share of the hidden size."""
    share = settings.get("hidden_size", int) // max(settings.get("num_attention_heads", int), 1)
    return int(settings.get("head_dim", int, share))


# Names of tensors -> ours, in all families.
_FOLDER_MODEL = {"model.embed_tokens.weight": "embed_tokens", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
_FOLDER_LAYER = {
    **{f"self_attn.{name}_proj.weight": f"{name}_proj" for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkvo"},
    **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj.weight": f"{name}_proj" for name in ("gate", "up", "down")},
}
_GGUF_MODEL = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm", "output.weight": "lm_head"}
_GGUF_LAYER = {
    **{f"attn_{name}.weight": f"{name}_proj" for name in "qkv"},
    **{f"attn_{name}.bias": f"{name}_bias" for name in "qkv"},
    **{f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"},
    **{f"ffn_{name}.weight": f"{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_exps.weight": f"{name}_experts" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_exps.bias": f"{name}_experts_bias" for name in ("gate", "up", "down")},
    "attn_norm.weight": "pre_attention_norm",
    "attn_output.weight": "o_proj",
    "attn_output.bias": "o_bias",
    "attn_sinks.weight": "sinks",
    "ffn_norm.weight": "pre_mlp_norm",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_inp.bias": "router_bias",
    "post_attention_norm.weight": "post_attention_norm",
    "post_ffw_norm.weight": "post_mlp_norm",
}
# Settings that change the computation, with their neutral values. Any other value is an error in families that
# do not list the switch in `reads`.
SWITCHES: dict[str, Any] = {
    **dict.fromkeys(("attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv")),
    **dict.fromkeys(("final_logit_softcapping", "logit_scale", "no_rope_layer_interval", "no_rope_layers")),
    **dict.fromkeys(("query_pre_attn_scalar", "rope_local_base_freq", "swiglu_alpha", "swiglu_limit")),
    **dict.fromkeys(("mlp_bias", "use_bidirectional_attention", "use_qk_norm"), False),
    **dict.fromkeys(("num_experts", "num_kv_shared_layers", "num_local_experts", "shared_intermediate_size"), 0),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
