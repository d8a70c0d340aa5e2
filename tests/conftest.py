"""Tiny random models, offline: built by transformers, saved as folders, converted to GGUF."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from taper.loading import LoadedModel, load_model
from taper.loading.names import default_model_path

torch.set_num_threads(1)

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_MODEL_FILE = default_model_path()  # the user's own, before a test points the cache elsewhere
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 300

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


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


def make_tiny(folder: Path, architecture: str = "llama", *, tied: bool = True, layers: int = 5, **more) -> TinyModel:
    """Build, randomise and save a tiny model: hidden 64, 4 heads to 2."""
    config_class, model_class = _CLASSES[architecture]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
        **more,
    )
    torch.manual_seed(len(architecture) + layers + 10 * tied)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that attention and position matter, and that logits have no ties.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return TinyModel(model, folder)


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3", "mistral", "llama-untied", "llama-3.1"])
def tiny(request, tmp_path_factory) -> TinyModel:
    """One tiny model of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama-3.1":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return make_tiny(folder, rope_parameters=scaling)
    architecture, _, untied = request.param.partition("-")
    more = {"sliding_window": None} if architecture == "mistral" else {}
    return make_tiny(folder, architecture, tied=not untied, **more)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> TinyModel:
    """A tiny llama of 6 layers."""
    return make_tiny(tmp_path_factory.mktemp("tiny_llama"), layers=6)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama, tmp_path_factory) -> Path:
    """The same as a GGUF file, q and k permuted as GGUF has them."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama)
    return path


def write_gguf(path: Path, tiny: TinyModel, dtype=np.float32) -> None:
    """Convert a tiny model with the gguf package, independently of our reader."""
    import gguf

    config = tiny.hf.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    tokens = byte_tokenizer().get_vocab()
    pieces = [*sorted(tokens, key=tokens.get), "qz"]  # one merge: the writer leaves out empty lists
    pieces += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(pieces))]
    types = [3 if piece in SPECIAL else 5 if piece.startswith("<unused") else 1 for piece in pieces]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_token_merges(["q z"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, parameter in tiny.hf.named_parameters():
        parts = name.split(".")
        array = parameter.detach().numpy()
        if parts[-2] in ("q_proj", "k_proj") and architecture == "llama":
            array = array.reshape(-1, 2, config.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        target = f"{names[parts[-2]]}.{parts[-1]}"
        if "layers" in parts:
            target = f"blk.{parts[parts.index('layers') + 1]}.{target}"
        writer.add_tensor(target, array.astype(np.float32 if array.ndim == 1 else dtype))
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        factors = plain / tiny.hf.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "taper-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
