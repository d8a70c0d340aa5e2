"""Shapes of well-known models, to measure with random weights."""

from __future__ import annotations

from ...models.config import LayerSpec, ModelConfig, Rope


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
