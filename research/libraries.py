"""The same model on each ggml library that is installed, in turn: decoding and a prompt, in tokens per second.

    python research/libraries.py --out research/results/libraries.json

Each round runs every library once, in a process of its own, as two libraries of a name exclude each other. Leave the
machine alone meanwhile (about eight minutes for three libraries).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode import conditions, write

MODELS, PROMPT, TOKENS, CONTEXT = ("smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"), 512, 64, 1024
KINDS = ("decode", "prompt")


def one(model: str, threads: int) -> dict[str, Any]:
    """Tokens per second of the library that `$TAPER_GGML` names, after a warm-up."""
    from taper import DepthPolicy
    from taper.backends.ggml import GgmlBackend
    from taper.backends.ggml.library import ggml
    from taper.engine import Engine
    from taper.lab.bench.measure import measure
    from taper.models import find_model, load_model

    loaded = load_model(find_model(model))
    backend = GgmlBackend(loaded.config, loaded.tensors, context_length=CONTEXT, threads=threads)
    engine, full = Engine(backend), DepthPolicy.full(loaded.config.num_hidden_layers)
    measure(engine, full, prompt_tokens=PROMPT, max_tokens=8, seed=1)
    decode = [measure(engine, full, max_tokens=TOKENS).tpot_s for _ in range(2)]
    prompt = [measure(engine, full, prompt_tokens=PROMPT, seed=seed).ttft_s for seed in (2, 3)]
    return {"library": str(ggml), "decode": 1 / min(decode), "prompt": PROMPT / min(prompt)}


def in_each_library(script: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What a script prints, run in turn with each library that is installed, by the library's name."""
    from taper.backends.ggml.library import VARIABLE, _places

    printed: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for place in _places():
            environment = {**os.environ, VARIABLE: str(place.folder)}
            done = subprocess.run(
                [sys.executable, *script], capture_output=True, text=True, check=True, env=environment
            )
            printed.setdefault(str(place), []).append(json.loads(done.stdout))
            print(number, place, flush=True)
    return printed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", metavar="MODEL", help="measure one library, and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.threads)))
        return
    given = conditions(Path(MODELS[0]))
    kept = {key: given[key] for key in ("date", "commit", "cpu", "cores", "python", "statistic")}
    result: dict[str, Any] = {"conditions": kept | {"threads": options.threads, "rounds": options.rounds}, "models": {}}
    for model in MODELS:
        rounds = in_each_library([__file__, "--one", model, "--threads", str(options.threads)], options.rounds)
        first = next(iter(rounds.values()))
        result["models"][model] = {
            place: {"ggml": rows[0]["library"].split(" of ")[0]}
            | {kind: round(statistics.median(row[kind] for row in rows), 1) for kind in KINDS}
            | {
                f"{kind}_over_first": round(
                    statistics.median(row[kind] / other[kind] for row, other in zip(rows, first, strict=True)), 3
                )
                for kind in KINDS
            }
            for place, rows in rounds.items()
        }
        write(options.out, result)


if __name__ == "__main__":
    main()
