"""GGUF files: every number is checked in Python before a native library sees the bytes.

The format: magic, version, counts, key-value metadata, tensor headers, then aligned tensor data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .model import (
    WEIGHT_TYPES,
    LoadedModel,
    ModelConfig,
    Tensor,
    TensorNames,
    check_architecture,
    check_config,
    check_tensors,
)
from .tokenizer import tokenizer_from_gguf

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {type_id: name for name, (type_id, _, _) in WEIGHT_TYPES.items()}
_MAX_ITEMS = 1 << 22  # of an array; the largest vocabularies have a tenth of that
_DAMAGED = "the file is damaged or incomplete; download it again"

# Populated at once where the system can: page by page, faults cost more than the first forward.
_MAPPING: dict[str, Any] = (
    {"flags": mmap.MAP_SHARED | mmap.MAP_POPULATE, "prot": mmap.PROT_READ}
    if hasattr(mmap, "MAP_POPULATE")
    else {"access": mmap.ACCESS_READ}
)

_NAMES = TensorNames(
    "blk.",
    {
        "attn_norm.weight": "input_layernorm",
        "attn_q.weight": "q_proj",
        "attn_k.weight": "k_proj",
        "attn_v.weight": "v_proj",
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "attn_q_norm.weight": "q_norm",
        "attn_k_norm.weight": "k_norm",
        "attn_output.weight": "o_proj",
        "ffn_norm.weight": "post_attention_layernorm",
        "ffn_gate.weight": "gate_proj",
        "ffn_up.weight": "up_proj",
        "ffn_down.weight": "down_proj",
    },
    {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm", "output.weight": "lm_head"},
)
# Rotary tables that some converters leave behind; they are computed from the config instead.
_UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd", "attn_rot_embd.weight")


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file: metadata by key, tensors by the file's own names, still on disk."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value of a kind.

        Raises:
            ModelError: it is missing without a default, or of another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path.name} lacks the metadata key {key}", _DAMAGED)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path.name}: metadata {key} is of type {type(value).__name__}, not {kind.__name__}")
        return value


class _Reader:
    """Little-endian reads that never leave the buffer and never allocate by an unchecked count."""

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self.path, self.buffer, self.offset = path, buffer, 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path.name} is not a valid GGUF file: {what} at byte {self.offset}", _DAMAGED)

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self.offset + size > len(self.buffer):
            raise self.damaged("it ends too early")
        (value,) = struct.unpack_from(code, self.buffer, self.offset)
        self.offset += size
        return value

    def count(self, what: str, item_bytes: int) -> int:
        """A 64-bit count of items that take at least `item_bytes` each."""
        count: int = self.scalar("<Q")
        if count > (len(self.buffer) - self.offset) // item_bytes:
            raise self.damaged(f"{count} {what} do not fit into the file")
        return count

    def raw_string(self) -> bytes:
        length = self.count("characters", 1)
        raw = bytes(self.buffer[self.offset : self.offset + length])
        self.offset += length
        return raw

    def string(self) -> str:
        try:
            return self.raw_string().decode()
        except UnicodeDecodeError:
            raise self.damaged("text that is not UTF-8") from None

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array()
        if type_id not in _SCALARS:
            raise self.damaged(f"unknown metadata type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def array(self) -> list[Any]:
        type_id = self.scalar("<I")
        if type_id == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if type_id not in _SCALARS:
            raise self.damaged(f"unsupported array type {type_id}")
        code = _SCALARS[type_id]
        size = struct.calcsize(code)
        count = self.count("values", size)
        if count > _MAX_ITEMS:
            raise self.damaged(f"an array of {count} values")
        values = np.frombuffer(self.buffer, np.dtype(code), count, self.offset)
        self.offset += count * size
        return values.tolist()  # type: ignore[no-any-return]


def read_gguf(path: Path) -> GGUFFile:
    """Map and parse a file.

    Raises:
        ModelError: it cannot be read, or is not valid GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(
                    f"{path} is not a GGUF file", "give a .gguf file, a Hugging Face folder or a model name"
                )
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, **_MAPPING), np.uint8)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    reader = _Reader(path, data.data)
    reader.offset = 4
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise ModelError(f"{path.name} is GGUF version {version}; versions 2 and 3 are read", "convert the model again")
    tensor_count = reader.count("tensors", 24)
    metadata_count = reader.count("metadata entries", 13)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"metadata {key} stands twice")
        metadata[key] = reader.value(reader.scalar("<I"))
    headers = [_read_tensor_header(reader) for _ in range(tensor_count)]

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 32 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.damaged(f"alignment {alignment!r} is not a power of two from 32")
    start = math.ceil(reader.offset / alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape, offset in headers:
        _, block, block_bytes = WEIGHT_TYPES[dtype]
        size = math.prod(shape) // block * block_bytes
        if name in tensors:
            raise reader.damaged(f"tensor {name} stands twice")
        if offset % alignment:
            raise reader.damaged(f"tensor {name} lies at {offset}, not a multiple of {alignment}")
        if start + offset + size > len(data):
            raise reader.damaged(f"tensor {name} ends past the end of the file")
        tensors[name] = Tensor(dtype, shape, data[start + offset : start + offset + size])
    return GGUFFile(path, metadata, tensors)


def _read_tensor_header(reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
    name = reader.string()
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
    return name, dtype, shape, reader.scalar("<Q")


def load_gguf(path: Path) -> LoadedModel:
    """Read a model from a GGUF file; weights stay in the mapped file.

    Raises:
        ModelError: the file is damaged, or the model is not supported.
    """
    file = read_gguf(path)
    architecture = file.get("general.architecture", str)
    check_architecture(architecture)
    tensors = {
        _NAMES.ours(name): tensor for name, tensor in file.tensors.items() if not name.endswith(_UNUSED_SUFFIXES)
    }
    factors = tensors.pop("rope_freqs.weight", None)
    config = _read_config(file, architecture, tensors, factors)
    check_config(config)
    check_tensors(config, tensors, _NAMES)
    return LoadedModel(config, tensors, tokenizer_from_gguf(file.path.name, file.metadata, config.vocab_size))


def _read_config(file: GGUFFile, architecture: str, tensors: dict[str, Tensor], factors: Tensor | None) -> ModelConfig:
    def get(key: str, kind: type, default: Any = None) -> Any:
        return file.get(f"{architecture}.{key}", kind, default)

    for key in ("expert_count", "attention.sliding_window"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise ModelError(f"{file.path.name} has {key}; mixtures of experts and sliding windows are not supported")
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    head_dim = get("attention.key_length", int, hidden // max(heads, 1))
    if (
        get("attention.value_length", int, head_dim) != head_dim
        or get("rope.dimension_count", int, head_dim) != head_dim
    ):
        raise ModelError(f"{file.path.name}: keys, values and rotary embeddings must all have {head_dim} dimensions")
    scaling = get("rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"rope scaling {scaling!r} is not supported", "supported: none, linear, Llama 3.1 factors")
    if factors is not None and factors.dtype != "F32":
        raise ModelError(f"{file.path.name}: rope_freqs.weight must be F32")
    if "embed_tokens" not in tensors:
        raise ModelError("tensor token_embd.weight is missing", _DAMAGED)
    weights = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2)
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=get("block_count", int),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length", int),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=tensors["embed_tokens"].shape[0],
        max_position_embeddings=get("context_length", int),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0),
        rope_interleaved=architecture == "llama",
        rope_scale=1.0 / max(get("rope.scaling.factor", float, 1.0), 1e-6) if scaling == "linear" else 1.0,
        rope_factors=None if factors is None else tuple(factors.data.view(np.float32).tolist()),
        qkv_bias="layers.0.q_bias" in tensors,
        qk_norm="layers.0.q_norm" in tensors,
        tie_word_embeddings="lm_head" not in tensors,
        quantization=weights.most_common(1)[0][0] if weights else "F32",
    )
