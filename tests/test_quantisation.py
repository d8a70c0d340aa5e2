"""Every type of weights that ggml knows: sizes, values, and a forward that agrees with the same weights in f32."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tiny import one_slot

from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.library import ggml
from taper.backends.ggml.weights import convert
from taper.backends.torch import TorchBackend
from taper.errors import ModelError
from taper.models.config import LayerSpec, ModelConfig, Rope, expected_shapes
from taper.models.tensors import WEIGHT_TYPES, Tensor, row_bytes

CONFIG = ModelConfig(
    architecture="llama",
    layers=(LayerSpec(Rope(10000.0, 64, interleaved=True), 64**-0.5),) * 2,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=256,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    quantization="F32",
)
TOKENS = np.random.default_rng(7).integers(0, 256, 9)
ONE_LAYER = replace(CONFIG, layers=CONFIG.layers[:1], intermediate_size=256)
# To quantise to these, ggml prepares tables for seconds.
TABLES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")


def quantised(dtype: str, floats: np.ndarray) -> Tensor:
    """Weights [out, in], f32, as ggml quantises them; of the types with large tables any others."""
    rows, columns = floats.shape
    if dtype in TABLES:
        return Tensor(dtype, floats.shape, random_blocks(dtype, rows * columns, floats[0].view(np.uint32)))
    data = np.zeros(rows * row_bytes(dtype, columns), np.uint8)
    pointer = np.ascontiguousarray(floats, np.float32).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.quantize_chunk(WEIGHT_TYPES[dtype][0], pointer, data.ctypes.data, 0, rows, columns, None)
    return Tensor(dtype, floats.shape, data)


def random_model(config: ModelConfig, dtype: str, seed: int = 0, embedding: float = 0.06) -> dict[str, Tensor]:
    """Random matrices of a type, and norms of ones; `embedding` is how wide the values of the embeddings spread."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
        else:
            floats = rng.normal(0, embedding if name == "embed_tokens" else 0.06, shape)
            tensors[name] = quantised(dtype, floats.astype(np.float32))
    return tensors


def logits(backend, tokens) -> np.ndarray:
    """Of all tokens: float32 [tokens, vocab_size]."""
    return backend.forward(one_slot(backend, tokens, tuple(range(len(tokens))))).logits


def random_blocks(dtype: str, count: int, seed: np.ndarray) -> np.ndarray:
    """So many random weights: any bytes are some, once the f16 scale of each block is no odd number."""
    _, block, size = WEIGHT_TYPES[dtype]
    data = np.random.default_rng(seed).integers(0, 256, (count // block, size), np.uint8)
    scale = np.full(1, 0.002, "<f2")
    if dtype == "IQ1_M":  # has four bits of the scale in each of its last four numbers
        last = data[:, -8:].view("<u2")
        last[:] = last & 0x0FFF | (scale.view("<u2") >> np.array([0, 4, 8, 12], "<u2") & 15) << 12
    else:
        data[:, :2] = scale.view(np.uint8)
    return data.reshape(-1)


def test_sizes_are_those_of_ggml():
    for type_id, block, size in WEIGHT_TYPES.values():
        assert (ggml.blck_size(type_id), ggml.type_size(type_id)) == (block, size)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_forward_agrees_with_the_same_weights_in_f32(dtype):
    tensors, config = random_model(ONE_LAYER, dtype), replace(ONE_LAYER, quantization=dtype)
    backends = (
        GgmlBackend(config, tensors, context_length=64, dtype=target, kv_dtype="f32", threads=1)
        for target in (None, "f32")
    )
    assert np.corrcoef(*(logits(backend, TOKENS).ravel() for backend in backends))[0, 1] > 0.99


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL"])
def test_quantised_weights_on_the_torch_backend_equal_ggmls_in_f32(dtype):
    tensors, config = random_model(CONFIG, dtype), replace(CONFIG, quantization=dtype)
    ggml_backend = GgmlBackend(config, tensors, context_length=64, dtype="f32", kv_dtype="f32", threads=1)
    torch_backend = TorchBackend(config, tensors, context_length=64, dtype="f32", device="cpu")
    np.testing.assert_allclose(logits(ggml_backend, TOKENS), logits(torch_backend, TOKENS), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("statuses", [(1, 1), (1, -1), (-1,), (-2,)])  # 1: aborted, -1: failed, -2: no memory
def test_a_computation_that_ggml_does_not_finish_is_an_error(monkeypatch, statuses):
    backend, left = GgmlBackend(CONFIG, random_model(CONFIG, "F32"), context_length=64, threads=1), list(statuses)
    monkeypatch.setattr(ggml, "backend_graph_compute", lambda *_: left.pop(0))
    with pytest.raises(ModelError, match=rf"ggml did not finish this computation \(status {statuses[-1]}\)"):
        logits(backend, TOKENS)
    assert not left


@pytest.mark.parametrize("dtype", sorted(set(WEIGHT_TYPES) - {"Q1_0"}))  # which the gguf package cannot read yet
def test_conversion_to_f32_equals_the_gguf_package(dtype):
    tensor = quantised(dtype, np.random.default_rng(1).normal(0, 1, (5, 512)).astype(np.float32))
    expected = dequantize(tensor.data.reshape(5, -1), GGMLQuantizationType[dtype]).astype(np.float32)
    np.testing.assert_allclose(convert(tensor, "F32").view(np.float32).reshape(5, 512), expected, rtol=1e-5, atol=1e-6)
