"""The shapes of well-known models, and random weights for them on a CPU: speed does not depend on their values."""

from __future__ import annotations

import numpy as np

from ..models.config import LayerSpec, ModelConfig, Rope, expected_shapes
from ..models.tensors import WEIGHT_TYPES, Tensor, row_bytes

SPREAD = 0.02  # standard deviation of random matrices, as models are initialised
_ALIGNMENT = 64  # bytes; tensors at other addresses would be copied
_POOL_BLOCKS = (1 << 21) + 11  # tensors repeat this many random blocks, as drawing all of them would take minutes
# By type, the scale of a block whose values have that spread: the quotients are the spread of random integers.
_SCALES = {"Q4_0": SPREAD / 4.61, "Q8_0": SPREAD / 73.9}
RANDOM_DTYPES = tuple(name.lower() for name in _SCALES)


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


def random_tensors(config: ModelConfig, dtype: str = "q4_0") -> dict[str, Tensor]:
    """Random weights of a shape: matrices in one of `RANDOM_DTYPES`, and norms of ones in f32."""
    kind = dtype.upper()
    blocks = np.random.default_rng(0).integers(0, 256, (_POOL_BLOCKS, WEIGHT_TYPES[kind][2]), np.uint8)
    blocks[:, :2] = np.array([_SCALES[kind]], np.float16).view(np.uint8)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
        else:
            data = _aligned(shape[0] * row_bytes(kind, shape[1]))
            data[:] = np.resize(blocks, data.shape)
            tensors[name] = Tensor(kind, shape, data)
    return tensors


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]
