"""A model as backends see it: a config of plain facts and named tensors. Knows no file format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from .config import ModelConfig, expected_shapes

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Parameters of sampling that models recommend, by the names of `SamplingParams`.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NUMBER = re.compile(r"\.(\d+)\.")
_LAYER = re.compile(r"(?:(?:model\.)?layers|blk)\.(\d{1,6})\.")

# ggml's tensor types that can hold weights: name -> (type id, values per block, bytes per block).
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
class Tensor:
    """Weights: the name of a ggml type, the shape in numpy's order [out, in], and the raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [bytes], usually a read-only view of the mapped file


def as_f32(tensor: Tensor) -> np.ndarray:
    """The weights of a tensor in F32, F16 or BF16: float32 [weights]. A KeyError for any other type."""
    stored = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype]
    values = np.frombuffer(tensor.data.tobytes(), stored)
    # A bf16 number is the upper half of an f32 one.
    return (values.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else values.astype(np.float32)


def decay_rates(name: str, tensor: Tensor) -> Tensor:
    """Minus e to the power of what folders hold (A_log), as GGUF files have it, in F32.

    Raises:
        ModelError: it is quantised.
    """
    try:
        rates = np.array(-np.exp(as_f32(tensor)), np.float32)
    except KeyError:
        raise ModelError(f"tensor {name} is of type {tensor.dtype}", "supported: F32, F16, BF16") from None
    return Tensor("F32", tensor.shape, rates.view(np.uint8))


@dataclass(frozen=True)
class LoadedModel:
    """Everything read from a model's files, checked. Tensor names are those of `expected_shapes`.

    `sampling`: what its authors recommend, by the names of `SamplingParams`; empty where they say nothing.
    `license`: as the file says it, else "".
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer
    sampling: Mapping[str, Any]
    license: str = ""


@dataclass(frozen=True)
class TensorNames:
    """How a file format names tensors: `layer_prefix` + index + "." + a key of `layer`, or a key of `model`.

    Our name of a fused tensor is those of its parts, joined by "+". "*" stands for the number of an expert.
    """

    layer_prefix: str
    layer: dict[str, str]  # the file's -> ours
    model: dict[str, str]

    def ours(self, name: str) -> str:
        """Our name of a tensor, or the file's own name if the architecture has no such tensor."""
        if name.startswith(self.layer_prefix):
            index, _, rest = name[len(self.layer_prefix) :].partition(".")
            number = _NUMBER.search(rest)
            rest = rest if number is None else rest.replace(number[0], ".*.", 1)
            if rest in self.layer:
                return f"layers.{index}.{self.layer[rest].replace('*', number[1] if number else '*')}"
        return self.model.get(name, name)

    def rename(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by our names; a ModelError if two of them get the same name."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if self.ours(name) in renamed:
                raise ModelError(f"tensor {name} has the name that Taper gives to another one", "rename or remove it")
            renamed[self.ours(name)] = tensor
        return renamed

    def theirs(self, name: str) -> str:
        """The file's name of one of our tensors."""
        reverse = {part: theirs for theirs, ours in (self.layer | self.model).items() for part in ours.split("+")}
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            return f"{self.layer_prefix}{index}.{reverse.get(rest) or reverse[f'{rest}.*']}"
        return reverse.get(name, name)


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of one row of `columns` weights; a ModelError if they are not a whole number of blocks."""
    _, block, size = WEIGHT_TYPES[dtype]
    if columns % block:
        raise ModelError(f"rows of {columns} weights do not divide into {dtype} blocks of {block}")
    return columns // block * size


def fit_tensors(config: ModelConfig, tensors: dict[str, Tensor], names: TensorNames) -> dict[str, Tensor]:
    """The tensors of a config, by our names: fused ones split, experts stacked, all shapes checked.

    Dimensions of one, which convolutions and gates have in folders, are dropped; vectors may be given as matrices.

    Args:
        config: facts of the model.
        tensors: tensors of a file by our names.
        names: the file's own names, for messages.

    Raises:
        ModelError: one is missing, has another shape, or is not part of the architecture.
    """
    shapes = expected_shapes(config)
    tensors = _stack_experts(config, _split_fused(shapes, tensors, names))
    if config.tie_word_embeddings:
        tensors.pop("lm_head", None)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"tensor {names.theirs(name)} is missing", "the file is incomplete; download it again")
        dtype, given, data = tensors[name].dtype, tensors[name].shape, tensors[name].data
        if given != shape:
            if shape not in (tuple(size for size in given if size != 1), (math.prod(given),)):
                raise _wrong_shape(names.theirs(name), given, shape)
            tensors[name] = Tensor(dtype, shape, data)
    if unknown := sorted(set(tensors) - set(shapes)):
        message = f"tensor {unknown[0]} is not part of a {config.architecture} model"
        raise ModelError(message, "this variant is not supported")
    return tensors


def _split_fused(
    shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], names: TensorNames
) -> dict[str, Tensor]:
    """Split each fused tensor into its parts: consecutive rows, in the order of its name."""
    split = {}
    for fused, tensor in tensors.items():
        prefix, _, parts = fused.rpartition(".")
        part_names = [f"{prefix}.{part}" for part in parts.split("+")]
        if len(part_names) == 1 or not all(name in shapes for name in part_names):
            split[fused] = tensor
            continue
        *outer, _, columns = shapes[part_names[0]]
        ends = np.cumsum([shapes[name][-2] for name in part_names])
        depth, shape = len(outer), (*outer, int(ends[-1]), columns)
        rows = math.prod(tensor.shape[depth:-1])  # those of stacked parts too
        if (*tensor.shape[:depth], rows, tensor.shape[-1]) != shape:
            raise _wrong_shape(names.theirs(part_names[0]), tensor.shape, shape)
        data = tensor.data.reshape(-1, ends[-1], row_bytes(tensor.dtype, columns))
        for name, part in zip(part_names, np.split(data, ends[:-1], axis=1), strict=True):
            split[name] = Tensor(tensor.dtype, shapes[name], part.reshape(-1))
    return split


def drop_layers(tensors: dict[str, Tensor], count: int) -> None:
    """Remove the layers after the first `count`, by our names and the files' own."""
    for name in [name for name in tensors if (found := _LAYER.match(name)) and int(found[1]) >= count]:
        del tensors[name]


def _stack_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the tensors of a layer's experts, in their order, where each expert has its own."""
    stacked = dict(tensors)
    for layer, spec in enumerate(config.layers):
        for name in (f"layers.{layer}.{part}_experts" for part in ("gate", "up", "down")):
            names = [f"{name}.{number}" for number in range(spec.experts.num_experts if spec.experts else 0)]
            if not names or not all(expert in stacked for expert in names):
                continue
            parts = [stacked.pop(expert) for expert in names]
            dtype, shape = parts[0].dtype, parts[0].shape
            if any((part.dtype, part.shape) != (dtype, shape) for part in parts):
                raise ModelError(f"the experts of layer {layer} differ in type or shape", "the file is damaged")
            stacked[name] = Tensor(dtype, (len(parts), *shape), np.concatenate([part.data for part in parts]))
    return stacked


def _wrong_shape(name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> ModelError:
    return ModelError(f"tensor {name} has shape {list(actual)}; its config asks for {list(expected)}")
