"""Models from GGUF files. The first half turns metadata into a config, the second parses the file."""

from __future__ import annotations

import math
import mmap
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .families import ARCHITECTURES, MODEL_TYPES, Family, find_family
from .files import Settings, head_size, open_file, parts_of
from .read_config import read_config
from .tensors import WEIGHT_TYPES, LoadedModel, Tensor, fit_tensors, row_bytes
from .tokenizer_files import tokenizer_from_gguf

# Keys of a header, without the architecture before them -> transformers' names.
_KEYS = {
    "activation_sparsity_scale": "activation_sparsity_scale",
    "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.key_length_mla": "qk_head_dim",
    "attention.key_length_swa": "sliding_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.scale": "attention_multiplier",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.temperature_scale": "llama_4_scaling_beta",
    "attention.value_length_mla": "v_head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_gating_func": "expert_gating_func",
    "expert_group_count": "n_group",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "final_logit_softcapping": "final_logit_softcapping",
    "full_attention_interval": "full_attention_interval",
    "interleave_moe_layer_step": "decoder_sparse_step",
    "leading_dense_block_count": "num_dense_layers",
    "logit_scale": "logits_scaling",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "residual_scale": "residual_multiplier",
    "rope.dimension_count": "rotary_dim",
    "rope.dimension_count_swa": "sliding_rotary_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.finetuned": "rope_finetuned",
    "shortconv.l_cache": "conv_L_cache",
    # Of recurrent layers, which files without any may have too.
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "linear_inner_size",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_ROPE_KEYS = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
# Keys that do not change the computation, or that have their own checks.
_OTHER = {
    "attention.causal",
    "attention.value_length",
    "attention.value_length_swa",
    "expert_group_used_count",  # of more than one, which is an error
    "rope.dimension_sections",  # of positions in pictures; in text, all are the same
    "tensor_data_layout",
    "vocab_size",
}
# Keys of the sampling parameters that the model's authors recommend.
_SAMPLING_KEYS = {f"general.sampling.{name}": name for name in ("top_k", "top_p", "min_p")} | {
    "general.sampling.temp": "temperature",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_ROPE_TABLES = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
# Rotary tables that some converters leave behind; they are computed from the config instead.
_UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd", "attn_rot_embd.weight")

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_TYPE_NAMES = {type_id: name for name, (type_id, _, _) in WEIGHT_TYPES.items()}
# Limits of a header. Those of the largest vocabularies have 15 MB and 900,000 items (tokens, their types, merges).
MAX_BYTES, MAX_ITEMS, MAX_TENSORS = 64 << 20, 1 << 21, 1 << 16
_DAMAGED = "the file is damaged or incomplete; download it again"

# Where the system can, all pages are mapped at once: one by one, their faults would cost more than the first forward.
_MAPPING: dict[str, Any] = {"access": mmap.ACCESS_READ}
if sys.platform == "linux":
    _MAPPING = {"flags": mmap.MAP_SHARED | mmap.MAP_POPULATE, "prot": mmap.PROT_READ}


def load_gguf(path: Path) -> LoadedModel:
    """Read a model from a GGUF file, or from all parts of one that was split; weights stay in the mapped files.

    Raises:
        ModelError: a file is damaged or missing, or the model is not supported.
    """
    header, tensors = _read_parts(path)
    metadata = Settings(header, path.name)
    architecture: str = metadata.get("general.architecture", str)
    # Mixtral's files call it llama.
    mixture = architecture == "llama" and header.get("llama.expert_count")
    family = MODEL_TYPES["mixtral"] if mixture else find_family(architecture, ARCHITECTURES)
    names = family.gguf_names
    tensors = names.rename({name: t for name, t in tensors.items() if not name.endswith(_UNUSED_SUFFIXES)})
    factors = _rope_table(path.name, tensors, "rope_freqs.weight")
    settings = _settings(metadata, architecture, family, tensors)
    config = read_config(family, settings, tensors, bool(family.interleaved), factors)
    tensors = fit_tensors(config, tensors, names)
    sampling = {ours: header[key] for key, ours in _SAMPLING_KEYS.items() if key in header}
    license = metadata.get("general.license", str, "")
    return LoadedModel(config, tensors, tokenizer_from_gguf(metadata, config.vocab_size), sampling, license)


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of the first part, which has all of it, and the tensors of all parts."""
    paths = parts_of(path)
    header, tensors = read_gguf(paths[0])
    count = header.get("split.count", 1)
    if type(count) is not int or count < 2:
        return header, tensors
    if count != len(paths):
        named = f"{path.name} is one of {count} parts, but its name does not say which"
        raise ModelError(named, "parts are named as in NAME-00001-of-00003.gguf")
    for part in paths[1:]:
        if not part.exists():
            raise ModelError(f"part {part.name} is missing", f"put it beside {paths[0].name}")
        _, more = read_gguf(part)
        if repeated := sorted(tensors.keys() & more.keys()):
            raise ModelError(f"tensor {repeated[0]} is in {part.name} and in an earlier part too", _DAMAGED)
        tensors |= more
    expected = header.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"the parts of {path.name} have {len(tensors)} tensors of {expected}", _DAMAGED)
    return header, tensors


def _settings(metadata: Settings, architecture: str, family: Family, tensors: dict[str, Tensor]) -> Settings:
    """The settings of the header by transformers' names. Removes tables of rotary factors from the tensors."""
    prefix, source = f"{architecture}.", metadata.source
    header = {key.removeprefix(prefix): value for key, value in metadata.values.items() if key.startswith(prefix)}
    for key, value in header.items():
        if value and key not in {*_KEYS, *_ROPE_KEYS, *_OTHER}:
            unknown = f"{source} has the metadata key {prefix}{key}, which Taper does not know"
            raise ModelError(unknown, "this variant is not supported")
    values = {ours: header.get(theirs) for theirs, ours in _KEYS.items()}
    count, more = values["num_hidden_layers"], values["num_nextn_predict_layers"]
    if more and type(count) is type(more) is int and "num_nextn_predict_layers" in family.reads:
        values["num_hidden_layers"] = count - more  # those that predict further tokens (MTP) count as layers there
    settings = Settings(values, source, {ours: f"{prefix}{theirs}" for theirs, ours in _KEYS.items()})
    if header.get("attention.causal", True) is not True:
        raise ModelError(f"{source} holds a model without causal attention", "it does not generate text")
    local = header.get("attention.key_length_swa")
    values_dim = values["kv_lora_rank"] or head_size(settings)  # of cells of latents, the first numbers
    for key, head_dim in (("attention.value_length", values_dim), ("attention.value_length_swa", local)):
        if header.get(key, head_dim) != head_dim:
            raise ModelError(f"{source}: keys and values must both have {head_dim} dimensions")
    if "embed_tokens" not in tensors:
        raise ModelError("tensor token_embd.weight is missing", _DAMAGED)
    rope = {ours: header[theirs] for theirs, ours in _ROPE_KEYS.items() if theirs in header}
    if "mscale_all_dim" in rope:
        rope["mscale"] = 1.0
    if rope.get("rope_type") == "none":
        del rope["rope_type"]
    tables = {ours: table for name, ours in _ROPE_TABLES.items() if (table := _rope_table(source, tensors, name))}
    if tables:
        rope |= {"rope_type": "longrope", "attention_factor": rope.get("attention_factor", 1.0), **tables}
    values |= {
        "rope_parameters": rope,
        "tie_word_embeddings": "lm_head" not in tensors,
        "use_sliding_window": bool(values["sliding_window"]),
        "vocab_size": tensors["embed_tokens"].shape[0],
    }
    if family.gguf_settings is not None:
        values |= family.gguf_settings(settings)
    return settings


def _rope_table(source: str, tensors: dict[str, Tensor], name: str) -> list[float] | None:
    """Remove a table of divisors of rotary frequencies from the tensors and return it; None if there is none."""
    table = tensors.pop(name, None)
    if table is None:
        return None
    if table.dtype != "F32":
        raise ModelError(f"{source}: {name} must be F32")
    values: list[float] = table.data.view(np.float32).tolist()
    return values


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Map and parse a file: its metadata by key, and its tensors by the file's own names.

    Raises:
        ModelError: it cannot be read, or is not valid GGUF of version 2 or 3.
    """
    try:
        with open_file(path) as file:
            if file.read(4) != b"GGUF":
                hint = "give a .gguf file, a Hugging Face folder or a model name"
                raise ModelError(f"{path} is not a GGUF file", hint)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            metadata, places, end = _read_header(_Reader(path.name, memoryview(mapped)), len(mapped))
            data = np.frombuffer(mmap.mmap(file.fileno(), end, **_MAPPING), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: the file shrank meanwhile
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return metadata, {name: Tensor(dtype, shape, data[place]) for name, (dtype, shape, place) in places.items()}


def _read_header(
    reader: _Reader, file_bytes: int
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], slice]], int]:
    """The metadata; the type, shape and place in the file of each tensor; and the end of the last one."""
    reader.take(4)
    version = reader.scalar("<I")
    if version not in (2, 3):
        versions = f"{reader.source} is GGUF version {version}; versions 2 and 3 are read"
        raise ModelError(versions, "convert the model again")
    tensor_count = reader.count("tensors", 24)
    if tensor_count > MAX_TENSORS:
        raise reader.damaged(f"{tensor_count} tensors; at most {MAX_TENSORS} are read")
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("metadata entries", 13)):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"metadata {key} appears twice")
        metadata[key] = reader.value(reader.scalar("<I"))
    headers: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in headers:
            raise reader.damaged(f"tensor {name} appears twice")
        headers[name] = _read_tensor_header(reader, name)

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 32 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.damaged(f"alignment {alignment!r} is not a power of two from 32")
    data_start = end = math.ceil(reader.offset / alignment) * alignment
    places = {}
    for name, (dtype, shape, offset) in sorted(headers.items(), key=lambda header: header[1][-1]):
        start = data_start + offset
        if offset % alignment:
            raise reader.damaged(f"tensor {name} lies at {offset}, not a multiple of {alignment}")
        if start < end:
            raise reader.damaged(f"tensor {name} lies at {offset}, inside another one")
        end = start + math.prod(shape[:-1]) * row_bytes(dtype, shape[-1])
        if end > file_bytes:
            raise reader.damaged(f"tensor {name} ends past the end of the file")
        places[name] = dtype, shape, slice(start, end)
    return metadata, places, min(end, file_bytes)


def _read_tensor_header(reader: _Reader, name: str) -> tuple[str, tuple[int, ...], int]:
    """The type, shape and place of a tensor, in bytes behind the header."""
    dimensions = reader.scalar("<I")
    if not 1 <= dimensions <= 4:
        raise reader.damaged(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(reader.scalar("<Q") for _ in range(dimensions))[::-1]
    type_id = reader.scalar("<I")
    if type_id not in _TYPE_NAMES:
        raise reader.damaged(f"tensor {name} is of type {type_id}, which holds no weights")
    dtype = _TYPE_NAMES[type_id]
    if not all(1 <= size <= 1 << 40 for size in shape):
        raise reader.damaged(f"tensor {name} has the shape {list(shape)}")
    if shape[-1] % WEIGHT_TYPES[dtype][1]:
        raise reader.damaged(f"tensor {name} has rows of {shape[-1]}, not whole {dtype} blocks")
    return dtype, shape, reader.scalar("<Q")


class _Reader:
    """Little-endian reads that stay within the buffer and allocate nothing by an unchecked count.

    It reads at most `MAX_BYTES`, and `MAX_ITEMS` metadata entries and values of arrays together.
    """

    def __init__(self, source: str, buffer: memoryview) -> None:
        self.source, self.buffer, self.offset, self.num_items = source, buffer[:MAX_BYTES], 0, 0
        self._room = "the file" if len(buffer) <= MAX_BYTES else f"the {MAX_BYTES} bytes that a header may have"

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.source} is not a valid GGUF file: {reason} at byte {self.offset}", _DAMAGED)

    def check_room(self, count: int, items: str, item_bytes: int) -> None:
        if count > (len(self.buffer) - self.offset) // item_bytes:
            raise self.damaged(f"{count} {items} do not fit into {self._room}")

    def take(self, count: int, items: str = "bytes") -> int:
        """Skip `count` bytes and return the offset where they begin."""
        self.check_room(count, items, 1)
        self.offset += count
        return self.offset - count

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.buffer, self.take(struct.calcsize(code)))
        return value

    def count(self, items: str, item_bytes: int) -> int:
        """Read the 64-bit count of the items that follow, of at least `item_bytes` each."""
        count: int = self.scalar("<Q")
        self.check_room(count, items, item_bytes)
        self.num_items += count
        if self.num_items > MAX_ITEMS:
            raise self.damaged(f"{count} {items} make it more than {MAX_ITEMS} metadata items")
        return count

    def string(self) -> str:
        first = self.take(self.scalar("<Q"), "characters")
        try:
            return str(self.buffer[first : self.offset], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("text that is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """Read strings in one tight loop, because vocabularies have hundreds of thousands of them."""
        buffer, start, unpack = self.buffer, self.offset, _LENGTH.unpack_from
        values: list[str] = []
        with suppress(struct.error, OverflowError, UnicodeDecodeError):
            for _ in range(count):
                first = start + _LENGTH.size
                start = first + unpack(buffer, start)[0]
                values.append(str(buffer[first:start], "utf-8"))
            if start <= len(buffer):
                self.offset = start
                return values
        return [self.string() for _ in range(count)]  # raises an error that names the damage and its place

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id != _ARRAY:
            raise self.damaged(f"unknown metadata type {type_id}")
        type_id = self.scalar("<I")
        if type_id == _STRING:
            return self.strings(self.count("strings", 8))
        if type_id not in _SCALARS:
            raise self.damaged(f"unsupported array type {type_id}")
        dtype = np.dtype(_SCALARS[type_id])
        count = self.count("values", dtype.itemsize)
        return np.frombuffer(self.buffer, dtype, count, self.take(count * dtype.itemsize)).tolist()
