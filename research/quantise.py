"""What quantising while loading costs and gains, on the default model: loss against f32, and speed.

    python research/quantise.py --out research/results/quantise.json quality speed

The model file is dequantised to a bf16 Hugging Face folder in a temporary place, from which each type is loaded.
`quality` replays answers of the same weights in f32 (about ten minutes). `speed` alternates everything (about three):
leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from task_options import compared, made_with

from taper import LLM, DepthPolicy, SamplingParams
from taper.backends import TokenBatch
from taper.backends.ggml.weights import stored_types
from taper.engine import Request
from taper.errors import QUANTISED_DTYPES, TaperWarning
from taper.lab.calibration.prompts import builtin_prompts, encode_prompts
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.run import MAX_PROMPTS
from taper.lab.calibration.statistics import over_steps
from taper.lab.calibration.summary import to_plain
from taper.models import find_model, load_model
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import find_policy
from taper.policy import active_prefixes

THREADS, ROUNDS, ANSWER_TOKENS, PREFILL = 2, 7, 128, 256
FILE, BF16 = "the file", "bf16"  # what runs beside the quantised types: the GGUF file, and the folder as it is
POLICY, COMBINED = "fast-plain", ("the file", "iq4_nl")  # what is also measured with a policy


def write_folder(path: Path, folder: Path) -> None:
    """The model of a GGUF file as a Hugging Face folder in bf16."""
    import torch
    from reference import transformers_from_gguf

    transformers_from_gguf(path).to(torch.bfloat16).save_pretrained(folder)
    load_model(path).tokenizer.fast.save(str(folder / "tokenizer.json"))


def open_all(path: Path, folder: Path) -> tuple[dict[str, LLM], dict[str, float]]:
    """The file, the folder as it is, and quantised to each type; and how many seconds each took to load."""
    models, seconds = {}, {}
    for name in (FILE, BF16, *QUANTISED_DTYPES):
        started = time.perf_counter()
        dtype = name if name in QUANTISED_DTYPES else "auto"
        models[name] = LLM(path if name == FILE else folder, device="cpu", dtype=dtype, context=1024, threads=THREADS)
        seconds[name] = round(time.perf_counter() - started, 2)
    return models, seconds


def ways(models: dict[str, LLM]) -> dict[str, tuple[LLM, DepthPolicy]]:
    """What is compared: every model at full depth, and some with a policy."""
    full = DepthPolicy.full(models[FILE].config.num_hidden_layers)
    tapered = {f"{name}, {POLICY}": (models[name], find_policy(POLICY)) for name in COMBINED}
    return {name: (llm, full) for name, llm in models.items()} | tapered


def quality(path: Path, folder: Path) -> dict[str, Any]:
    """KL, agreement and NLL against f32 of the same weights, at each step of its greedy answers to held-out prompts."""
    models, _ = open_all(path, folder)
    exact = LLM(folder, device="cpu", dtype="f32", context=1024, threads=THREADS, max_batch_size=16)
    full = DepthPolicy.full(exact.config.num_hidden_layers)
    encoded = encode_prompts(models[FILE], builtin_prompts(), 0, MAX_PROMPTS)
    prompts = encoded[len(encoded) // 2 :]  # those that were held out when the policy was calibrated
    params, stops = SamplingParams(max_tokens=ANSWER_TOKENS), models[FILE].tokenizer.eos_token_ids
    answers = exact.engine.complete(Request(prompt, params, full, stops) for prompt in prompts)
    references = [Reference(prompt, tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    parts: dict[str, list[Scores]] = {name: [] for name in ways(models)}
    for index, reference in enumerate(references):
        p = log_probabilities(exact, reference, full)
        for name, (llm, policy) in ways(models).items():
            parts[name].append(compared(index, reference, p, log_probabilities(llm, reference, policy)))
    tensors = load_model(folder).tensors
    matrices = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    types = {dtype: stored_types(tensors, dtype) for dtype in QUANTISED_DTYPES}
    return {
        "answers": len(references),
        "steps": sum(map(len, answers)),
        "matrices": {dtype: Counter(chosen[name].lower() for name in matrices) for dtype, chosen in types.items()},
        "loss": {name: to_plain(over_steps(Scores.joined(part)).all_steps) for name, part in parts.items()},
    }


def log_probabilities(llm: LLM, reference: Reference, policy: DepthPolicy) -> np.ndarray:
    """Of each step of an answer under a policy, by one forward over prompt and answer: float64 [steps, V]."""
    tokens = np.array((*reference.prompt_ids, *reference.completion_ids[:-1]), np.int32)
    prompt, layers = len(reference.prompt_ids), policy.num_hidden_layers
    depths = [layers] * prompt + [policy.depth(step) for step in range(1, len(reference.completion_ids))]
    active = active_prefixes(policy.skip_order, layers, depths)
    logits = forward(llm, tokens, active, range(prompt - 1, len(tokens))).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    normalised: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalised


def speed(path: Path, folder: Path) -> dict[str, Any]:
    """Tokens per second of decoding and prefill, and the ratios to the file: medians of rounds that alternate all."""
    models, seconds = open_all(path, folder)
    prompt = np.random.default_rng(0).integers(0, models[FILE].config.vocab_size, PREFILL, dtype=np.int32)
    decode: dict[str, list[float]] = {name: [] for name in ways(models)}
    prefill: dict[str, list[float]] = {name: [] for name in models}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for _ in range(ROUNDS + 1):  # the first one warms up
        for name, (llm, policy) in ways(models).items():
            decode[name].append(llm.generate("Why is the sky blue?", params, policy=policy).tokens_per_second)
        for name, llm in models.items():
            started = time.perf_counter()
            forward(llm, prompt, (PREFILL,) * llm.config.num_hidden_layers, [PREFILL - 1])
            prefill[name].append(PREFILL / (time.perf_counter() - started))
    return {"load_seconds": seconds, "decode": against_file(decode), "prefill": against_file(prefill)}


def forward(llm: LLM, tokens: np.ndarray, active: tuple[int, ...], rows: range | list[int]) -> np.ndarray:
    """Logits [rows, V] of tokens [N] from position 0 on."""
    positions = np.arange(len(tokens), dtype=np.int32)
    return llm.engine.backend.forward(
        TokenBatch(tokens, positions, np.zeros_like(positions), active, tuple(rows))
    ).logits


def against_file(rounds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians of tokens per second, and of their ratios to the file in the same round; the first is left out."""
    ratios = {name: [a / b for a, b in zip(values, rounds[FILE], strict=True)] for name, values in rounds.items()}
    return {
        name: {
            "tokens_per_second": float(f"{statistics.median(values[1:]):.4g}"),
            "ratio": float(f"{statistics.median(ratios[name][1:]):.4g}"),
        }
        for name, values in rounds.items()
    }


def conditions(path: Path) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    more = {"model": path.name, "answer_tokens": ANSWER_TOKENS, "prefill_tokens": PREFILL, "rounds": ROUNDS, "batch": 1}
    return made_with(LLM(path, device="cpu", threads=THREADS, context=64)) | more


def main() -> None:
    """Run the parts asked for; each is written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("parts", nargs="+", choices=["quality", "speed"])
    options = parser.parse_args()
    warnings.simplefilter("ignore", TaperWarning)  # which matrices do not fit: the result has it
    path = find_model(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(path, Path(temporary))
        for part in options.parts:
            measured = {"conditions": conditions(path), **globals()[part](path, Path(temporary))}
            results = json.loads(options.out.read_text()) if options.out.exists() else {}
            options.out.write_text(json.dumps(results | {part: measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
