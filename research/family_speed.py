"""Random weights in the shapes of models, in Q4_K: decoding and prompts on Taper and llama.cpp, and skipped layers.

    python research/family_speed.py --shape experts-8-of-64 --folder FOLDER --llama "ggml 0.15.3=DIR" \\
        --out research/results/experts.json

Vocabularies are tiny, so these are speeds of layers, not of heads. Making a file takes 10 GB of memory and some
minutes, measuring about five. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, write
from formats import ROUNDS, THREADS, TOKENS, compare

from taper import DepthPolicy
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.weights import convert
from taper.lab.bench.measure import step_bytes, step_ms_by_depth
from taper.models import load_model
from taper.models.tensors import Tensor
from taper.policy import middle_first_order

sys.path.append(str(Path(__file__).parent.parent / "tests"))

TESTS = (("decode", 0), ("prefill", 128))
STEPS = 100  # of each depth
_GEMMA4_E2B = {
    "layers": 35,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 300,
    "final_logit_softcapping": 30.0,
}
_QWEN35_2B = {
    "layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LFM2_1_2B = {
    "layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
}
# By name: the architecture, and sizes; four heads unless these say otherwise.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts-8-of-64": (
        "qwen3moe",
        {"layers": 16, "hidden_size": 1024, "head_dim": 256, "moe_intermediate_size": 512}
        | {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "gemma-4-e2b": ("gemma4", _GEMMA4_E2B),
    "qwen-3.5-2b": ("qwen35", _QWEN35_2B),
    "lfm2-1.2b": ("lfm2", _LFM2_1_2B),
}


def make(path: Path, shape: str) -> None:
    """Write the file: random weights, embeddings in Q6_K and other matrices in Q4_K."""
    from tiny import make_tiny, write_gguf

    def quantise(name: str, weights: np.ndarray) -> tuple[str, np.ndarray]:
        dtype = "F32" if "gate_inp" in name else "Q6_K" if "token_embd" in name else "Q4_K"
        floats = np.ascontiguousarray(weights, np.float32)
        rows = convert(Tensor("F32", weights.shape, floats.reshape(-1).view(np.uint8)), dtype)
        return dtype, rows.reshape(*weights.shape[:-1], -1)

    part = path.with_suffix(".part")
    architecture, sizes = SHAPES[shape]
    write_gguf(part, make_tiny(path.parent / "folder", architecture, **sizes), quantise=quantise)
    part.rename(path)


def skipping(path: Path) -> dict[str, Any]:
    """A step at two thirds of the layers against full depth, in turn; the ideal is by the bytes that each reads."""
    loaded = load_model(path)
    layers = loaded.config.num_hidden_layers
    backend = GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS)
    order, depth = middle_first_order(layers), 2 * layers // 3
    step_ms = step_ms_by_depth(backend, order, (layers, depth), STEPS)
    retained = DepthPolicy.static(layers, depth, order).retained_at(depth)
    ideal = step_bytes(backend.weight_bytes, range(layers)) / step_bytes(backend.weight_bytes, retained)
    speedup = step_ms[layers] / step_ms[depth]
    realised = (speedup - 1) / (ideal - 1)
    return {"depth": depth, "speedup": round(speedup, 3), "ideal": round(ideal, 3), "realised": round(realised, 3)}


def main() -> None:
    """Make the file unless it is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the file is kept")
    parser.add_argument("--llama", required=True, metavar="NAME=DIR", help="llama.cpp's programs, of the same ggml")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    options = parser.parse_args()
    name, _, programs = options.llama.partition("=")
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.shape}.q4_k.gguf"
    if not path.exists():
        make(path, options.shape)
    about = {"answer_tokens": TOKENS, "rounds": ROUNDS, "file_mib": round(path.stat().st_size / 2**20)}
    tests = {f"{kind} {size}": compare(path, {name: Path(programs)}, kind, size) for kind, size in TESTS}
    write(options.out, {"conditions": conditions(path) | about, **tests, "two_thirds": skipping(path)})


if __name__ == "__main__":
    main()
