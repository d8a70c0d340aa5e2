"""Hugging Face folders: config.json, safetensors, tokenizer.json. Weights stay in the mapped files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .families import MODEL_TYPES, find_family
from .files import Settings, parts_of, read_json
from .gguf import load_gguf
from .read_config import read_config
from .safetensors_files import read_safetensors
from .tensors import RECOMMENDED, WEIGHT_TYPES, LoadedModel, Tensor, as_f32, fit_tensors
from .tokenizer_files import tokenizer_from_folder

_DTYPES = ("F32", "F16", "BF16")
_BESIDE = ("adapter", "consolidated")  # safetensors files of something else, or of the same weights again
_LANGUAGE_MODEL = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")  # before names, in models that see or hear


def load_folder(path: Path) -> LoadedModel:
    """Read a model from a Hugging Face folder.

    Raises:
        ModelError: a file is missing or damaged, weights are pickled, or the model is not supported.
    """
    if not os.path.lexists(path / "config.json"):
        files = sorted(path.glob("*.gguf"))
        if len({parts_of(file)[0] for file in files}) == 1:
            return load_gguf(files[0])
        hint = "give a complete Hugging Face model folder, or a .gguf file"
        raise ModelError(f"{path} has no config.json", f"name a file, such as {files[0]}" if files else hint)
    settings = Settings(read_json(path / "config.json"), "config.json")
    inner = settings.values.get("text_config")
    if has_parts := isinstance(inner, dict) and inner.get("model_type") in MODEL_TYPES:
        settings = Settings(inner or {}, "config.json")
    family = find_family(settings.get("model_type", str), MODEL_TYPES)
    settings = Settings({**family.defaults, **settings.values}, "config.json")
    if family.folder_settings is not None:
        settings = Settings({**settings.values, **family.folder_settings(settings)}, "config.json")
    quantised = settings.values.get("quantization_config")
    is_mxfp4 = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"
    if quantised and not (family.reads_mxfp4 and is_mxfp4):
        raise ModelError("quantised safetensors are not supported", "use the original weights, or a GGUF file")
    names, tensors = family.folder_names, _read_weights(path)
    tensors = _of_language_model(tensors) if has_parts else tensors
    tensors = family.rearranged(tensors, settings) if family.rearranged else tensors
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_TYPES:
            raise ModelError(f"tensor {name} is of type {tensor.dtype}", f"supported: {', '.join(_DTYPES)}")
    tensors = names.rename({name: t for name, t in tensors.items() if "rotary_emb" not in name})
    config = read_config(family, settings, tensors, interleaved=family.interleaved == "everywhere")
    if family.norm_offset:
        norms = (name for name in tensors if name.endswith("norm") and not name.endswith("mixer_norm"))
        tensors |= {name: _plus(tensors[name], family.norm_offset) for name in norms}
    tensors = fit_tensors(config, tensors, names)
    return LoadedModel(config, tensors, tokenizer_from_folder(path, config.vocab_size), _sampling(path))


def _of_language_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a multimodal model's language model, by the names that text-only models have."""
    kept = {name: tensor for name, tensor in tensors.items() if name == "lm_head.weight" or name.startswith("mtp.")}
    for name, tensor in tensors.items():
        if match := _LANGUAGE_MODEL.match(name):
            rest = name[match.end() :]
            kept[rest if rest.startswith("lm_head") else f"model.{rest}"] = tensor
    return kept


def _sampling(path: Path) -> dict[str, Any]:
    """What generation_config.json recommends; "do_sample": false is temperature 0."""
    settings = read_json(path / "generation_config.json", missing={})
    if settings.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: value for name in RECOMMENDED if (value := settings.get(name)) is not None}


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in model.safetensors, else in the files that the index names, else in all files.

    Beside them may be other files: adapters, or the same weights in their authors' format.
    """
    index = path / "model.safetensors.index.json"
    if os.path.lexists(path / "model.safetensors"):
        names = ["model.safetensors"]
    elif os.path.lexists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map of file names")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names {outside[0]!r}, which is not a file of this folder")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        names = [name for name in names if not name.startswith(_BESIDE)] or names
    if not names:
        if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
            pickled = f"{path} holds pickled weights only; Taper never loads pickle"
            raise ModelError(pickled, "convert the model to safetensors")
        raise ModelError(f"{path} has no *.safetensors file", "give a complete Hugging Face model folder")
    tensors: dict[str, Tensor] = {}
    for name in names:
        shard, _ = read_safetensors(path / name)
        if repeated := sorted(tensors.keys() & shard.keys()):
            raise ModelError(f"tensor {repeated[0]} is in {name} and in another file too", "keep one model in a folder")
        tensors |= shard
    return tensors


def _plus(tensor: Tensor, offset: float) -> Tensor:
    """A tensor with a number added to its weights, as f32."""
    return Tensor("F32", tensor.shape, (as_f32(tensor) + np.float32(offset)).view(np.uint8))
