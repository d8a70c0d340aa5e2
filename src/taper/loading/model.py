"""A model as backends see it: a config of plain facts and named tensors. Knows no file format."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError
from ..policy import ModelIdentity
from ..schedule import MAX_LAYERS

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Architectures that run here; whatever else a file names is refused.
SUPPORTED = ("llama", "qwen2", "qwen3")

# ggml's tensor types that can hold weights: name -> (type id, values a block, bytes a block).
WEIGHT_TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}


@dataclass(frozen=True)
class ModelConfig:
    """Facts about a decoder-only model, named as in transformers.

    `rope_interleaved`: rotary pairs are neighbours (2i, 2i+1), as in GGUF llama files, not halves (i, i + head_dim/2).
    `rope_scale`: factor on positions (linear scaling). `rope_factors`: divisors of each pair's frequency (Llama 3.1).
    `quantization`: type of most weights, in ggml's names.
    """

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_interleaved: bool
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    quantization: str
    rope_scale: float = 1.0
    rope_factors: tuple[float, ...] | None = None

    @property
    def identity(self) -> ModelIdentity:
        """What a policy remembers of the model it was made on."""
        return ModelIdentity(self.architecture, self.hidden_size, self.vocab_size, self.quantization)


@dataclass(frozen=True)
class Tensor:
    """Weights where they lie: a ggml type name, the shape in numpy's order [out, in], and the raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [bytes], usually a read-only view of the mapped file


@dataclass(frozen=True)
class LoadedModel:
    """Everything read from a model's files, checked. Tensor names are those of `expected_shapes`."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class TensorNames:
    """A file format's names of tensors: `layer_prefix` + index + "." + a name of `layer`, or a name of `model`."""

    layer_prefix: str
    layer: dict[str, str]  # the file's -> ours
    model: dict[str, str]

    def ours(self, name: str) -> str:
        """Our name of a tensor; the file's own where it is not part of any architecture."""
        if name.startswith(self.layer_prefix):
            index, _, rest = name[len(self.layer_prefix) :].partition(".")
            if rest in self.layer:
                return f"layers.{index}.{self.layer[rest]}"
        return self.model.get(name, name)

    def rename(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by our names.

        Raises:
            ModelError: two have the same one.
        """
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if self.ours(name) in renamed:
                raise ModelError(f"tensor {name} has the name that Taper gives to another one", "rename or remove it")
            renamed[self.ours(name)] = tensor
        return renamed

    def theirs(self, name: str) -> str:
        """The file's name of one of our tensors."""
        reverse = {ours: theirs for theirs, ours in (self.layer | self.model).items()}
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            return f"{self.layer_prefix}{index}.{reverse[rest]}"
        return reverse[name]


def check_architecture(name: str, supported: tuple[str, ...] = SUPPORTED) -> None:
    """Refuse by name an architecture that does not run here.

    Raises:
        ModelError: it is not among those supported.
    """
    if name not in supported:
        raise ModelError(f"architecture {name!r} is not supported", f"supported: {', '.join(supported)}")


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of one row of `columns` weights.

    Raises:
        ModelError: the row is not a whole number of blocks.
    """
    _, block, size = WEIGHT_TYPES[dtype]
    if columns % block:
        raise ModelError(f"rows of {columns} weights do not divide into {dtype} blocks of {block}")
    return columns // block * size


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a model of this config has, with their shapes [out, in]."""
    c = config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (c.hidden_size,),
        "q_proj": (q_size, c.hidden_size),
        "k_proj": (kv_size, c.hidden_size),
        "v_proj": (kv_size, c.hidden_size),
        "o_proj": (c.hidden_size, q_size),
        "post_attention_layernorm": (c.hidden_size,),
        "gate_proj": (c.intermediate_size, c.hidden_size),
        "up_proj": (c.intermediate_size, c.hidden_size),
        "down_proj": (c.hidden_size, c.intermediate_size),
    }
    if c.qkv_bias:
        layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.vocab_size, c.hidden_size)
    for index in range(c.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_config(config: ModelConfig) -> None:
    """Refuse numbers that no real model has, before anything is sized by them.

    Raises:
        ModelError: a number is out of range or two contradict each other.
    """
    bounds = {"num_hidden_layers": MAX_LAYERS, "head_dim": 1024, "num_attention_heads": 1 << 16}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.type == "int" and not 1 <= value <= bounds.get(item.name, 1 << 30):
            raise ModelError(f"{item.name} is {value}; no model has that", "the file is damaged or not a model")
        if item.type == "float" and not (math.isfinite(value) and 0 < value < 1e12):
            raise ModelError(f"{item.name} is {value}; it must be a positive number")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_attention_heads} heads to {config.num_key_value_heads} key-value heads"
        raise ModelError(f"{heads}: the first must be a multiple of the second")
    if config.head_dim % 2:
        raise ModelError(f"head_dim is {config.head_dim}; rotary embeddings need an even one")
    factors = config.rope_factors
    if factors is not None and not (
        len(factors) == config.head_dim // 2 and all(math.isfinite(f) and f > 0 for f in factors)
    ):
        raise ModelError(f"rope factors must be {config.head_dim // 2} positive numbers")


def check_tensors(config: ModelConfig, tensors: dict[str, Tensor], names: TensorNames) -> None:
    """Check that exactly the tensors of this config are there, with their shapes.

    Args:
        config: facts of the model.
        tensors: tensors by our names.
        names: the file's own names, for messages.

    Raises:
        ModelError: one is missing, of another shape, or not part of the architecture.
    """
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"tensor {names.theirs(name)} is missing", "the file is incomplete; download it again")
        if tensors[name].shape != shape:
            actual = list(tensors[name].shape)
            raise ModelError(f"tensor {names.theirs(name)} has shape {actual}; its config asks for {list(shape)}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise ModelError(
            f"tensor {unknown[0]} is not part of a {config.architecture} model", "this variant is not supported"
        )
