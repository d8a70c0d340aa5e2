"""Random weights in the shapes of models, in Q4_K: speed and memory of Taper and llama.cpp, and skipped layers.

    python research/family_speed.py --shape experts-8-of-64 --folder FOLDER --llama "ggml 0.15.3=DIR" \\
        --out research/results/experts.json

Vocabularies are tiny, so these are speeds of layers, not of heads. Making a file takes 10 GB of memory and some
minutes, measuring about five. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, median, write
from formats import ROUNDS, THREADS, TOKENS, compare

from taper import DepthPolicy
from taper.backends import Backend, TokenBatch
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
    "mtp_num_hidden_layers": 1,
}
_QWEN35_4B = _QWEN35_2B | {
    "layers": 32,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
}
_GPT_OSS = {
    "layers": 3,  # in f32 they have 10 GB; the file has them several times
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tied": False,
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
    "qwen-3.5-4b": ("qwen35", _QWEN35_4B),
    "gpt-oss-12-layers": ("gpt-oss", _GPT_OSS),  # of 24, as two programs hold them at a time
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
    tiny, experts = make_tiny(path.parent / "folder", architecture, **sizes), ""
    if architecture == "gpt-oss":  # as published: experts in MXFP4. Rows of 2880 weights are no whole blocks of Q4_K.
        quantise, experts = None, "MXFP4"
    write_gguf(part, tiny, dtype=np.float16 if experts else np.float32, quantise=quantise, experts=experts)
    if experts:
        repeat_layers(part, path, 4)
        part.unlink()
    else:
        part.rename(path)


def repeat_layers(source: Path, target: Path, times: int) -> None:
    """Write a file with the layers of another one so many times."""
    import gguf

    reader = gguf.GGUFReader(source)
    facts = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = facts.pop("general.architecture").contents()
    layers = facts[f"{architecture}.block_count"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in facts.items():
        value = times * layers if name.endswith(".block_count") else field.contents()
        writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        block, number, *rest = tensor.name.split(".", 2)
        for copy in range(times if block == "blk" else 1):
            name = f"blk.{int(number) + copy * layers}.{rest[0]}" if block == "blk" else tensor.name
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def skipping(backend: Backend) -> dict[str, Any]:
    """A step at two thirds of the layers against full depth, in turn; the ideal is by the bytes that each reads."""
    layers = backend.config.num_hidden_layers
    order, depth = middle_first_order(layers), 2 * layers // 3
    step_ms = step_ms_by_depth(backend, order, (layers, depth), STEPS)
    retained = DepthPolicy.static(layers, depth, order).retained_at(depth)
    ideal = step_bytes(backend.weight_bytes, range(layers)) / step_bytes(backend.weight_bytes, retained)
    speedup = step_ms[layers] / step_ms[depth]
    realised = (speedup - 1) / (ideal - 1)
    return {"depth": depth, "speedup": round(speedup, 3), "ideal": round(ideal, 3), "realised": round(realised, 3)}


def mtp(path: Path) -> dict[str, Any]:
    """A prediction of the MTP layer against a step at full depth, in turn."""
    loaded = load_model(path)
    config, layers = loaded.config, loaded.config.num_hidden_layers
    backend = GgmlBackend(config, loaded.tensors, context_length=2 * STEPS, threads=THREADS)
    runs: dict[str, list[float]] = {"step": [], "prediction": []}
    for position in range(STEPS):
        arrays = np.array([7], np.int32), np.array([position], np.int32), np.zeros(1, np.int32)
        started = time.perf_counter()
        output = backend.forward(TokenBatch(*arrays, (1,) * layers, logits_rows=(0,), head_inputs=True))
        middle = time.perf_counter()
        read = {"first_layer": layers, "hidden_states": output.head_inputs, "head_inputs": True}
        backend.forward(TokenBatch(*arrays, (0,) * layers + (1,), logits_rows=(0,), **read))
        runs["step"].append(middle - started)
        runs["prediction"].append(time.perf_counter() - middle)
    step, prediction = (median(seconds) for seconds in runs.values())
    return {"steps": STEPS, "share_of_a_step": round(prediction / step, 3)}


def peak_mib(command: Sequence[object]) -> int:
    """The most resident memory of a program, the mapped file included, in MiB."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"it failed: {command}")
    return usage.ru_maxrss // 1024


def memory(path: Path, name: str, programs: Path) -> dict[str, Any]:
    """Of a prompt of 128 tokens and 32 more, in a context of 512."""
    ours = [sys.executable, "-m", "taper", "generate", "x" * 100, "--model", path, "--mode", "full"]
    ours += ["--context", 512, "--max-tokens", 32, "--threads", THREADS]
    llama = [programs / "llama-bench", "-m", path, "-p", 128, "-n", 32, "-r", 1, "-t", THREADS]
    commands = {"Taper": ours, name: llama}
    return {"peak_mib": {each: peak_mib(command) for each, command in commands.items()}}


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
    path = options.folder / f"{options.shape}.gguf"
    if not path.exists():
        make(path, options.shape)
    about = {"answer_tokens": TOKENS, "rounds": ROUNDS, "file_mib": round(path.stat().st_size / 2**20)}
    tests = {f"{kind} {size}": compare(path, {name: Path(programs)}, kind, size) for kind, size in TESTS}
    loaded = load_model(path)
    backend = GgmlBackend(loaded.config, loaded.tensors, context_length=512, threads=THREADS)
    more = {"two_thirds": skipping(backend), "memory": memory(path, name, Path(programs))}
    more |= {"mtp": mtp(path)} if loaded.config.has_mtp else {}
    write(options.out, {"conditions": conditions(path) | about, **tests, **more})


if __name__ == "__main__":
    main()
