"""How often outputs go round in circles: twenty ordinary questions, full depth and each shipped policy.

    python research/repetition.py --model MODEL --out research/results/repetition-MODEL.json

Once with the sampling that the model's authors recommend, which is the default everywhere, and once greedily. An output
loops if more than half of its groups of four tokens occurred in it before. Needs a few minutes, and no idle machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from decode import conditions, write

from taper import LLM, DepthPolicy, SamplingParams
from taper.lab.calibration.statistics import repeated
from taper.models.download import DEFAULT_MODEL

TOKENS, LOOPS = 256, 0.5
QUESTIONS = (
    "What is a black hole?",
    "Why is the sky blue?",
    "How do vaccines work?",
    "What is the difference between weather and climate?",
    "Explain how a car engine works.",
    "How can I fall asleep more easily?",
    "What should I think about before I buy a bicycle?",
    "Give me a recipe for a simple vegetable soup.",
    "How do I make a good first impression at a job interview?",
    "Plan a weekend in a big city for a family with two children.",
    "Who was Marie Curie?",
    "What caused the First World War?",
    "Write a short story about a dragon that is afraid of fire.",
    "Write a poem about autumn.",
    "Write an email that asks a landlord to repair the heating.",
    "Write a Python function that checks whether a word is a palindrome.",
    "What is the difference between a list and a tuple in Python?",
    "How does a relational database store data?",
    "List ten ideas for a birthday party.",
    "Summarise how a bill becomes a law.",
)


def cell(llm: LLM, policy: DepthPolicy, params: Sequence[SamplingParams]) -> dict[str, Any]:
    """How many outputs loop, and the part of four-grams that are repeated, on average."""
    outputs = llm.generate(list(QUESTIONS), params, policy=policy)
    shares = [repeated(output.token_ids) for output in outputs]
    return {
        "loops": sum(share > LOOPS for share in shares),
        "outputs": len(shares),
        "repeated": round(fmean(shares), 4),
        "tokens": sum(output.completion_tokens for output in outputs),
        "by_question": [round(share, 3) for share in shares],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate all outputs and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policies", help="only these, with commas between; other rows of the file stay")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, context=1024, threads=options.threads, max_batch_size=10)
    policies = {"full": llm.resolve_policy(mode="full"), **llm.shipped_policies()}
    wanted = options.policies.split(",") if options.policies else list(policies)
    about = conditions(llm.path) | {"threads": options.threads, "answer_tokens": TOKENS, "sampling": llm.sampling}
    result: dict[str, Any] = {"conditions": about, "questions": list(QUESTIONS), "default": {}, "greedy": {}}
    if options.policies:
        result |= json.loads(options.out.read_text())
    for name, policy in policies.items():
        if name not in wanted:
            continue
        sampled = [llm.sampling_params(max_tokens=TOKENS, seed=seed) for seed in range(len(QUESTIONS))]
        greedy = [SamplingParams(max_tokens=TOKENS)] * len(QUESTIONS)
        for kind, params in (("default", sampled), ("greedy", greedy)):
            result[kind][name] = cell(llm, policy, params) | {"commit": about["commit"]}
            write(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
