"""The layers of a model on one token, in five kernels each: a decode step takes little longer than reading the weights.

In eight kernels, a layer runs on up to `MAX_ROWS` rows, a token each, which may differ in depth, such as a batch's or
those that exact mode verifies. The slow twin is `TorchBackend` in PyTorch's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.config import ModelConfig, Rope
from . import packed_kernels, triton_kernels
from .packed import PackedMatrix

_CELLS = 64  # of the key-value cache that a program of attention reads at a time
_MAX_SPLITS = 32  # programs that share the cells of a head
MAX_ROWS = 64  # tokens of a forward; a step of them still takes little longer than reading the weights
_ROWS_PROGRAMS = 2048  # of attention of all rows, at most, where cells are split
_FEW_BLOCKS = 256  # of a matrix: with fewer, programs share its columns
_BLOCK_BYTES = 16384  # of keys that a program of attention for rows reads at a time
_LEAST = 16  # rows and columns of matrices that the GPU multiplies
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


class Tile(NamedTuple):
    """How a product is cut: the rows of a matrix that one program takes, the columns at a time, and its warps."""

    rows: int
    columns: int
    warps: int


# Chosen by the time of a whole step: research/gpu_step.py --tiles.
QKV_TILE, GATE_UP_TILE, TILE = Tile(8, 512, 2), Tile(1, 4096, 8), Tile(4, 512, 4)
# Of packed matrices, of which a thread takes 16 bytes of each row at a time: not measured yet.
PACKED_QKV_TILE, PACKED_GATE_UP_TILE, PACKED_TILE = Tile(4, 4096, 4), Tile(2, 4096, 4), Tile(4, 4096, 4)
_DEQUANTISED = Tile(4, 1024, 4)


class _GivenMatrix(NamedTuple):
    """A `PackedMatrix` as kernels take it; without factors, its scales stand in their place."""

    words: Tensor
    scales: Tensor
    factors: Tensor
    bits: tl.constexpr
    has_factors: tl.constexpr


Matrix: TypeAlias = Tensor | PackedMatrix


class RowsTile(NamedTuple):
    """The same for rows of several tokens, and how many such tiles are on their way at a time."""

    rows: int
    columns: int  # of two bytes each
    warps: int
    stages: int


AnyTile = TypeVar("AnyTile", Tile, RowsTile)
ROWS_TILE, ROWS_GATE_UP_TILE = RowsTile(64, 64, 4, 4), RowsTile(64, 64, 4, 3)
PACKED_ROWS_TILE = RowsTile(64, 128, 4, 3)  # not measured yet either


class FusedLayers:
    """The layers of a model on one token at a time, in place, with the weights and the cache of a `TorchBackend`.

    Nothing here waits for the device or depends on where the token stands, so a CUDA graph may capture all of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        packed: Mapping[str, PackedMatrix],
        cache: Tensor,
        rotations: dict[Rope, Tensor],
    ) -> None:
        self._config, self._cache, self._rotations = config, cache, rotations
        self._weights: dict[str, Any] = {**weights, **packed}
        device, heads, dim = cache.device, config.num_attention_heads, config.head_dim
        kv_size = config.num_key_value_heads * dim
        self._projected = torch.empty(heads * dim + 2 * kv_size, device=device)
        self._attended = torch.empty(heads * dim, dtype=cache.dtype, device=device)
        self._inner = torch.empty(config.intermediate_size, dtype=cache.dtype, device=device)
        self._shares = tuple(torch.empty(heads * _MAX_SPLITS * size, device=device) for size in (dim, 1, 1))
        self._counts = torch.zeros(heads, dtype=torch.int32, device=device)
        self.max_rows = rows = MAX_ROWS
        self._rows_normed = torch.empty(rows, config.hidden_size, dtype=cache.dtype, device=device)
        self._rows_projected = torch.empty(rows, heads * dim + 2 * kv_size, device=device)
        self._rows_attended = torch.empty(rows, heads * dim, dtype=cache.dtype, device=device)
        self._rows_inner = torch.empty(rows, config.intermediate_size, dtype=cache.dtype, device=device)
        group, kv_heads = heads // config.num_key_value_heads, config.num_key_value_heads
        most = group * max(rows * kv_heads, min(_ROWS_PROGRAMS, rows * kv_heads * _MAX_SPLITS))
        self._rows_shares = tuple(torch.empty(most * size, device=device) for size in (dim, 1, 1))
        tile_rows = max(ROWS_TILE.rows, PACKED_ROWS_TILE.rows)
        self._rows_sums = torch.empty(_FEW_BLOCKS * tile_rows * max(_LEAST, rows), device=device)
        self._rows_counts = torch.zeros(max(rows * kv_heads, _FEW_BLOCKS), dtype=torch.int32, device=device)
        self._rows_logits = torch.empty(rows, config.vocab_size, device=device)
        self._overlaps: dict[str, Any] = {"OVERLAPS": False}
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
            self._overlaps = {"OVERLAPS": True, "launch_pdl": True}

    @staticmethod
    def fit(config: ModelConfig) -> bool:
        """Whether the kernels compute what every layer of a model does."""
        plain = all(
            spec.pre_norm
            and not (spec.post_norm or spec.o_bias or spec.has_sinks or spec.score_cap or spec.experts)
            and not (spec.v_norm or spec.keys_are_values or spec.cells_of is not None or spec.output_scale != 1.0)
            and not (spec.latent or spec.mixer or spec.output_gate or spec.laurel_rank or spec.sparsity)
            and not (spec.head_dim or spec.num_key_value_heads or spec.intermediate_size)
            and spec.qk_norm in ("", "head")
            for spec in config.layers
        )
        plain = plain and config.logit_cap is None and not config.layer_input_size and config.num_streams == 1
        fits = config.head_dim & (config.head_dim - 1) == 0 and config.head_dim >= _LEAST
        fits = fits and config.hidden_size % _LEAST == config.intermediate_size % _LEAST == 0
        return plain and fits and config.activation in _ACTIVATIONS

    def check(self) -> None:
        """Compile and run each kernel once; `max_rows` falls where kernels for rows need more than this GPU has.

        Raises:
            Exception: of Triton's, those for one token do not run here.
        """
        x = torch.zeros(self.max_rows, self._config.hidden_size, dtype=self._cache.dtype, device=self._cache.device)
        none = torch.zeros(self.max_rows, dtype=torch.int64, device=self._cache.device)
        self.run_layer(x[:1], 0, none[:1], none[:1], _CELLS)
        self.logits(x[:1])
        while self.max_rows > 1:
            rows = x[: self.max_rows]
            try:
                for layer in range(len(self._config.layers)):
                    self.run_rows(rows, layer, none, none, none[:1], none - 1, x, _CELLS)
                self.logits_of_rows(rows, none[:1])
                return
            except Exception:  # mostly too little shared memory
                self.max_rows //= 2

    def run_layer(self, x: Tensor, layer: int, positions: Tensor, slots: Tensor, kv_length: int) -> None:
        """Run a layer on the hidden states x [1, hidden_size], in place, and write its keys and values.

        `positions` and `slots` are int64 [1]; attention reads the first `kv_length` cells or fewer.
        """
        config, spec, name = self._config, self._config.layers[layer], f"layers.{layer}."
        inner = config.intermediate_size
        self._project(x, layer)
        per_split = max(_CELLS, triton.next_power_of_2(triton.cdiv(kv_length, _MAX_SPLITS)))
        splits = triton.next_power_of_2(triton.cdiv(kv_length, per_split))
        heads = {"HEADS": config.num_attention_heads, "KV_HEADS": config.num_key_value_heads}
        cells = {"CELLS": _CELLS, "PER_SPLIT": per_split, "SPLITS": splits}
        q_norm, k_norm = self._weights.get(name + "q_norm"), self._weights.get(name + "k_norm")
        rotation, options = self._head_options(spec.rope)
        triton_kernels.attend[config.num_attention_heads, splits](
            self._projected, q_norm, k_norm, rotation, *self._cache[layer], positions, slots, self._attended,
            *self._shares, self._counts, spec.attention_scale, spec.window or self._cache.shape[-2] + 1,
            config.rms_norm_eps, **heads, **cells, **options,
        )  # fmt: skip
        o_proj, down = self._weights[name + "o_proj"], self._weights[name + "down_proj"]
        gate, up = self._weights[name + "gate_proj"], self._weights[name + "up_proj"]
        self._linear(self._attended, None, o_proj, x, x, config.residual_scale)
        norm, tile = self._weights[name + "pre_mlp_norm"], _tile(GATE_UP_TILE, PACKED_GATE_UP_TILE, gate, up)
        triton_kernels.gate_up[(triton.cdiv(inner, tile.rows),)](
            x, norm, _given(gate), _given(up), self._inner, inner, config.rms_norm_eps,
            SILU=config.activation == "silu", **self._cut(tile, config.hidden_size),
        )  # fmt: skip
        self._linear(self._inner, None, down, x, x, config.residual_scale)

    def logits(self, x: Tensor) -> Tensor:
        """Logits f32 [1, vocab_size] of the hidden states x [1, hidden_size] after the last layer."""
        head = self._weights.get("lm_head", self._weights["embed_tokens"])
        out = torch.empty(1, head.shape[0], device=x.device)
        self._linear(x, self._weights["norm"], head, None, out, self._config.logit_scale)
        return out

    def dequantised(self, matrix: PackedMatrix, chosen: Tensor | None = None) -> Tensor:
        """A packed matrix, or its chosen rows, int64 [n], in the dtype of the cache."""
        (rows, size), tile = matrix.shape, _DEQUANTISED
        count, columns = rows if chosen is None else len(chosen), min(tile.columns, triton.next_power_of_2(size))
        out = torch.empty(count, size, dtype=self._cache.dtype, device=self._cache.device)
        packed_kernels.dequantise[triton.cdiv(count, tile.rows), triton.cdiv(size, columns)](
            _given(matrix), chosen, out, rows, count, SIZE=size, ROWS=tile.rows, COLUMNS=columns, num_warps=tile.warps
        )
        return out

    def run_rows(
        self, x: Tensor, layer: int, positions: Tensor, slots: Tensor, active: Tensor, places: Tensor, passed: Tensor,
        kv_length: int,
    ) -> None:  # fmt: skip
        """Run a layer on the first hidden states x [N, hidden_size], in place, and write their keys and values.

        `active`, int64 [1], says how many these are. The others are left at `places` of `passed`, as in `leave`.
        """
        config, spec, name = self._config, self._config.layers[layer], f"layers.{layer}."
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q_size, kv_size, count = heads * dim, kv_heads * dim, len(x)
        self._norm_rows(x, self._weights[name + "pre_attention_norm"], active, passed, places)
        matrices = [self._weights[f"{name}{part}_proj"] for part in "qkv"]
        biases = (self._weights.get(f"{name}{part}_bias") for part in "qkv")
        tile = _tile(ROWS_TILE, PACKED_ROWS_TILE, *matrices)
        blocks = triton.cdiv(q_size, tile.rows) + 2 * triton.cdiv(kv_size, tile.rows)
        splits, options = self._split_rows(tile, blocks, count, config.hidden_size)
        triton_kernels.rows_queries_keys_values[blocks, splits](
            self._rows_normed, *map(_given, matrices), *biases, self._rows_projected, active, self._rows_sums,
            self._rows_counts, Q_SIZE=q_size, KV_SIZE=kv_size, **options,
        )  # fmt: skip
        cells = max(_LEAST, min(_CELLS, _BLOCK_BYTES // (dim * self._cache.element_size())))
        most = min(_MAX_SPLITS, max(1, triton.next_power_of_2(_ROWS_PROGRAMS // (count * kv_heads) + 1) // 2))
        per_split = max(_CELLS, triton.next_power_of_2(triton.cdiv(kv_length, most)))
        splits = triton.next_power_of_2(triton.cdiv(kv_length, per_split))
        group = heads // kv_heads
        sizes = {"KV_HEADS": kv_heads, "GROUP": group, "HEADS": max(_LEAST, triton.next_power_of_2(group))}
        sizes |= {"CELLS": cells, "PER_SPLIT": per_split, "SPLITS": splits}
        rotation, options = self._head_options(spec.rope)
        triton_kernels.rows_keys_values[count, kv_heads](
            self._rows_projected, self._weights.get(name + "k_norm"), rotation, *self._cache[layer], positions, slots,
            active, config.rms_norm_eps, Q_SIZE=q_size, KV_HEADS=kv_heads, **options,
        )  # fmt: skip
        triton_kernels.rows_attend[count, kv_heads, splits](
            self._rows_projected, self._weights.get(name + "q_norm"), rotation, *self._cache[layer], positions, slots,
            active, self._rows_attended, *self._rows_shares, self._rows_counts, spec.attention_scale,
            spec.window or self._cache.shape[-2] + 1, config.rms_norm_eps, **sizes, **options,
        )  # fmt: skip
        self._linear_rows(self._rows_attended, self._weights[name + "o_proj"], x, x, active, config.residual_scale)
        self._norm_rows(x, self._weights[name + "pre_mlp_norm"], active)
        inner, gate, up = config.intermediate_size, self._weights[name + "gate_proj"], self._weights[name + "up_proj"]
        tile = _tile(ROWS_GATE_UP_TILE, PACKED_ROWS_TILE, gate, up)
        triton_kernels.rows_gate_up[(triton.cdiv(inner, tile.rows),)](
            self._rows_normed, _given(gate), _given(up), self._rows_inner, active, inner,
            SILU=config.activation == "silu", **self._cut_rows(tile, count, config.hidden_size),
        )  # fmt: skip
        self._linear_rows(self._rows_inner, self._weights[name + "down_proj"], x, x, active, config.residual_scale)

    def leave(self, x: Tensor, active: Tensor, places: Tensor, passed: Tensor) -> None:
        """Leave those hidden states x [N, hidden_size] that are not `active` at `places` [N], but none below 0."""
        self._norm_rows(x, self._weights["norm"], active, passed, places)

    def logits_of_rows(self, x: Tensor, active: Tensor) -> Tensor:
        """Logits f32 [N, vocab_size] of the active ones of hidden states x [N, hidden_size]; overwritten next time."""
        head = self._weights.get("lm_head", self._weights["embed_tokens"])
        self._norm_rows(x, self._weights["norm"], active)
        out = self._rows_logits[: len(x)]
        self._linear_rows(self._rows_normed[: len(x)], head, None, out, active, self._config.logit_scale)
        return out

    def _norm_rows(
        self, x: Tensor, norm: Tensor, active: Tensor, passed: Tensor | None = None, places: Tensor | None = None
    ) -> None:
        size = x.shape[1]
        triton_kernels.rows_norm[(len(x),)](
            x, norm, self._rows_normed, active, passed, places, self._config.rms_norm_eps,
            SIZE=size, COLUMNS=triton.next_power_of_2(size), num_warps=8, **self._overlaps,
        )  # fmt: skip

    def _linear_rows(
        self, x: Tensor, matrix: Matrix, residual: Tensor | None, out: Tensor, active: Tensor, scale: float
    ) -> None:
        (outs, size), tile = matrix.shape, _tile(ROWS_TILE, PACKED_ROWS_TILE, matrix)
        blocks = triton.cdiv(outs, tile.rows)
        splits, options = self._split_rows(tile, blocks, len(out), size)
        triton_kernels.rows_linear[blocks, splits](
            x, _given(matrix), residual, out, active, self._rows_sums, self._rows_counts, outs, scale, **options
        )

    def _split_rows(self, tile: RowsTile, blocks: int, count: int, size: int) -> tuple[int, dict[str, Any]]:
        """How many programs share the columns of each block of a matrix, and the kernel's options for that."""
        options = self._cut_rows(tile, count, size)
        tiles = size // options["COLUMNS"]
        per_split = triton.cdiv(tiles, max(1, _FEW_BLOCKS // blocks))
        splits = triton.cdiv(tiles, per_split)
        return splits, options | {"PER_SPLIT": per_split * options["COLUMNS"], "SPLITS": splits}

    def _cut_rows(self, tile: RowsTile, count: int, size: int) -> dict[str, Any]:
        """The options of kernels that multiply matrices with rows of this size."""
        columns = math.gcd(tile.columns * 2 // self._cache.element_size(), size)
        options = {"SIZE": size, "OUTS": tile.rows, "COLUMNS": columns, "num_warps": tile.warps}
        rows = max(_LEAST, triton.next_power_of_2(count))
        return options | {"ROWS": rows, "num_stages": tile.stages} | self._overlaps

    def _project(self, x: Tensor, layer: int) -> None:
        """Queries, keys and values of a layer before rotation, into `_projected`."""
        config, name = self._config, f"layers.{layer}."
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = heads * config.head_dim, kv_heads * config.head_dim
        matrices = [self._weights[f"{name}{part}_proj"] for part in "qkv"]
        biases = (self._weights.get(f"{name}{part}_bias") for part in "qkv")
        tile = _tile(QKV_TILE, PACKED_QKV_TILE, *matrices)
        programs = triton.cdiv(q_size, tile.rows) + 2 * triton.cdiv(kv_size, tile.rows)
        triton_kernels.queries_keys_values[(programs,)](
            x, self._weights[name + "pre_attention_norm"], *map(_given, matrices), *biases, self._projected,
            config.rms_norm_eps, Q_SIZE=q_size, KV_SIZE=kv_size, **self._cut(tile, config.hidden_size),
        )  # fmt: skip

    def _linear(
        self, x: Tensor, norm: Tensor | None, matrix: Matrix, residual: Tensor | None, out: Tensor, scale: float
    ) -> None:
        (rows, size), tile = matrix.shape, _tile(TILE, PACKED_TILE, matrix)
        eps = self._config.rms_norm_eps
        triton_kernels.linear[(triton.cdiv(rows, tile.rows),)](
            x, norm, _given(matrix), residual, out, rows, eps, scale, **self._cut(tile, size)
        )

    def _cut(self, tile: Tile, size: int) -> dict[str, Any]:
        """The options of kernels that multiply matrices with a vector of this size."""
        columns = min(tile.columns, triton.next_power_of_2(size))
        return {"SIZE": size, "ROWS": tile.rows, "COLUMNS": columns, "num_warps": tile.warps} | self._overlaps

    def _head_options(self, rope: Rope | None) -> tuple[Tensor, dict[str, Any]]:
        """The rotations of a layer's heads, and the options of the kernels that rotate them."""
        options = {"DIM": self._config.head_dim, "CONTEXT": self._cache.shape[-2]} | self._overlaps
        if rope is None:
            return self._projected, options | {"ROTATED": 0, "INTERLEAVED": False}
        return self._rotations[rope], options | {"ROTATED": rope.dim, "INTERLEAVED": rope.interleaved}


def _tile(dense: AnyTile, packed: AnyTile, *matrices: Matrix) -> AnyTile:
    """How products with matrices are cut: as packed ones, if all are."""
    return packed if all(isinstance(matrix, PackedMatrix) for matrix in matrices) else dense


def _given(matrix: Matrix) -> Any:
    """A matrix as kernels take it: what a `PackedMatrix` is made of is known when they are compiled."""
    if not isinstance(matrix, PackedMatrix):
        return matrix
    words, scales, factors, bits = matrix
    given = scales if factors is None else factors  # Triton 3.6 takes no tuples with None
    return _GivenMatrix(words, scales, given, tl.constexpr(bits), tl.constexpr(factors is not None))
