"""Random weights in the shapes of models, in Q4_K: decoding and prompts on Taper and llama.cpp.

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
from formats import ROUNDS, TOKENS, compare

from taper.backends.ggml.weights import convert
from taper.models.tensors import Tensor

sys.path.append(str(Path(__file__).parent.parent / "tests"))

TESTS = (("decode", 0), ("prefill", 128))
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
# By name: the architecture, and sizes; four heads unless these say otherwise.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts-8-of-64": (
        "qwen3moe",
        {"layers": 16, "hidden_size": 1024, "head_dim": 256, "moe_intermediate_size": 512}
        | {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "gemma-4-e2b": ("gemma4", _GEMMA4_E2B),
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
    write(options.out, {"conditions": conditions(path) | about, **tests})


if __name__ == "__main__":
    main()
