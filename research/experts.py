"""A random mixture of experts, 8 of 64, about 1 GB in Q4_K_M: decoding and prompts on Taper and llama.cpp.

    python research/experts.py --folder FOLDER --llama "ggml 0.15.3=DIR" --out research/results/experts.json

Making the file takes 10 GB of memory and about three minutes, measuring about five. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from decode import conditions, write
from formats import ROUNDS, TOKENS, compare

sys.path.append(str(Path(__file__).parent.parent / "tests"))

LAYERS = 16
TESTS = (("decode", 0), ("prefill", 128))
SIZES = {"hidden_size": 1024, "head_dim": 256, "moe_intermediate_size": 512, "num_experts": 64}


def make(path: Path, programs: Path) -> None:
    """Write the file: Qwen3's architecture, random weights, quantised by llama-quantize."""
    from tiny import make_tiny, write_gguf

    whole, part = path.with_suffix(".f16.gguf"), path.with_suffix(".part")
    model = make_tiny(path.parent / "folder", "qwen3moe", layers=LAYERS, num_experts_per_tok=8, **SIZES)
    write_gguf(whole, model, dtype=np.float16)
    subprocess.run([programs / "llama-quantize", whole, part, "Q4_K_M"], check=True, stdout=subprocess.DEVNULL)
    whole.unlink()
    part.rename(path)


def main() -> None:
    """Make the file unless it is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the file is kept")
    parser.add_argument("--llama", required=True, metavar="NAME=DIR", help="llama.cpp's programs, of the same ggml")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    options = parser.parse_args()
    name, _, programs = options.llama.partition("=")
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "experts-8-of-64.q4_k_m.gguf"
    if not path.exists():
        make(path, Path(programs))
    about = {"answer_tokens": TOKENS, "rounds": ROUNDS, "file_mib": round(path.stat().st_size / 2**20)}
    tests = {f"{kind} {size}": compare(path, {name: Path(programs)}, kind, size) for kind, size in TESTS}
    write(options.out, {"conditions": conditions(path) | about, **tests})


if __name__ == "__main__":
    main()
