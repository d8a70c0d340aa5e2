"""Compiles the kernels for GPUs without a GPU, and says how much shared memory each takes.

    python research/compiled.py --dtype bf16 q4_k_m --sm 90

For a compute capability, every kernel that a layer with the heads of Llama 3 8B launches for one token and for
`--rows` tokens, by Triton as it is installed. What does not compile is named, and the exit status is 1: on a GPU, Taper
would run PyTorch's operations instead.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_step import random_blocks
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from taper.backends.fused import FusedLayers
from taper.backends.packed import packed
from taper.backends.torch import DTYPES, rotation_table
from taper.lab.bench.shapes import SHAPES
from taper.models.config import expected_shapes

QUANTISED = ("q8_0", "q4_0", "q4_k", "q6_k", "q4_k_m")
CONTEXT = 1024
CONFIG = SHAPES["llama-3-8b"]
CONFIG = replace(CONFIG, layers=CONFIG.layers[:1], intermediate_size=CONFIG.hidden_size, vocab_size=1024)


def opened(dtype: str, sm: int) -> FusedLayers:
    """A layer on the CPU, whose kernels are those of a GPU."""
    kind, device = DTYPES["bf16" if dtype in QUANTISED else dtype], torch.device("cpu")
    quantised = random_blocks(CONFIG, dtype.upper()) if dtype in QUANTISED else {}
    bits = {name: packed(weight, device) for name, weight in quantised.items() if len(weight.shape) > 1}
    shapes = expected_shapes(CONFIG).items()
    dense = {name: torch.empty(shape, dtype=kind) for name, shape in shapes if name not in bits}
    cache = torch.zeros(1, 2, 64, CONFIG.num_key_value_heads, CONTEXT, CONFIG.head_dim, dtype=kind)
    rotations = {spec.rope: rotation_table(spec.rope, CONTEXT, "cpu") for spec in CONFIG.layers if spec.rope}
    layers = FusedLayers(CONFIG, dense, bits, cache, rotations)
    if sm >= 90:
        layers._overlaps = {"OVERLAPS": True, "launch_pdl": True}
    return layers


def compiled(dtype: str, sm: int, rows: int) -> tuple[dict[str, int], dict[str, str]]:
    """The shared memory of each kernel in bytes, at most, and the reason why others did not compile."""
    shared: dict[str, int] = {}
    failed: dict[str, str] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # Triton's errors stand behind each other, the first one last
            while error.__cause__ is not None:
                error = error.__cause__
            failed.setdefault(name, str(error).strip().splitlines()[-1])
        else:
            shared[name] = max(shared.get(name, 0), kernel.metadata.shared)

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1 << 20}),
    )
    driver.set_active(device)
    layers = opened(dtype, sm)
    states, none = (
        torch.zeros(rows, CONFIG.hidden_size, dtype=layers._cache.dtype),
        torch.zeros(rows, dtype=torch.int64),
    )
    with mock.patch.object(JITFunction, "run", compile_only):
        layers.run_layer(states[:1], 0, none[:1], none[:1], CONTEXT)
        layers.logits(states[:1])
        if rows > 1:
            layers.run_rows(states, 0, none, none, none[:1], none - 1, states, CONTEXT)
            layers.logits_of_rows(states, none[:1])
        for matrix in layers._weights.values():
            if not isinstance(matrix, torch.Tensor):
                layers.dequantised(matrix)
                layers.dequantised(matrix, none)
    return shared, failed


def main() -> None:
    """Compile, and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "f16", "f32", *QUANTISED), default=["bf16", "q4_k_m"])
    parser.add_argument("--sm", type=int, default=90, help="the compute capability, 90 for 9.0; default %(default)s")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    has_failed = False
    for dtype in options.dtype:
        shared, failed = compiled(dtype, options.sm, options.rows)
        for name, size in shared.items():
            print(f"{dtype:7}{name:26}{size:7} bytes of shared memory")
        for name, reason in failed.items():
            print(f"{dtype:7}{name:26} FAILED: {reason}")
        has_failed = has_failed or bool(failed)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
