"""Shapes of well-known models, and random weights for them: for measuring speed, which does not depend on values."""

from __future__ import annotations

import numpy as np

from ..errors import ModelError
from .config import LayerSpec, ModelConfig, Rope, expected_shapes
from .tensors import WEIGHT_TYPES, Tensor, row_bytes

SPREAD = 0.02  # standard deviation of random matrices, as models are initialised
_ALIGNMENT = 64
_POOL_BLOCKS = (1 << 21) + 11  # that many random blocks are repeated; drawing each anew would take minutes


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, positions: int, theta: float
) -> ModelConfig:
    head_dim = hidden // heads
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(Rope(theta, head_dim), head_dim**-0.5),) * layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        quantization="random",
    )


SHAPES = {
    "llama-2-7b": _shape(32, 4096, 11008, 32, 32, 32000, 4096, 1e4),
    "llama-2-13b": _shape(40, 5120, 13824, 40, 40, 32000, 4096, 1e4),
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128256, 8192, 5e5),
    "34b": _shape(48, 8192, 22016, 64, 8, 32000, 16384, 1e6),  # Code Llama's
}
TINY = _shape(6, 64, 128, 4, 2, 300, 4096, 1e4)

# The scale of a block of a quantised type that gives its values that spread.
_SCALES = {"Q4_0": SPREAD / 4.61, "Q8_0": SPREAD / 73.9}
RANDOM_TYPES = ("F32", "F16", "BF16", *_SCALES)


def random_tensors(config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    """Random weights of a shape: matrices of one of ggml's types, norms of ones in f32.

    Raises:
        ModelError: random weights are not made in this type, or rows do not divide into its blocks.
    """
    if dtype not in RANDOM_TYPES:
        raise ModelError(
            f"random weights are not made in {dtype.lower()}", f"choose one of {', '.join(RANDOM_TYPES).lower()}"
        )
    pool = _random_blocks(dtype)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
        else:
            data = _aligned(int(np.prod(shape[:-1])) * row_bytes(dtype, shape[-1]))
            for first in range(0, len(data), len(pool)):
                part = data[first : first + len(pool)]
                part[:] = pool[: len(part)]
            tensors[name] = Tensor(dtype, shape, data)
    return tensors


def _random_blocks(dtype: str) -> np.ndarray:
    """Random blocks of a type, uint8 [bytes]."""
    rng = np.random.default_rng(0)
    if dtype in _SCALES:
        blocks = rng.integers(0, 256, (_POOL_BLOCKS, WEIGHT_TYPES[dtype][2]), np.uint8)
        blocks[:, :2] = np.array([_SCALES[dtype]], np.float16).view(np.uint8)
        return blocks.reshape(-1)
    values = rng.standard_normal(_POOL_BLOCKS, np.float32) * SPREAD
    if dtype == "BF16":  # the upper half of each f32, as little-endian bytes
        return values.view(np.uint8).reshape(-1, 4)[:, 2:].reshape(-1)
    return values.astype(np.float16 if dtype == "F16" else np.float32).view(np.uint8)


def _aligned(size: int) -> np.ndarray:
    """Uninitialised bytes that begin where kernels like them to: uint8 [size]."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]
