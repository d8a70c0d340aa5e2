"""What rank, learning rate, on-policy outputs, prompts and the seed are worth in `taper heal`: one change at a time.

    python research/healing.py --model MODEL --device cpu --minutes 5 --out research/results/healing-MODEL.json

Each variant trains from the beginning and is judged by the same held-out prompts. The results of a device are written
one by one, and a second run trains only what the file lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from task_options import made_with

import taper
from taper.lab.calibration.run import batch_size
from taper.lab.healing import prompts, run, stages, train

POLICY = "fast-plain"
BASE = {
    "rank": run.RANK,
    "rate": train.LEARNING_RATE,
    "on_policy": True,
    "forms": prompts.FORMS_OF_A_TOPIC,
    "seed": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "another seed": {"seed": 1},
    "rank 64": {"rank": 64},
    "rank 256": {"rank": 256},
    "learning rate 1e-3": {"rate": 1e-3},
    "learning rate 4e-3": {"rate": 4e-3},
    "outputs of full depth only": {"on_policy": False},
    "twice the prompts": {"forms": 2 * prompts.FORMS_OF_A_TOPIC},
}


def healed(llm: taper.LLM, policy: taper.DepthPolicy, minutes: float, options: dict[str, Any]) -> taper.Healing:
    """A healing with some of its settings replaced. The seed has no part in which prompts are held out."""
    rounds = stages.ROUNDS if options["on_policy"] else (1.0,)
    encode = run.encode_prompts
    with (
        mock.patch.object(train, "LEARNING_RATE", options["rate"]),
        mock.patch.object(stages, "ROUNDS", rounds),
        mock.patch.object(run, "encode_prompts", lambda llm, texts, seed, most: encode(llm, texts, 0, most)),
        mock.patch.object(prompts, "FORMS_OF_A_TOPIC", options["forms"]),
    ):
        texts = prompts.builtin_prompts()
        return taper.heal(llm, policy, texts, minutes=minutes, rank=options["rank"], seed=options["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU; default %(default)s")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the policies too")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    result = results.setdefault(options.device, {"variants": {}})
    threads = options.threads if options.device == "cpu" else None
    torch.set_num_threads(options.threads)
    llm = taper.LLM(
        options.model, device=options.device, threads=threads, max_batch_size=batch_size(32, options.device)
    )
    policy = llm.resolve_policy(options.policy)
    about = made_with(llm) | {"torch": torch.__version__, "policy": options.policy, "minutes": options.minutes}
    about |= {"base": BASE, "answer_tokens": stages.OUTPUT_TOKENS}
    if options.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    before = result.get("conditions", about)
    if differing := [key for key in ("minutes", "policy", "base", "kernels") if before[key] != about[key]]:
        parser.error(f"{options.out} has results of another {differing[0]}; name another file")
    result["conditions"] = about
    for name in options.variants.split(","):
        if name in result["variants"]:
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", TAPER_CACHE=cache):
            healing = healed(llm, policy, options.minutes, BASE | VARIANTS[name])
        took = time.perf_counter() - began
        result["variants"][name] = healing.plain() | {"took_s": round(took)}
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            taper.save_policy(options.keep / f"{name.replace(' ', '-')}.safetensors", healing.policy)
        last = healing.history[-1]
        print(
            f"{name}: {healing.tokens} tokens, KL {last.kl:.3f}, agreement {last.agreement:.1%}, {took:.0f} s",
            file=sys.stderr,
        )
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
