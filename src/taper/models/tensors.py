"""A model as backends see it: a config of plain facts and named tensors. Knows no file format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError
from .config import ModelConfig, expected_shapes

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_NUMBER = re.compile(r"\.(\d+)\.")

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
    """A file format's names of tensors: `layer_prefix` + index + "." + a name of `layer`, or a name of `model`.

    Several tensors in one have our names joined by "+". "*" stands for the number of an expert.
    """

    layer_prefix: str
    layer: dict[str, str]  # the file's -> ours
    model: dict[str, str]

    def ours(self, name: str) -> str:
        """Our name of a tensor; the file's own where it is not part of any architecture."""
        if name.startswith(self.layer_prefix):
            index, _, rest = name[len(self.layer_prefix) :].partition(".")
            number = _NUMBER.search(rest)
            rest = rest if number is None else rest.replace(number[0], ".*.", 1)
            if rest in self.layer:
                return f"layers.{index}.{self.layer[rest].replace('*', number[1] if number else '*')}"
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
        reverse = {part: theirs for theirs, ours in (self.layer | self.model).items() for part in ours.split("+")}
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            return f"{self.layer_prefix}{index}.{reverse.get(rest) or reverse[f'{rest}.*']}"
        return reverse[name]


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of one row of `columns` weights.

    Raises:
        ModelError: the row is not a whole number of blocks.
    """
    _, block, size = WEIGHT_TYPES[dtype]
    if columns % block:
        raise ModelError(f"rows of {columns} weights do not divide into {dtype} blocks of {block}")
    return columns // block * size


def split_fused(config: ModelConfig, tensors: dict[str, Tensor], names: TensorNames) -> dict[str, Tensor]:
    """Tensors with their parts in place of those that hold several: rows of them, in the order of the name.

    Raises:
        ModelError: its rows are not those of its parts together.
    """
    shapes, split = expected_shapes(config), dict(tensors)
    for fused, tensor in tensors.items():
        prefix, _, parts = fused.rpartition(".")
        part_names = [f"{prefix}.{part}" for part in parts.split("+")]
        if len(part_names) == 1 or not all(name in shapes for name in part_names):
            continue
        sizes = [shapes[name][-2] for name in part_names]
        shape = (*shapes[part_names[0]][:-2], sum(sizes), config.hidden_size)
        if tensor.shape != shape:
            actual = f"{names.theirs(part_names[0])} has shape {list(tensor.shape)}"
            raise ModelError(f"tensor {actual}; its config asks for {list(shape)}")
        rows = tensor.data.reshape(-1, sum(sizes), row_bytes(tensor.dtype, config.hidden_size))
        first = 0
        del split[fused]
        for name, size in zip(part_names, sizes, strict=True):
            split[name] = Tensor(tensor.dtype, shapes[name], rows[:, first : first + size].reshape(-1))
            first += size
    return split


def stack_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with those of experts that have one each stacked, in their order.

    Raises:
        ModelError: experts of a layer differ in type or shape.
    """
    stacked = dict(tensors)
    for layer, spec in enumerate(config.layers):
        for name in (f"layers.{layer}.{part}_experts" for part in ("gate", "up", "down")):
            names = [f"{name}.{number}" for number in range(spec.experts.num_experts if spec.experts else 0)]
            if not names or not all(each in stacked for each in names):
                continue
            parts = [stacked.pop(each) for each in names]
            dtype, shape = parts[0].dtype, parts[0].shape
            if any((part.dtype, part.shape) != (dtype, shape) for part in parts):
                raise ModelError(f"the experts of layer {layer} differ in type or shape", "the file is damaged")
            stacked[name] = Tensor(dtype, (len(parts), *shape), np.concatenate([part.data for part in parts]))
    return stacked


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
