"""A model on a device of ggml, and in PyTorch on the same card, beside llama.cpp: all and two thirds of the layers.

    python research/devices.py --model FILE.gguf --device cuda0 --llama DIR --out research/results/devices.json

Decoding from a prompt of one token, prompts, and batches; everything takes turns. `--torch` adds PyTorch on the card,
in bf16. `--tiny` measures a tiny random model, which shows only that the script works. Leave the machine alone
meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from decode import conditions, median, write
from family_speed import skipping
from formats import batched

from taper import DepthPolicy
from taper.backends import open_backend
from taper.backends.ggml.library import ggml
from taper.engine import Engine
from taper.lab.bench.measure import alternate, measure
from taper.lab.bench.peers import LlamaBench
from taper.models import load_model
from taper.policy import middle_first_order

BATCHES, PROMPT = (1, 8, 32), 512


def tokens_per_second(
    path: Path, places: dict[str, tuple[str, str]], llama: Path | None, rounds: int, tokens: int
) -> dict[str, Any]:
    """By batch size and "prompt": tokens per second of each program, at full depth and two thirds of the layers."""
    loaded, seeds = load_model(path), count(1)
    layers = loaded.config.num_hidden_layers
    full = DepthPolicy.full(layers)
    policies = {"full": full, "two thirds": DepthPolicy.static(layers, 2 * layers // 3, middle_first_order(layers))}
    results: dict[str, Any] = {}
    for test in (*BATCHES, "prompt"):
        size = test if isinstance(test, int) else 1
        length = max(PROMPT, tokens) + 16
        backends = {
            name: open_backend(loaded, device=device, context_length=length, num_slots=size, dtype=dtype)
            for name, (device, dtype) in places.items()
        }
        engines = {name: Engine(backend) for name, backend in backends.items()}

        def ours(name: str, policy: DepthPolicy, size: int = size, engines: dict[str, Engine] = engines) -> float:
            return size / measure(engines[name], policy, prompt_tokens=1, max_tokens=tokens, batch=size).tpot_s

        def prompt(name: str, engines: dict[str, Engine] = engines) -> float:
            return PROMPT / measure(engines[name], full, prompt_tokens=PROMPT, seed=next(seeds)).ttft_s

        if test == "prompt":
            runs = {f"{name}, full": partial(prompt, name) for name in places}
        else:
            runs = {f"{name}, {kind}": partial(ours, name, policies[kind]) for name in places for kind in policies}
        if llama is not None:
            theirs = LlamaBench(llama, path, 8, gpu_layers=layers + 1)
            if test == "prompt":
                runs["llama.cpp"] = partial(theirs.measure, prompt_tokens=PROMPT)
            elif test == 1:
                runs["llama.cpp"] = partial(theirs.measure, max_tokens=tokens)
            else:
                runs["llama.cpp"] = partial(batched, theirs, test, tokens)
        speeds = alternate(runs, rounds)
        results[str(test)] = {name: round(median(values), 3) for name, values in speeds.items()}
        if test == 1:
            results["two_thirds"] = {name: skipping(backend) for name, backend in backends.items()}
        for engine in engines.values():
            engine.close()
    return results


def tiny_file(folder: Path) -> Path:
    """A tiny random model."""
    from tiny import make_tiny, write_gguf

    path = folder / "tiny.gguf"
    write_gguf(path, make_tiny(folder, layers=6))
    return path


def main() -> None:
    """Measure, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead")
    parser.add_argument("--device", default="cuda0", help="one that taper --version lists")
    parser.add_argument("--torch", action="store_true", help="PyTorch on the card too")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's programs, built for the card")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    options = parser.parse_args()
    if options.tiny == (options.model is not None):
        parser.error("give one of --model and --tiny")
    places = {options.device: (options.device, "auto")} | ({"PyTorch": ("cuda", "bf16")} if options.torch else {})
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_file(Path(folder)) if options.tiny else options.model
        results = tokens_per_second(path, places, options.llama, options.rounds, options.tokens)
        about = {"device": str(ggml.device(options.device)), "answer_tokens": options.tokens, "rounds": options.rounds}
        write(options.out, {"conditions": conditions(path) | about, **results})


if __name__ == "__main__":
    main()
