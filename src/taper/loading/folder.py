"""Hugging Face folders: config.json, safetensors, tokenizer.json. Weights stay in the mapped files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..checks import limited_attention, unique_keys
from ..errors import ModelError
from ..files import open_file, read_json
from .model import LoadedModel, ModelConfig, Tensor, TensorNames, check_architecture, check_config, check_tensors
from .tokenizer_files import tokenizer_from_folder

# model_type of config.json -> our architecture.
_MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_DTYPES = ("F32", "F16", "BF16")
MAX_HEADER_BYTES = 16 << 20  # of a safetensors file; a thousand tensors take a hundredth of that

FOLDER_NAMES = TensorNames(
    "model.layers.",
    {
        "input_layernorm.weight": "input_layernorm",
        "self_attn.q_proj.weight": "q_proj",
        "self_attn.k_proj.weight": "k_proj",
        "self_attn.v_proj.weight": "v_proj",
        "self_attn.o_proj.weight": "o_proj",
        "self_attn.q_proj.bias": "q_bias",
        "self_attn.k_proj.bias": "k_bias",
        "self_attn.v_proj.bias": "v_bias",
        "self_attn.q_norm.weight": "q_norm",
        "self_attn.k_norm.weight": "k_norm",
        "post_attention_layernorm.weight": "post_attention_layernorm",
        "mlp.gate_proj.weight": "gate_proj",
        "mlp.up_proj.weight": "up_proj",
        "mlp.down_proj.weight": "down_proj",
    },
    {"model.embed_tokens.weight": "embed_tokens", "model.norm.weight": "norm", "lm_head.weight": "lm_head"},
)


def load_folder(path: Path) -> LoadedModel:
    """Read a model from a Hugging Face folder.

    Raises:
        ModelError: a file is missing or damaged, weights are pickled, or the model is not supported.
    """
    if not os.path.lexists(path / "config.json"):
        one = next(iter(sorted(path.glob("*.gguf"))), None)
        hint = f"name a file, such as {one}" if one else "give a complete Hugging Face model folder, or a .gguf file"
        raise ModelError(f"{path} has no config.json", hint)
    settings = read_json(path / "config.json")
    tensors = FOLDER_NAMES.rename({name: t for name, t in _read_weights(path).items() if "rotary_emb" not in name})
    try:
        config = _read_config(settings, tensors)
    except (TypeError, ValueError, ArithmeticError) as error:  # a value of a kind that no formula expects
        raise ModelError(f"{path / 'config.json'} holds a value that makes no sense: {error}") from None
    check_config(config)
    if config.tie_word_embeddings:
        tensors.pop("lm_head", None)
    check_tensors(config, tensors, FOLDER_NAMES)
    return LoadedModel(config, tensors, tokenizer_from_folder(path, config.vocab_size))


def _read_weights(path: Path) -> dict[str, Tensor]:
    index = path / "model.safetensors.index.json"
    if os.path.lexists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map of file names")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names {outside[0]!r}, which is not a file of this folder")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
            raise ModelError(
                f"{path} holds pickled weights only; Taper never loads pickle", "convert the model to safetensors"
            )
        raise ModelError(f"{path} has no *.safetensors file", "give a complete Hugging Face model folder")
    tensors: dict[str, Tensor] = {}
    for name in names:
        shard = _read_safetensors(path / name)
        if twice := sorted(tensors.keys() & shard.keys()):
            raise ModelError(f"tensor {twice[0]} is in {name} and in another file too", "keep one model in a folder")
        tensors |= shard
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Map one file. The library checks the header; numpy has no bfloat16, so the bytes are taken from the map."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_file(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(f"{path}: a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
        with safe_open(path, framework="numpy"):
            data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        start = 8 + header_bytes
        header = json.loads(data[8:start].tobytes(), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}", "download it again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ModelError(f"tensor {name} is of type {entry['dtype']}", f"supported: {', '.join(_DTYPES)}")
        first, last = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
    return tensors


def _read_config(settings: dict[str, Any], tensors: dict[str, Tensor]) -> ModelConfig:
    def get(key: str, kind: type, default: Any = None) -> Any:
        value = settings.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json lacks {key}")
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"config.json: {key} is {value!r}; it must be of type {kind.__name__}")
        return value

    model_type = get("model_type", str)
    check_architecture(model_type, tuple(_MODEL_TYPES))
    _refuse_variants(settings, model_type)
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope parameters are {rope!r}; they must be an object")
    hidden, heads = get("hidden_size", int), get("num_attention_heads", int)
    head_dim = get("head_dim", int, 128 if model_type == "qwen3" else hidden // max(heads, 1))
    theta = get("rope_theta", float, rope.get("rope_theta", 10000.0))
    scale, factors = _rope_scaling(rope, head_dim, theta)
    embedding = tensors.get("embed_tokens")
    return ModelConfig(
        architecture=_MODEL_TYPES[model_type],
        num_hidden_layers=get("num_hidden_layers", int),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size", int),
        num_attention_heads=heads,
        num_key_value_heads=get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        max_position_embeddings=get("max_position_embeddings", int, 2048),
        rms_norm_eps=get("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_interleaved=False,
        rope_scale=scale,
        rope_factors=factors,
        qkv_bias=model_type == "qwen2" or "layers.0.q_bias" in tensors,
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        quantization=embedding.dtype if embedding else "F32",
    )


def _refuse_variants(settings: dict[str, Any], model_type: str) -> None:
    """Refuse what these architectures can be configured to do and Taper does not."""
    layer_types = settings.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list):
        raise ModelError(f"config.json: layer_types is {layer_types!r}; it must be a list")
    # transformers' own defaults: Mistral has a window unless it says null, Qwen has none unless it says so.
    defaults = {"use_sliding_window": model_type == "mistral", "sliding_window": 4096}
    if attention := limited_attention(SimpleNamespace(**(defaults | settings))):
        raise ModelError(
            f"config.json asks for {attention} attention, which is not supported",
            "Taper runs models with full attention in every layer",
        )
    if settings.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {settings['hidden_act']!r} is not supported", "supported: silu")
    if settings.get("quantization_config"):
        raise ModelError("quantised safetensors are not supported", "use the original weights, or a GGUF file")
    if settings.get("partial_rotary_factor", 1.0) != 1.0 or settings.get("mlp_bias"):
        raise ModelError("config.json asks for partial rotary embeddings or MLP biases, which are not supported")


def _rope_scaling(rope: dict[str, Any], head_dim: int, theta: float) -> tuple[float, tuple[float, ...] | None]:
    """Position scale and frequency divisors of a `rope_parameters` (or `rope_scaling`) object."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0, None
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if not isinstance(kind, str) or kind not in needed:
        raise ModelError(f"rope scaling {kind!r} is not supported", "supported: default, linear, llama3")
    numbers = [rope.get(key) for key in needed[kind]]
    if not all(isinstance(number, (int, float)) and 0 < number < 1e6 for number in numbers):
        raise ModelError(f"rope scaling {kind!r} needs positive numbers for {', '.join(needed[kind])}")
    if kind == "linear":
        return 1.0 / rope["factor"], None
    if not (0 < theta < 1e12 and 2 <= head_dim <= 1024):
        raise ModelError(f"config.json: rope_theta {theta} or head_dim {head_dim} is out of range")
    # Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended.
    original = rope.get("original_max_position_embeddings", 8192)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    if high == low or not isinstance(original, int):
        raise ModelError("rope scaling 'llama3' needs low_freq_factor below high_freq_factor")
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return 1.0, tuple(factors)
