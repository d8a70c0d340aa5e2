"""What the tests share: tiny random models, offline; both backends on them; and the ways to run a prompt.

Models are built by transformers, saved as folders, and converted to GGUF by the gguf package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from taper.adapters import Adapters
from taper.backends import TokenBatch
from taper.backends.torch import TorchBackend
from taper.engine import Engine, Request
from taper.models import load_model
from taper.models.download import DEFAULT_MODEL, PACKAGED_MODELS
from taper.models.tensors import LoadedModel
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

torch.set_num_threads(1)

TOKENS = 28  # in which the curves of `policies` fall as far as they matter
CONTEXT = 512
# With $TAPER_TEST_DEVICE, such as vulkan, what is tested on both backends is tested on that device of ggml's too.
DEVICES = [name] if (name := os.environ.get("TAPER_TEST_DEVICE")) else []
PLACE = {"device": DEVICES[0]} if DEVICES and DEVICES != ["split"] else {"threads": 1}  # of models of `LLM`
EVERY_BACKEND = pytest.mark.parametrize("kind", ["ggml", *DEVICES, "torch"])
BACKENDS = pytest.mark.parametrize("kind", ["ggml", *DEVICES, pytest.param("torch", marks=pytest.mark.ci)])

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_MODEL_FILE = PACKAGED_MODELS[DEFAULT_MODEL].path  # the user's own, before a test points the cache elsewhere
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 300

# Where transformers has another name.
MODEL_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"} | {
    "gemma3n": "gemma3n_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "glm4moe": "glm4_moe",
    "lfm2moe": "lfm2_moe",
    "ernie4_5-moe": "ernie4_5_moe",
    "hunyuan-dense": "hunyuan_v1_dense",
    "llama4": "llama4_text",
    "deepseek2": "glm4_moe_lite",
}
GGUF_NAMES = {
    "granitemoehybrid": "granite",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "deepseek_v3": "deepseek2",
} | {name: ours for ours, name in MODEL_TYPES.items()}
# GGUF files have their rotary pairs side by side.
PERMUTED = ("llama", "smollm3", "granite", "granitehybrid", "granitemoe", "mistral3")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What `make_tiny` takes for models that attend to everything in every layer, by one block.
PLAIN = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "llama-untied": ("llama", {"tied": False}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 5.0, 9.0, 17.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALES = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 5.0, "residual_multiplier": 0.6}
GRANITE4 = {
    "layer_types": ["full_attention"] * 5,
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
GRANITE4H = {  # states are not square
    "layers": 7,
    "layer_types": [f"{'full' if layer in (2, 5) else 'linear'}_attention" for layer in range(7)],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "shared_intermediate_size": 128,
    "position_embedding_type": "nope",
}
GRANITE4H_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
OLMO3 = {
    "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINISTRAL3 = YARN | {
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA3N = {
    "layers": 7,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "sliding", "full")
    ],
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 4.0,
    "num_kv_shared_layers": 2,
    "intermediate_size": [128, 96, 160, 128, 128, 64, 128],
    "activation_sparsity_pattern": [0.95, 0.8, 0.5, 0.3, 0.0, 0.0, 0.0],
}
# llama.cpp takes all of this to be as in the published models. But of 128 gates, its standard deviation is a bit larger
# than that of transformers (n - 1, not n), so that its 0.95 is a bit more there; of thousands, it is the same.
GEMMA3N_LLAMA_CPP = GEMMA3N | {
    "layers": 22,
    "layer_types": None,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
    "intermediate_size": 128,
    "activation_sparsity_pattern": [round(NormalDist().cdf(1.6448533 * (128 / 127) ** 0.5), 6)] * 10 + [0.0] * 12,
}
GEMMA4 = {
    "layers": 7,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full", "sliding", "full")
    ],
    "sliding_window": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 4.0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48} | {
    "hidden_size_per_layer_input": 0
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
QWEN35 = {"layers": 7, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16} | {
    "mtp_num_hidden_layers": 1
}
QWEN35_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | {
    "shared_expert_intermediate_size": 64
}
GLM4_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | {
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
    "attention_bias": True,
}
LATENT = {  # all sizes differ
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 20,
    "v_head_dim": 18,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "tied": False,
}
MISTRAL4 = {"rope_parameters": MINISTRAL3 | {"partial_rotary_factor": 0.4}}
# Here cells are as wide as hidden states.
GLM_FLASH = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "head_dim": 16, "first_k_dense_replace": 1} | {
    "routed_scaling_factor": 1.5
}
DEEPSEEK3 = {"q_lora_rank": None, "head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2} | {
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}
}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 2}
LLAMA4 = {"num_local_experts": 6, "intermediate_size": 48, "intermediate_size_mlp": 128, "tied": False}
# In GGUF files, the number of Maverick's experts says that queries and keys are not normed.
SCOUT = {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}, "max_position_embeddings": 16384}
MAVERICK = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "num_experts_per_tok": 2, "use_qk_norm": False}
MOBILE_LLM = {"moe_layers": [], "num_local_experts": 0, "interleave_moe_layer_step": 0, "num_experts_per_tok": 0} | {
    "layer_types": ["full_attention"] * 5,
    "no_rope_layers": [1] * 5,
    "max_position_embeddings": 16384,
    "tied": True,
}
HUNYUAN = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
LFM2 = {
    "layers": 7,
    "layer_types": ["conv" if layer in (0, 1, 3, 4, 6) else "full_attention" for layer in range(7)],
    "block_multiple_of": 32,
}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16}
# The same for the others. Windows are shorter than the prompts.
FAMILIES = {
    "mistral with a window": ("mistral", {"sliding_window": 16}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "phi3": ("phi3", {"tied": False}),
    "phi3 with a window": ("phi3", {"sliding_window": 16}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 90}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {"tied": False}),
    "olmo3": ("olmo3", {"tied": False, "sliding_window": 16, "rope_parameters": OLMO3}),
    "glm4": ("glm4", {"tied": False}),
    "seed_oss": ("seed_oss", {"tied": False}),
    "hunyuan": ("hunyuan-dense", {"rope_parameters": HUNYUAN, "max_position_embeddings": 32768}),
    "ernie4_5": ("ernie4_5", {}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL3}),
    "granite": ("granite", SCALES),
    "granite 4": ("granitemoehybrid", SCALES | GRANITE4 | {"position_embedding_type": "rope"}),
    "granite 4 without positions": ("granitemoehybrid", SCALES | GRANITE4 | {"position_embedding_type": "nope"}),
    "granite 4 h": ("granitemoehybrid", SCALES | GRANITE4H),
    "granite 4 h, two groups": ("granitemoehybrid", SCALES | GRANITE4H | {"mamba_n_groups": 2, "tied": False}),
    "granite 4 h with experts": ("granitemoehybrid", SCALES | GRANITE4H | GRANITE4H_EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3moe": ("qwen3moe", QWEN_EXPERTS),
    "qwen3moe, not normalised": ("qwen3moe", QWEN_EXPERTS | {"norm_topk_prob": False}),
    "granitemoe": ("granitemoe", SCALES | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "gpt-oss": ("gpt-oss", GPT_OSS | {"tied": False, "rope_parameters": YARN | {"truncate": False}}),
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16} | CAPS),
    "gemma3n": ("gemma3n", GEMMA3N),
    "gemma3n as in llama.cpp": ("gemma3n", GEMMA3N_LLAMA_CPP),
    "gemma4": ("gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4, values from keys": ("gemma4", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 with experts": ("gemma4", GEMMA4 | GEMMA4_EXPERTS),
    "qwen35": ("qwen35", QWEN35 | {"linear_num_value_heads": 4}),
    "qwen35, as many heads of keys": ("qwen35", QWEN35 | {"linear_num_value_heads": 2, "tied": False}),
    "qwen35moe": ("qwen35moe", QWEN35 | QWEN35_EXPERTS | {"linear_num_value_heads": 4, "tied": False}),
    "glm4moe": ("glm4moe", GLM4_EXPERTS | {"tied": False}),
    "glm4moe with norms": ("glm4moe", GLM4_EXPERTS | {"use_qk_norm": True, "norm_topk_prob": False}),
    "mistral 4": ("mistral4", LATENT | MISTRAL4),
    "glm 4.7 flash": ("deepseek2", LATENT | GLM_FLASH),
    "deepseek v3 without groups": ("deepseek_v3", LATENT | DEEPSEEK3),
    "ernie4_5-moe": ("ernie4_5-moe", ERNIE_EXPERTS),
    "ernie4_5-moe, nothing shared": ("ernie4_5-moe", ERNIE_EXPERTS | {"moe_num_shared_experts": 0}),
    "lfm2": ("lfm2", LFM2),
    "lfm2moe": ("lfm2moe", LFM2 | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "llama4": ("llama4", LLAMA4 | SCOUT),
    "llama4, experts in every other layer": ("llama4", LLAMA4 | MAVERICK),
    "mobilellm": ("llama4", LLAMA4 | MOBILE_LLM),  # llama.cpp asks for experts
    "gemma3": ("gemma3", {"layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16, "rope_parameters": GEMMA}),
}
# What GGUF files cannot say is tested from folders alone.
NOT_IN_GGUF = ("mistral with a window", "qwen2 with windows", "qwen3moe, not normalised")


@dataclass
class TinyModel:
    """A random model in transformers (f32, eager) and the folder it was saved to."""

    hf: torch.nn.Module
    folder: Path

    def load(self) -> LoadedModel:
        return load_model(self.folder)


def byte_tokenizer() -> FastTokenizer:
    """One token a byte, and the special tokens of the chat template; 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*SPECIAL, *alphabet])}
    tokenizer = FastTokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def tokenizers() -> dict[str, FastTokenizer]:
    """Tokenizers of other kinds, with pipelines that use most of what `tokenizer.json` can say; fewer ids than 300."""
    from tokenizers import normalizers, processors

    pieces = ["<unk>", "<s>", "[CLS]", "[SEP]", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?", "##a", "▁the", "th"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(200)]
    unigram = FastTokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    word_piece = FastTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    word_piece.normalizer = normalizers.BertNormalizer()
    word_piece.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.Digits()]
    )
    word_piece.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    word_piece.decoder = decoders.WordPiece()
    vocab = {piece: i for i, piece in enumerate([*pieces, *bytes_])}
    fallback = FastTokenizer(models.BPE(vocab, [("t", "h")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for tokenizer in (unigram, word_piece, fallback):
        tokenizer.add_special_tokens(["<unk>", "<s>"])
    return {"bytes": byte_tokenizer(), "unigram": unigram, "word_piece": word_piece, "fallback": fallback}


BUFFERS = ("layer_scalar", "e_score_correction_bias", "expert_bias")  # that are weights


def make_tiny(folder: Path, architecture: str = "llama", *, tied: bool = True, layers: int = 5, **more) -> TinyModel:
    """Build, randomise and save a tiny model: hidden 64, 4 heads to 2, unless `more` says otherwise."""
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        MODEL_TYPES.get(architecture, architecture),
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
        **({"max_position_embeddings": 1024} | sizes | more),
    )
    torch.manual_seed(len(architecture) + layers + 10 * tied)
    build = Mistral4ForCausalLM if architecture == "mistral4" else AutoModelForCausalLM.from_config  # which lacks it
    model = build(config).eval()
    if more.get("mtp_num_hidden_layers"):
        model.mtp = Mtp(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that attention and position matter, and that logits have no ties.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith(BUFFERS):
                buffer.uniform_(0.7, 1.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return TinyModel(model, folder)


class Mtp(torch.nn.Module):
    """The MTP layer of Qwen 3.5, which transformers leaves out; named and saved as in published folders."""

    def __init__(self, model) -> None:
        super().__init__()
        size, last = model.config.hidden_size, model.config.layer_types.index("full_attention")
        like = model.model.layers[last]
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([type(like)(model.config, last)])
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, type(model.model.norm)(size))

    @torch.inference_mode()
    def forward(self, model, read, token_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """What it predicts after tokens [n] that follow positions 0 to n, where the head read [n, hidden_size].

        Returns:
            Logits [n, vocab_size], and what the head read of the layer itself.
        """
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(torch.tensor(token_ids)))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(torch.as_tensor(read))), -1))[None]
        places = torch.arange(len(token_ids))[None]
        mask = torch.full((1, 1, len(token_ids), len(token_ids)), -torch.inf).triu(1)
        rotations = model.model.rotary_emb(x, places)
        x = self.layers[0](x, position_embeddings=rotations, attention_mask=mask, position_ids=places)
        read = self.norm(x if isinstance(x, torch.Tensor) else x[0])[0]
        return model.lm_head(read), read


# Of published folders -> GGUF's.
MTP_NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"} | {
    "norm": "shared_head_norm"
}


def official_gemma4(folder: Path) -> dict:
    """Let a folder of Gemma 4 give the sizes of heads by kind of layer, as published ones do; its config."""
    config = json.loads((folder / "config.json").read_text())
    full = config.pop("per_layer_config")["2"]
    config |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full.get("num_key_value_heads")}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_gguf(
    path: Path, tiny: TinyModel, dtype=np.float32, vocabulary: str = "byte-level", quantise=None, experts: str = ""
) -> None:
    """Convert a tiny model with the gguf package, as llama.cpp's converter does, independently of our reader.

    `quantise`: type and bytes, by rows, of matrices of the file's name; None writes all in `dtype`.
    `experts`: the type of the matrices of experts; "": `dtype`.
    """
    config = tiny.hf.config
    architecture = GGUF_NAMES.get(config.model_type, config.model_type)
    is_hybrid = config.model_type == "granitemoehybrid" and "linear_attention" in config.layer_types
    architecture = "granitehybrid" if is_hybrid else architecture
    writer = gguf.GGUFWriter(path, architecture)
    further = getattr(config, "mtp_num_hidden_layers", 0)
    writer.add_block_count(config.num_hidden_layers + further)
    if further:
        writer.add_nextn_predict_layers(further)
    writer.add_context_length(1 << 20 if is_hybrid else config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size", 0)
    if architecture in ("lfm2", "lfm2moe"):
        inner = len(tiny.hf.model.layers[0].feed_forward.w1.weight)
        kv_heads = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
    elif architecture == "gemma3n":
        inner, kv_heads = config.intermediate_size, config.num_key_value_heads
    elif architecture == "gemma4":
        kv_heads = [config.per_layer_config[i].num_key_value_heads for i in range(config.num_hidden_layers)]
        kv_heads = kv_heads if config.attention_k_eq_v else kv_heads[0]
        if config.use_double_wide_mlp:
            own = config.num_hidden_layers - config.num_kv_shared_layers
            inner = [inner] * own + [2 * inner] * config.num_kv_shared_layers
    else:
        kv_heads = 1 if hasattr(config, "kv_lora_rank") else config.num_key_value_heads
        inner = getattr(config, "intermediate_size_mlp", inner)
        if config.model_type == "granitemoehybrid":
            kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if "lfm2" in architecture else config.rms_norm_eps)
    add_facts(writer, config)
    add_vocabulary(writer, vocabulary)
    by_name = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config.num_hidden_layers + further)
    if architecture == "gemma3n":
        add_gemma3n_tensors(writer, tiny.hf.model, dtype)
    scales = {name: scale for name, scale in tiny.hf.named_buffers() if name.endswith(BUFFERS)}
    for name, parameter in (dict(tiny.hf.named_parameters()) | scales).items():
        array = parameter.detach().numpy()
        if "altup_" in name:
            continue
        if name.startswith("mtp."):
            if (part := name.split(".")[1]) in MTP_NAMES:
                array = array if part == "fc" else array + 1
                name = f"blk.{config.num_hidden_layers}.nextn.{MTP_NAMES[part]}.weight"
                add_matrix(writer, name, array, dtype, quantise)
                continue
            name = name.replace("mtp.layers.0", f"model.layers.{config.num_hidden_layers}")
        if ".linear_attn." in name:
            add_matrix(writer, *delta_net_tensor(config, name, array), dtype, quantise)
            continue
        if ".mamba." in name:
            add_matrix(writer, *mamba_tensor(config, name, array), dtype, quantise)
            continue
        array = array[:, 0] if name.endswith("conv.conv.weight") else array
        if architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe") and name.endswith("norm.weight"):
            array = array + 1
        if name.split(".")[-2] in ("q_proj", "k_proj") and architecture in PERMUTED:
            array = array.reshape(-1, 2, config.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        layer = name.split(".")[2] if "layers." in name else ""
        if name.endswith((".router.scale", ".per_expert_scale")):
            target = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{layer}.{target}.scale", array)
            continue
        if name.endswith("kv_b_proj.weight"):
            both = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
            for part, matrices in (("k", np.ascontiguousarray(keys.swapaxes(1, 2))), ("v", values)):
                add_matrix(writer, f"blk.{layer}.attn_{part}_b.weight", matrices, dtype, quantise)
            continue
        if architecture in ("gemma4", "mistral4") and name.endswith("gate_up_proj"):
            writer.add_tensor(f"blk.{layer}.ffn_gate_up_exps.weight", array.astype(dtype))
            continue
        if name.endswith("shared_mlp.input_linear.weight"):
            kind = "_shexp" if config.num_local_experts else ""
            for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}{kind}.weight", half.astype(dtype))
            continue
        if not getattr(config, "num_local_experts", 0):
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        if ".experts." in name:
            array = array.swapaxes(1, 2) if architecture == "llama4" else array
            kind, halves = "weight", {"down": array}
            if architecture == "gpt-oss":
                kind = "bias" if name.endswith("_bias") else "weight"
                array = array if kind == "bias" else array.swapaxes(1, 2)
                halves = {"gate": array[:, ::2], "up": array[:, 1::2]} if "gate_up_proj" in name else {"down": array}
            elif name.endswith("gate_up_proj"):
                halves = dict(zip(("gate", "up"), np.split(array, 2, axis=1), strict=True))
            for part, half in halves.items():
                if quantise is not None and kind == "weight":
                    stored, rows = quantise(f"blk.{layer}.ffn_{part}_exps.weight", half)
                    raw = gguf.GGMLQuantizationType[stored]
                    writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", rows, raw_dtype=raw)
                    continue
                stored = np.ascontiguousarray(half, dtype if kind == "weight" else np.float32)
                raw = gguf.GGMLQuantizationType[experts] if experts and kind == "weight" else None
                stored = stored if raw is None else gguf.quants.quantize(stored, raw)
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{kind}", stored, raw_dtype=raw)
            continue
        if architecture == "gpt-oss":
            name = name.replace("sinks", "sinks.weight")
        elif architecture in ("gemma3n", "gemma4"):
            name = name.replace("layer_scalar", "layer_scalar.weight").replace("_scale", "_scale.weight")
        elif name.endswith(("shared_expert_gate.weight", *BUFFERS)):
            name, array = name.replace("gate.moe_statics", "moe_statics"), array.reshape(-1)
            name = name.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
        elif architecture != "llama4":
            name = name.replace("router.", "router.layer.")
        add_matrix(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), array, dtype, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_matrix(writer, name: str, array: np.ndarray, dtype, quantise) -> None:
    """Add a tensor, in f32 if it is small."""
    if array.ndim == 1 or name.endswith(
        ("conv.weight", "conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight", "_coef.weight")
    ):
        writer.add_tensor(name, array.astype(np.float32))
    elif quantise is not None:
        stored, rows = quantise(name, array)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[stored])
    else:
        writer.add_tensor(name, array.astype(dtype))


def delta_net_tensor(config, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a recurrent layer of Qwen 3.5, as llama.cpp's converter writes it."""
    _, _, layer, _, part = name.split(".", 4)
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    per_group, dim = heads // groups, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim

    def tiled(values: np.ndarray) -> np.ndarray:
        """Heads of values along the first axis: the first of each group, then the second of each."""
        parts = values.reshape(groups, per_group, -1, *values.shape[1:])
        return parts.swapaxes(0, 1).reshape(values.shape)

    if part == "A_log":
        array = -torch.from_numpy(array).exp().numpy()
    array = array[:, 0] if part == "conv1d.weight" else array
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        array = np.concatenate((array[:keys], tiled(array[keys:])))
    elif part == "out_proj.weight":
        array = np.ascontiguousarray(tiled(array.T).T)
    elif part != "norm.weight":
        assert len(array) in (heads, heads * dim)
        array = tiled(array)
    target = {
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "conv1d.weight": "ssm_conv1d.weight",
        "norm.weight": "ssm_norm.weight",
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "out_proj.weight": "ssm_out.weight",
    }[part]
    return f"blk.{layer}.{target}", array


def mamba_tensor(config, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The same of Granite 4 H."""
    _, _, layer, _, part = name.split(".", 4)
    target, shape = {
        "A_log": ("ssm_a", (-1, 1)),
        "D": ("ssm_d", (-1, 1)),
        "conv1d.bias": ("ssm_conv1d.bias", array.shape),
        "conv1d.weight": ("ssm_conv1d.weight", (-1, config.mamba_d_conv)),
        "dt_bias": ("ssm_dt.bias", array.shape),
        "in_proj.weight": ("ssm_in.weight", array.shape),
        "norm.weight": ("ssm_norm.weight", (config.mamba_n_groups, -1)),
        "out_proj.weight": ("ssm_out.weight", array.shape),
    }[part]
    array = -torch.from_numpy(array).exp().numpy() if part == "A_log" else array
    return f"blk.{layer}.{target}", array.reshape(shape)


def add_vocabulary(writer, vocabulary: str = "byte-level") -> None:
    """A tokenizer of `VOCAB_SIZE` tokens, and the chat template."""
    if vocabulary == "byte-level":
        tokens = byte_tokenizer().get_vocab()
        pieces = [*sorted(tokens, key=tokens.get), "qz"]  # one merge: the writer leaves out empty lists
        types = [3 if piece in SPECIAL else 1 for piece in pieces]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["q z"])
    else:
        pieces = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *"▁abcdefghijklmnop",
            "ab",
            "▁ab",
        ]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(VOCAB_SIZE)])
        writer.add_bos_token_id(1)
    unused = [f"<unused{i}>" for i in range(VOCAB_SIZE - len(pieces))]
    writer.add_token_list([*pieces, *unused])
    writer.add_token_types([*types, *[5] * len(unused)])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def add_facts(writer, config) -> None:
    """What llama.cpp's converter writes of one architecture and not of another."""
    if config.model_type in ("gemma3n_text", "gemma4_text"):
        (add_gemma3n_facts if config.model_type == "gemma3n_text" else add_gemma4_facts)(writer, config)
        return
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    theta = rope["rope_theta"]
    if config.model_type == "hunyuan_v1_dense":
        theta *= rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
        rope = rope | {"rope_type": "default"}
    writer.add_rope_freq_base(theta)
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    else:
        writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))
    if hasattr(config, "kv_lora_rank"):
        add_latent_facts(writer, config)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_5_moe_text":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        if config.moe_num_shared_experts:
            writer.add_expert_shared_feed_forward_length(64)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        if "chunked_attention" not in config.layer_types:
            writer.add_sliding_window(0)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
    if config.model_type in ("granite", "granitemoe", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        factor = 1 + math.log(config.max_position_embeddings / original) / math.log(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(factor))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    elif rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = np.clip((turns - low) / max(high - low, 1e-9), 0.0, 1.0)
        factors = 1 / ((1 - blend) / rope["factor"] + blend)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_latent_facts(writer, config) -> None:
    """What its converter writes besides of models with latent attention. That of GLM's scores llama.cpp infers."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.model_type != "mistral4":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if mscale := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def add_gemma3n_facts(writer, config) -> None:
    """What its converter writes besides."""
    quantiles = torch.distributions.Normal(0, 1).icdf(torch.tensor(config.activation_sparsity_pattern))
    writer.add_activation_sparsity_scale(quantiles.tolist())
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_gemma3n_tensors(writer, model, dtype) -> None:
    """Matrices of streams, stacked; and of layers that share keys and values those that published files have."""
    config = model.config
    for target, matrices in (("proj", model.altup_projections), ("unembd_proj", model.altup_unembed_projections)):
        stacked = torch.stack([matrix.weight.detach() for matrix in matrices]).numpy()
        writer.add_tensor(f"altup_{target}.weight", stacked.astype(dtype))
    size = config.num_key_value_heads * config.head_dim
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        for name in ("k", "v"):
            writer.add_tensor(f"blk.{layer}.attn_{name}.weight", np.ones((size, config.hidden_size), dtype))
        writer.add_tensor(f"blk.{layer}.attn_k_norm.weight", np.ones(config.head_dim, np.float32))


def add_gemma4_facts(writer, config) -> None:
    """What its converter writes besides."""
    sizes = {config.layer_types[i]: config.per_layer_config[i] for i in range(config.num_hidden_layers)}
    head_dim, local = sizes["full_attention"].head_dim, sizes["sliding_attention"].head_dim
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_dimension_count_swa(local)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rotated = int(head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    table = np.array([1.0] * rotated + [1e30] * (head_dim // 2 - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", table)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def make_backend(kind: str, loaded, **options):
    options = {"num_slots": 1, "context_length": CONTEXT} | options
    if kind == "torch":
        return TorchBackend(loaded.config, loaded.tensors, dtype="f32", device="cpu", **options)
    from taper.backends.ggml import GgmlBackend  # tests/vllm shares this file, where ggml is not installed
    from taper.backends.ggml.library import ggml

    build = partial(GgmlBackend, **options | {"dtype": "f32", "kv_dtype": "f32", "threads": 1})
    if kind == "split":  # with both parts on the CPU
        from taper.backends.split import SplitBackend, least_on_device

        count = loaded.config.num_hidden_layers
        on_device = max(count // 2, least_on_device(loaded.config, count // 2))
        return SplitBackend(loaded.config, loaded.tensors, on_device, build, build)
    return build(loaded.config, loaded.tensors, device=None if kind == "ggml" else ggml.device(kind))


def assert_llama_cpp_agrees(path: Path, prompts: Sequence[list[int]] = (), tokens: int = 32) -> None:
    """Full depth gives the greedy tokens of llama.cpp, all in f32; skips the test where it is not installed."""
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False, type_k=0, type_v=0)
    loaded = load_model(path)
    backend, full = make_backend("ggml", loaded), DepthPolicy.full(loaded.config.num_hidden_layers)
    backend._model = replace(backend._model, exact=False)  # gelu from a table of f16, as there
    engine = Engine(backend)
    for prompt in prompts or map(random_prompt, range(4)):
        steps = zip(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), range(tokens), strict=False)
        assert complete(engine, [prompt], [full], tokens) == [[token for token, _ in steps]]


def random_prompt(seed: int, length: int = 23) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def complete(engine: Engine, prompts, policies, tokens: int = TOKENS, **options) -> list[list[int]]:
    """Token ids of greedy completions, all in one batch."""
    params = SamplingParams(max_tokens=tokens)
    given = zip(prompts, policies, strict=True)
    return engine.complete(Request(prompt, params, policy, **options) for prompt, policy in given)


def reference_ids(
    tiny: TinyModel, prompt: list[int], policy: DepthPolicy | None, tokens: int = TOKENS, reuse: str = "filled"
) -> list[int]:
    """The reference implementation's greedy completion; without a policy, plain transformers."""
    return list(_reference_ids(tiny.hf, tuple(prompt), policy, tokens, reuse))


@cache
def _reference_ids(model, prompt: tuple[int, ...], policy: DepthPolicy | None, tokens: int, reuse: str) -> list[int]:
    from taper import hf

    custom = {} if policy is None else {"custom_generate": hf.custom_generate(policy, reuse)}
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **custom)
    return out[0, len(prompt) :].tolist()


def reference_turns(tiny: TinyModel, turns, policy: DepthPolicy, tokens: int = TOKENS) -> list[list[int]]:
    """The reference implementation's completions of a conversation, in one cache."""
    from transformers import DynamicCache

    from taper import hf

    is_recurrent = {"linear_attention", "conv"} & {*(getattr(tiny.hf.config, "layer_types", None) or [])}
    cache = DynamicCache(config=tiny.hf.config) if is_recurrent else DynamicCache()
    ids, completions = [], []
    for turn in turns:
        given = torch.tensor([[*ids, *turn]])
        out = tiny.hf.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=cache,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            custom_generate=hf.custom_generate(policy),
        )
        ids = out[0].tolist()
        assert {layer.get_seq_length() for layer in hf._own(cache)} == {len(ids) - 1}
        completions.append(ids[given.shape[1] :])
    return completions


def policies(layers: int) -> dict[str, DepthPolicy]:
    """Each curve, scattered skip orders, short and long plateaus."""
    last, least = layers - 1, max(2, layers - 4)
    return {
        "d3": DepthPolicy.d3(layers, 0.96, skip_order=[last - 1, 1, 2]),
        "d3 late": DepthPolicy.d3(layers, 0.9, start=9, min_depth=least, skip_order=[2, last, 1, last - 1]),
        "middle first": DepthPolicy.middle_first(layers, 0.98),
        "skipdecode": DepthPolicy.skipdecode(layers, min_depth=2, span=20, start=3),
        "early exit": DepthPolicy.early_exit(layers, 3),
        "static": DepthPolicy.static(layers, layers - 2, [last, 1]),
    }


def with_adapters(policy: DepthPolicy, hidden_size: int, rank: int = 32, scale: float = 2.0) -> DepthPolicy:
    """A policy with random adapters, which change its outputs, at all layers that it skips but the last."""
    rng = np.random.default_rng(rank)
    shapes = (rank, hidden_size), (hidden_size, rank)
    skipped = policy.skip_order[: policy.num_hidden_layers - policy.min_depth][:-1] or policy.skip_order[:1]
    layers = {
        layer: tuple((scale * rng.normal(size=shape) / shape[1] ** 0.5).astype(np.float16) for shape in shapes)
        for layer in skipped
    }
    return replace(policy, adapters=Adapters(layers))


def one_slot(backend, tokens, logits_rows, start: int = 0, slot: int = 0) -> TokenBatch:
    count = len(tokens)
    return TokenBatch(
        np.asarray(tokens, np.int32),
        np.arange(start, start + count, dtype=np.int32),
        np.full(count, slot, np.int32),
        (count,) * backend.config.num_hidden_layers,
        logits_rows=logits_rows,
    )
