"""The architectures that run here: what their files leave unsaid, and how they name tensors.

To add one, add a `Family` to `MODEL_TYPES`; if it computes something new, a fact of `LayerSpec` or `ModelConfig` too,
which `read_config` fills in and the backends obey. `tests/tiny.py` lists the variants that are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError
from . import gemma3n, gemma4, granite, latent, lfm2, llama4, qwen35
from .files import Settings, head_size, layers_without_heads
from .gpt_oss import rearranged
from .tensors import Tensor, TensorNames


@dataclass(frozen=True)
class Family:
    """What the files of an architecture leave unsaid.

    `architecture`: its name in GGUF files and policies. `interleaved`: rotary pairs are neighbours in GGUF files, which
    hold queries and keys permuted, or "everywhere". `pre_norm`, `post_norm`, `qk_norm`, `activation`: as in
    `config.py`. `no_rope_interval`: every so many layers, one has no positions. `slides`: whether a layer has a sliding
    window, where a file gives the window's size without `layer_types`; None: no layer has one. `reads`: the `SWITCHES`
    that it supports. `experts`: MLPs are mixtures of experts, unless a file says that there are 0, with these fields of
    `Experts` (`clamp`: whether they have one). `has_sinks`: as in `config.py`. `scales_embeddings`: by the square root
    of the hidden size. `norm_offset`: a constant to add to the norm weights of folders. `defaults`: values that
    config.json may omit, as in transformers. `folder_settings`: what it may say in other ways (also
    `gguf_architecture`, if it is another one); `gguf_settings`: what GGUF headers say so or leave unsaid, as in
    llama.cpp. `layer_facts`: fields of each `LayerSpec`, of settings, windows and tensors, where layers differ by more
    than windows and positions. `rearranged`: brings the tensors of a folder into the layout of GGUF files.
    `reads_mxfp4`: such a folder may be in MXFP4. `runs_mtp`: an MTP layer runs here, and is not left out.
    `layer_names`, `gguf_layer_names`: names of tensors besides those that all families share, as in `TensorNames`;
    default: norms before attention and MLP.
    """

    architecture: str
    interleaved: bool | str = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    no_rope_interval: int = 0
    slides: Callable[[Settings, int], bool] | None = None
    reads: tuple[str, ...] = ()
    activation: str = "silu"
    experts: Mapping[str, Any] | None = None
    has_sinks: bool = False
    scales_embeddings: bool = False
    norm_offset: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    folder_settings: Callable[[Settings], Mapping[str, Any]] | None = None
    gguf_settings: Callable[[Settings], Mapping[str, Any]] | None = None
    layer_facts: Callable[[Settings, Sequence[int | None], dict[str, Tensor]], list[dict[str, Any]]] | None = None
    rearranged: Callable[[dict[str, Tensor], Settings], dict[str, Tensor]] | None = None
    reads_mxfp4: bool = False
    runs_mtp: bool = False
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
_GLM_NORMS = {
    **_PRE_NORMS,
    "post_self_attn_layernorm.weight": "post_attention_norm",
    "post_mlp_layernorm.weight": "post_mlp_norm",
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
    "mlp.gate.e_score_correction_bias": "router_correction",
    "mlp.moe_statics.e_score_correction_bias": "router_correction",
    **{f"mlp.experts.*.{name}_proj.weight": f"{name}_experts.*" for name in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj": "gate_experts+up_experts",
    "mlp.experts.down_proj": "down_experts",
}
_W123 = (("w1", "gate"), ("w2", "down"), ("w3", "up"))
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
_DELTA_NET_PRODUCTS = {"qkv": "qkv", "z": "z", "b": "beta", "a": "alpha"}
_DELTA_NET = {
    **{f"linear_attn.in_proj_{theirs}.weight": f"{ours}_proj" for theirs, ours in _DELTA_NET_PRODUCTS.items()},
    "linear_attn.conv1d.weight": "conv",
    "linear_attn.dt_bias": "dt_bias",
    "linear_attn.A_log": "decay",
    "linear_attn.norm.weight": "mixer_norm",
    "linear_attn.out_proj.weight": "out_proj",
}
_DELTA_NET_GGUF = {
    "attn_qkv.weight": "qkv_proj",
    "attn_gate.weight": "z_proj",
    "ssm_beta.weight": "beta_proj",
    "ssm_alpha.weight": "alpha_proj",
    "ssm_conv1d.weight": "conv",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "decay",
    "ssm_norm.weight": "mixer_norm",
    "ssm_out.weight": "out_proj",
}
_LFM2_LAYER = {
    "operator_norm.weight": "pre_attention_norm",
    "ffn_norm.weight": "pre_mlp_norm",
    "self_attn.out_proj.weight": "o_proj",
    **{f"self_attn.{name}_layernorm.weight": f"{name}_norm" for name in "qk"},
    "conv.conv.weight": "conv",
    **{f"conv.{name}.weight": name for name in ("in_proj", "out_proj")},
    **{f"feed_forward.{theirs}.weight": f"{ours}_proj" for theirs, ours in _W123},
    "feed_forward.gate.weight": "router",
    "feed_forward.expert_bias": "router_correction",
    **{f"feed_forward.experts.*.{theirs}.weight": f"{ours}_experts.*" for theirs, ours in _W123},
}
_LFM2_LAYER_GGUF = {f"shortconv.{name}.weight": name for name in ("conv", "in_proj", "out_proj")}
_MAMBA = {"A_log": "decay", "D": "direct", "conv1d.bias": "conv_bias", "conv1d.weight": "conv", "dt_bias": "dt_bias"}
_MAMBA |= {"in_proj.weight": "in_proj", "norm.weight": "mixer_norm", "out_proj.weight": "out_proj"}
_GRANITE4 = {
    "shared_mlp.input_linear.weight": "gate_proj+up_proj",
    "shared_mlp.output_linear.weight": "down_proj",
    **{f"mamba.{theirs}": ours for theirs, ours in _MAMBA.items()},
}
_MAMBA_GGUF = {
    "ssm_a": "decay",
    "ssm_d": "direct",
    "ssm_conv1d.bias": "conv_bias",
    "ssm_conv1d.weight": "conv",
    "ssm_dt.bias": "dt_bias",
    "ssm_in.weight": "in_proj",
    "ssm_norm.weight": "mixer_norm",
    "ssm_out.weight": "out_proj",
}
_LLAMA4_LAYER = {
    **{f"feed_forward.{name}_proj.weight": f"{name}_proj" for name in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{name}_proj.weight": f"{name}_proj" for name in ("gate", "up", "down")},
    "feed_forward.router.weight": "router",
    "feed_forward.experts.gate_up_proj": "gate_experts+up_experts",
    "feed_forward.experts.down_proj": "down_experts",
}
_LAYER_INPUTS = {
    "per_layer_input_gate.weight": "input_gate",
    "per_layer_projection.weight": "input_proj",
    "post_per_layer_input_norm.weight": "post_input_norm",
}
_LAYER_INPUTS_GGUF = {
    "inp_gate.weight": "input_gate",
    "proj.weight": "input_proj",
    "post_norm.weight": "post_input_norm",
}
_GEMMA3N = {
    **_LAYER_INPUTS,
    "altup.correct_output_scale": "correct_scale",
    "altup.correction_coefs.weight": "correct_coefs",
    "altup.modality_router.weight": "stream_router",
    "altup.prediction_coefs.weight": "predict_coefs",
    "altup.router_norm.weight": "stream_router_norm",
    "laurel.linear_left.weight": "laurel_left",
    "laurel.linear_right.weight": "laurel_right",
    "laurel.post_laurel_norm.weight": "post_laurel_norm",
}
_GEMMA3N_GGUF = {
    **_LAYER_INPUTS_GGUF,
    "altup_correct_coef.weight": "correct_coefs",
    "altup_correct_scale.weight": "correct_scale",
    "altup_predict_coef.weight": "predict_coefs",
    "altup_router.weight": "stream_router",
    "altup_router_norm.weight": "stream_router_norm",
    "laurel_l.weight": "laurel_left",
    "laurel_r.weight": "laurel_right",
    "laurel_post_norm.weight": "post_laurel_norm",
}
_GEMMA4 = {
    **_LAYER_INPUTS,
    "layer_scalar": "output_scale",
    "router.proj.weight": "router",
    "router.scale": "router_scale",
    "router.per_expert_scale": "experts_scale",
    "experts.gate_up_proj": "gate_experts+up_experts",
    "experts.down_proj": "down_experts",
    "post_feedforward_layernorm_1.weight": "post_dense_norm",
    "pre_feedforward_layernorm_2.weight": "pre_experts_norm",
    "post_feedforward_layernorm_2.weight": "post_experts_norm",
}
_GEMMA4_GGUF = {
    **_LAYER_INPUTS_GGUF,
    "layer_output_scale.weight": "output_scale",
    "ffn_gate_inp.scale": "router_scale",
    "ffn_down_exps.scale": "experts_scale",
    "ffn_gate_up_exps.weight": "gate_experts+up_experts",
    "post_ffw_norm_1.weight": "post_dense_norm",
    "pre_ffw_norm_2.weight": "pre_experts_norm",
    "post_ffw_norm_2.weight": "post_experts_norm",
}
_LATENT = {
    "self_attn.q_a_proj.weight": "q_a_proj",
    "self_attn.q_a_layernorm.weight": "q_a_norm",
    "self_attn.q_b_proj.weight": "q_proj",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_proj",
    "self_attn.kv_a_layernorm.weight": "kv_norm",
    "self_attn.k_b_proj.weight": "latent_queries",  # as `latent.rearranged` names them
    "self_attn.v_b_proj.weight": "latent_values",
}
_LATENT_GGUF = {
    "attn_q_a.weight": "q_a_proj",
    "attn_q_a_norm.weight": "q_a_norm",
    "attn_q_b.weight": "q_proj",
    "attn_kv_a_mqa.weight": "kv_proj",
    "attn_kv_a_norm.weight": "kv_norm",
    "attn_k_b.weight": "latent_queries",
    "attn_v_b.weight": "latent_values",
    "ffn_gate_up_exps.weight": "gate_experts+up_experts",
}
# Fused tensors: the rows of their parts follow each other in this order.
_QKV, _GATE_UP = "q_proj+k_proj+v_proj", "gate_proj+up_proj"
_FUSED_MLP, _FUSED_MLP_GGUF = {"mlp.gate_up_proj.weight": _GATE_UP}, {"ffn_up.weight": _GATE_UP}
_FUSED_FOLDER = {"self_attn.qkv_proj.weight": _QKV, **_FUSED_MLP}
_FUSED_GGUF = {"attn_qkv.weight": _QKV, **_FUSED_MLP_GGUF}
# In some GGUF files, the norm before the MLP has the name of one behind attention.
_MISNAMED = {"post_attention_norm.weight": "pre_mlp_norm"}


def _shared(name: str) -> dict[str, str]:
    """Of the MLP beside the experts, and of its gate."""
    return {f"mlp.{name}_gate.weight": "shared_gate"} | {
        f"mlp.{name}.{part}_proj.weight": f"{part}_proj" for part in ("gate", "up", "down")
    }


def _every_layer(settings: Settings, layer: int) -> bool:
    return True


def _later_layers(settings: Settings, layer: int) -> bool:
    return layer >= int(settings.get("max_window_layers", int))


def _every_other(settings: Settings, layer: int) -> bool:
    return layer % 2 == 0


def _all_but_every_fourth(settings: Settings, layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _all_but_every_sixth(settings: Settings, layer: int) -> bool:
    return (layer + 1) % int(settings.get("sliding_window_pattern", int, 6)) != 0


def _unless_said(settings: Settings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in defaults.items() if settings.values.get(key) is None}


def _gemma_scalar(settings: Settings, most_layers: int) -> int:
    # The largest model of a generation is the one that does not scale attention by the size of a head.
    if settings.get("num_hidden_layers", int) != most_layers:
        return head_size(settings)
    size: int = settings.get("hidden_size", int) // max(settings.get("num_attention_heads", int), 1)
    return size


def _olmo3_header(settings: Settings) -> dict[str, Any]:
    pattern = settings.values.get("sliding_window_pattern")
    return {"layer_types": gemma4.layer_types(settings), "sliding_window_pattern": None} if pattern else {}


def _gemma2_header(settings: Settings) -> dict[str, Any]:
    return _unless_said(settings, {**_CAPS, "query_pre_attn_scalar": _gemma_scalar(settings, 46)})


def _gemma3_header(settings: Settings) -> dict[str, Any]:
    more = {"rope_local_base_freq": 1e4, "query_pre_attn_scalar": _gemma_scalar(settings, 62)}
    return _unless_said(settings, more)


_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss_header(settings: Settings) -> dict[str, Any]:
    # What is not truncated: the ends of yarn's ramp, which llama.cpp rounds and the model does not.
    return _unless_said(settings, {**_SWIGLU, "truncate": False})


def _hunyuan_folder(settings: Settings) -> dict[str, Any]:
    # A fixed `alpha` stretches the base of rotary frequencies; the context that it allows is in the config as it is.
    rope = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or not rope.get("alpha"):
        return {}
    own = Settings({**settings.values, **rope}, settings.source)
    alpha, dim = own.get("alpha", float), head_size(settings)
    if not 0 < alpha < 1e6 or not 4 <= dim <= 1024:
        raise own.error("alpha", "no model has that")
    theta = own.get("rope_theta", float, 1e4) * alpha ** (dim / (dim - 2))
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _glm4_moe_folder(settings: Settings) -> dict[str, Any]:
    layers = settings.get("first_k_dense_replace", int)
    return {"num_dense_layers": layers, "num_local_experts": settings.get("n_routed_experts", int), "use_qk_norm": None}


def _glm4_moe_layers(
    settings: Settings, windows: Sequence[int | None], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    return [{"qk_norm": "head" if f"layers.{layer}.q_norm" in tensors else ""} for layer in range(len(windows))]


def _ernie4_5_moe_folder(settings: Settings) -> dict[str, Any]:
    get, count = settings.get, settings.get("num_hidden_layers", int)
    if get("moe_layer_end_index", int, -1) not in (-1, count - 1):
        raise settings.error("moe_layer_end_index", "dense layers after those with experts are not supported")
    return {
        "decoder_sparse_step": get("moe_layer_interval", int, 1),
        "n_shared_experts": get("moe_num_shared_experts", int),
        "num_dense_layers": get("moe_layer_start_index", int),
        "num_experts_per_tok": get("moe_k", int),
        "num_local_experts": get("moe_num_experts", int),
    }


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_OLMO: dict[str, Any] = {
    "architecture": "olmo2",
    "pre_norm": False,
    "post_norm": True,
    "qk_norm": "whole",
    "slides": _all_but_every_fourth,
    "reads": ("rope_local_base_freq",),
    "gguf_settings": _olmo3_header,
    "layer_names": _POST_NORMS,
}
_EXPERTS = (
    *("expert_gating_func", "n_shared_experts", "num_dense_layers", "num_experts", "num_local_experts"),
    *("num_nextn_predict_layers", "routed_scaling_factor", "shared_intermediate_size"),
)
_QWEN35: dict[str, Any] = {
    "qk_norm": "head",
    "reads": (*_EXPERTS, "partial_rotary_factor"),
    "norm_offset": 1.0,
    "defaults": {"head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    "folder_settings": qwen35.folder_settings,
    "gguf_settings": qwen35.gguf_settings,
    "layer_facts": qwen35.layer_facts,
    "rearranged": qwen35.rearranged,
    "runs_mtp": True,
    "gguf_layer_names": _MISNAMED | _DELTA_NET_GGUF,
}
_LFM2: dict[str, Any] = {
    "qk_norm": "head",
    "defaults": {"rope_theta": 1e6, "conv_L_cache": 3},
    "folder_settings": lfm2.folder_settings,
    "gguf_settings": layers_without_heads,
    "layer_facts": lfm2.layer_facts,
    "layer_names": _LFM2_LAYER,
    "gguf_layer_names": _LFM2_LAYER_GGUF,
}


def _mistral4_header(settings: Settings) -> dict[str, Any]:
    # It sharpens attention beyond its original context, which its files do not say.
    return latent.gguf_settings(settings) | _unless_said(settings, {"llama_4_scaling_beta": 0.1})


_LATENT_ATTENTION: dict[str, Any] = {
    "interleaved": "everywhere",
    "folder_settings": latent.folder_settings,
    "layer_facts": latent.layer_facts,
    "rearranged": latent.rearranged,
    "layer_names": _PRE_NORMS | _LATENT | _QWEN_EXPERTS | _shared("shared_experts"),
    "gguf_layer_names": _LATENT_GGUF,
}
_LATENT_READS = (*_EXPERTS, "kv_lora_rank", "partial_rotary_factor")
_DEEPSEEK2: dict[str, Any] = {
    **_LATENT_ATTENTION,
    "experts": {"beside": "plain", "scores": "sigmoid", "has_correction": True},
    "reads": _LATENT_READS,
    "gguf_settings": latent.gguf_settings,
}
_MISTRAL4_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_MISTRAL4_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
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
    "ministral3": Family("mistral3", interleaved=True, slides=_every_layer, reads=("llama_4_scaling_beta",)),
    "hunyuan_v1_dense": Family(
        "hunyuan-dense",
        qk_norm="rotated",
        folder_settings=_hunyuan_folder,
        layer_names=_PRE_NORMS
        | {f"self_attn.{theirs}_layernorm.weight": f"{theirs[0]}_norm" for theirs in ("query", "key")},
    ),
    "seed_oss": Family("seed_oss", defaults={"head_dim": 128}, gguf_layer_names=_MISNAMED),
    "ernie4_5": Family("ernie4_5", interleaved="everywhere", defaults={"head_dim": 128, "tie_word_embeddings": True}),
    "glm4": Family(
        "glm4",
        interleaved="everywhere",
        post_norm=True,
        reads=("partial_rotary_factor",),
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
        layer_names=_GLM_NORMS | _FUSED_MLP,
        gguf_layer_names=_FUSED_MLP_GGUF,
    ),
    "olmo2": Family(**_OLMO),
    "olmo3": Family(**_OLMO, defaults={"sliding_window": 4096}),
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
        gguf_settings=_gemma2_header,
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
        gguf_settings=_gemma3_header,
        layer_names=_FOUR_NORMS,
    ),
    "gemma3n_text": Family(
        "gemma3n",
        post_norm=True,
        qk_norm="head",
        slides=_all_but_every_sixth,
        reads=(
            *("attention_multiplier", "final_logit_softcapping", "hidden_size_per_layer_input"),
            *("num_kv_shared_layers", "rope_local_base_freq"),
        ),
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "attention_multiplier": 1.0, "laurel_rank": 64}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512, "sliding_window_pattern": 5}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15}
        | {"altup_num_inputs": 4, "final_logit_softcapping": 30.0},
        folder_settings=gemma3n.folder_settings,
        gguf_settings=gemma3n.gguf_settings,
        layer_facts=gemma3n.layer_facts,
        layer_names=_FOUR_NORMS | _GEMMA3N,
        gguf_layer_names=_GEMMA3N_GGUF,
    ),
    "gemma4_text": Family(
        "gemma4",
        post_norm=True,
        qk_norm="head",
        slides=_all_but_every_sixth,
        reads=(
            *("attention_multiplier", "final_logit_softcapping", "global_head_dim", "hidden_size_per_layer_input"),
            *("num_experts", "num_kv_shared_layers", "num_local_experts", "rope_local_base_freq"),
        ),
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "global_head_dim": 512, "attention_multiplier": 1.0}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512, "hidden_size_per_layer_input": 256},
        folder_settings=gemma4.folder_settings,
        gguf_settings=gemma4.gguf_settings,
        layer_facts=gemma4.layer_facts,
        layer_names=_FOUR_NORMS | _GEMMA4,
        gguf_layer_names=_GEMMA4_GGUF,
    ),
    "granite": Family(
        "granite",
        interleaved=True,
        reads=(*_MULTIPLIERS, "no_rope_layers"),
        defaults={"attention_multiplier": 1.0},
        gguf_settings=granite.gguf_settings,
    ),
    "granitemoehybrid": Family(
        "granitehybrid",
        interleaved=True,
        experts={"beside": "plain"},
        reads=(*_MULTIPLIERS, "no_rope_layers", "num_local_experts", "shared_intermediate_size"),
        defaults={"attention_multiplier": 1.0, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
        | {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2},
        folder_settings=granite.folder_settings,
        gguf_settings=granite.gguf_settings,
        layer_facts=granite.layer_facts,
        rearranged=granite.rearranged,
        layer_names=_PRE_NORMS | _GRANITE_EXPERTS | _GRANITE4,
        gguf_layer_names=_MAMBA_GGUF,
    ),
    "granitemoe": Family(
        "granitemoe",
        interleaved=True,
        experts={},
        reads=(*_MULTIPLIERS, "num_local_experts"),
        defaults={"attention_multiplier": 1.0},
        layer_names=_PRE_NORMS | _GRANITE_EXPERTS,
    ),
    "mixtral": Family(
        "llama",
        interleaved=True,
        experts={},
        slides=_every_layer,
        reads=("num_local_experts",),
        layer_names=_PRE_NORMS | _MIXTRAL_EXPERTS,
    ),
    "qwen3_moe": Family(
        "qwen3moe",
        qk_norm="head",
        experts={},
        slides=_later_layers,
        reads=("num_experts", "num_local_experts"),
        defaults={**_QWEN, "max_window_layers": 0, "norm_topk_prob": False},
        layer_names=_PRE_NORMS | _QWEN_EXPERTS,
    ),
    "qwen3_5_text": Family("qwen35", **_QWEN35, layer_names=_PRE_NORMS | _DELTA_NET),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        **_QWEN35,
        experts={"beside": "gated"},
        layer_names=_PRE_NORMS | _DELTA_NET | _QWEN_EXPERTS | _shared("shared_expert"),
    ),
    "glm4_moe": Family(
        "glm4moe",
        experts={"beside": "plain", "scores": "sigmoid", "has_correction": True},
        reads=(*_EXPERTS, "partial_rotary_factor"),
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
        folder_settings=_glm4_moe_folder,
        layer_facts=_glm4_moe_layers,
        layer_names=_PRE_NORMS | _QWEN_EXPERTS | _shared("shared_experts"),
        gguf_layer_names=_MISNAMED,
    ),
    "ernie4_5_moe": Family(
        "ernie4_5-moe",
        interleaved="everywhere",
        experts={"beside": "plain", "has_correction": True},
        reads=_EXPERTS,
        defaults={"tie_word_embeddings": True, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        folder_settings=_ernie4_5_moe_folder,
        layer_names=_PRE_NORMS | _QWEN_EXPERTS | _shared("shared_experts"),
    ),
    "mistral4": Family(
        "mistral4",
        **_LATENT_ATTENTION,
        experts={"beside": "plain"},
        reads=(*_LATENT_READS, "llama_4_scaling_beta"),
        defaults={"first_k_dense_replace": 0, "n_shared_experts": 1, "rope_parameters": _MISTRAL4_ROPE},
        gguf_settings=_mistral4_header,
    ),
    "glm4_moe_lite": Family(
        "deepseek2",
        **_DEEPSEEK2,
        defaults={"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
    ),
    "deepseek_v3": Family(  # those whose experts are not in groups
        "deepseek2",
        **_DEEPSEEK2,
        defaults={"first_k_dense_replace": 3, "n_group": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ),
    "lfm2": Family("lfm2", **_LFM2),
    "lfm2_moe": Family("lfm2moe", **_LFM2, experts={"scores": "sigmoid", "has_correction": True}, reads=_EXPERTS),
    "llama4_text": Family(
        "llama4",
        interleaved="everywhere",
        experts={"beside": "plain", "scores": "sigmoid", "scales_inputs": True},
        reads=(
            *("attention_chunk_size", "attn_temperature_tuning", "decoder_sparse_step", "no_rope_layer_interval"),
            *("no_rope_layers", "num_local_experts", "shared_intermediate_size", "use_qk_norm"),
        ),
        defaults={"head_dim": 128, "rope_theta": 5e5, "num_local_experts": 16, "num_experts_per_tok": 1}
        | {"norm_topk_prob": False, "interleave_moe_layer_step": 1, "use_qk_norm": True}
        | {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192},
        folder_settings=llama4.folder_settings,
        gguf_settings=llama4.gguf_settings,
        layer_facts=llama4.layer_facts,
        rearranged=llama4.rearranged,
        layer_names=_PRE_NORMS | _LLAMA4_LAYER,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        experts={"has_bias": True, "clamp": True},
        has_sinks=True,
        slides=_every_other,
        reads=("num_experts", "num_local_experts", *_SWIGLU),
        defaults={**_SWIGLU, "sliding_window": 128, "head_dim": 64, "rope_theta": 150000.0},
        gguf_settings=_gpt_oss_header,
        rearranged=rearranged,
        reads_mxfp4=True,
        layer_names=_PRE_NORMS | _GPT_OSS_EXPERTS,
        gguf_layer_names=_MISNAMED,
    ),
}
# By `general.architecture` of GGUF files; where model types share one, the first of them.
ARCHITECTURES = {family.architecture: family for family in reversed(MODEL_TYPES.values())}


def find_family(name: str, families: Mapping[str, Family]) -> Family:
    """The family with this name; a ModelError if there is none."""
    if name not in families:
        raise ModelError(f"architecture {name!r} is not supported", f"supported: {', '.join(sorted(families))}")
    return families[name]


# Names of tensors -> ours, in all families.
_FOLDER_MODEL = {
    "model.embedding_norm.weight": "norm",  # of LFM2
    "model.embed_tokens.weight": "embed_tokens",
    "model.embed_tokens_per_layer.weight": "layer_embeddings",
    "model.per_layer_model_projection.weight": "layer_projection",
    "model.per_layer_projection_norm.weight": "layer_projection_norm",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
    **{f"model.altup_projections.{i}.weight": f"streams.embed_{i + 1}" for i in range(gemma3n.STREAMS - 1)},
    **{f"model.altup_unembed_projections.{i}.weight": f"streams.unembed_{i + 1}" for i in range(gemma3n.STREAMS - 1)},
}
_MTP = {  # of the layer that predicts a further token
    "eh_proj.weight": "combine_proj",
    "enorm.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "shared_head.norm.weight": "head_norm",
}
_FOLDER_LAYER = {
    **{f"self_attn.{name}_proj.weight": f"{name}_proj" for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkvo"},
    **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj.weight": f"{name}_proj" for name in ("gate", "up", "down")},
    **_MTP,
}
_GGUF_MODEL = {
    "token_embd_norm.weight": "norm",  # of LFM2
    "token_embd.weight": "embed_tokens",
    "per_layer_token_embd.weight": "layer_embeddings",
    "per_layer_model_proj.weight": "layer_projection",
    "per_layer_proj_norm.weight": "layer_projection_norm",
    "output_norm.weight": "norm",
    "output.weight": "lm_head",
    "altup_proj.weight": "streams." + "+".join(f"embed_{i}" for i in range(1, gemma3n.STREAMS)),
    "altup_unembd_proj.weight": "streams." + "+".join(f"unembed_{i}" for i in range(1, gemma3n.STREAMS)),
}
_GGUF_LAYER = {
    **{f"nextn.{theirs.replace('shared_head.', 'shared_head_')}": ours for theirs, ours in _MTP.items()},
    **{f"attn_{name}.weight": f"{name}_proj" for name in "qkv"},
    **{f"attn_{name}.bias": f"{name}_bias" for name in "qkv"},
    **{f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"},
    **{f"ffn_{name}_shexp.weight": f"{name}_proj" for name in ("gate", "up", "down")},
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
    "exp_probs_b.bias": "router_correction",
    "ffn_gate_inp_shexp.weight": "shared_gate",
    "post_attention_norm.weight": "post_attention_norm",
    "post_ffw_norm.weight": "post_mlp_norm",
}
# Settings that change the computation, with their neutral values. Any other value is an error in families that
# do not list the switch in `reads`.
SWITCHES: dict[str, Any] = {
    **dict.fromkeys(("attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv")),
    **dict.fromkeys(("final_logit_softcapping", "logit_scale", "no_rope_layer_interval", "no_rope_layers")),
    **dict.fromkeys(("llama_4_scaling_beta", "query_pre_attn_scalar", "rope_local_base_freq")),
    "kv_lora_rank": None,
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit")),
    **dict.fromkeys(("attn_temperature_tuning", "mlp_bias", "use_bidirectional_attention", "use_qk_norm"), False),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_experts", "num_kv_shared_layers", "num_local_experts"), 0),
    **dict.fromkeys(("n_shared_experts", "num_dense_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 0),
    "expert_gating_func": None,
    "routed_scaling_factor": 1.0,
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
    **dict.fromkeys(("decoder_sparse_step", "n_group"), 1),
    "mlp_only_layers": [],
}
