"""What filled keys and values cost the next turn: the second answer at full depth after a first one that was tapered.

    python research/second_turn.py --out research/results/second_turn-smollm2-135m-instruct.json

The first answer of each conversation is the policy's own. The second one is full depth's own after everything was
computed; it is then scored once more over the cells that the tapered answer left, skipped layers filled. Written policy
by policy, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode import conditions, write

from taper import LLM, DepthPolicy, SamplingParams
from taper.calibration.prompts import builtin_prompts
from taper.calibration.replay import Reference, Replay, Scores
from taper.calibration.statistics import over_steps
from taper.calibration.summary import to_plain
from taper.engine import Request, common_prefix
from taper.models.download import DEFAULT_MODEL

FOLLOW_UPS = (
    "Explain the most important part of that in more detail.",
    "Give me an example, and say what is special about it.",
    "What could somebody object to this, and what would you reply?",
    "Write that again for a reader who knows nothing about it.",
)


def conversations(llm: LLM, policy: DepthPolicy, count: int, tokens: int) -> list[tuple[Reference, Reference]]:
    """The first and the second turn of conversations; a second prompt begins with the first turn."""
    prompts = [llm.encode(prompt) for prompt in builtin_prompts()[:count]]
    texts = builtin_prompts()[:count]
    first_ids = complete(llm, prompts, policy, tokens)
    seconds, firsts = [], []
    for number, (text, prompt, ids) in enumerate(zip(texts, prompts, first_ids, strict=True)):
        turns = [
            ("user", text),
            ("assistant", llm.tokenizer.decode(ids)),
            ("user", FOLLOW_UPS[number % len(FOLLOW_UPS)]),
        ]
        second = llm.encode([{"role": role, "content": content} for role, content in turns])
        shared = common_prefix(second, [*prompt, *ids])  # text does not always give the same tokens again
        if shared > len(prompt) + 1:
            firsts.append(Reference(tuple(prompt), tuple(second[len(prompt) : shared])))
            seconds.append(second)
    answers = complete(llm, seconds, llm.resolve_policy(mode="full"), tokens)
    return [
        (first, Reference(tuple(prompt), tuple(ids)))
        for first, prompt, ids in zip(firsts, seconds, answers, strict=True)
        if ids
    ]


def complete(llm: LLM, prompts: Sequence[list[int]], policy: DepthPolicy, tokens: int) -> list[list[int]]:
    """Greedy completions, each as from a cold start."""
    params, eos_token_ids = SamplingParams(max_tokens=tokens), llm.tokenizer.eos_token_ids
    return llm.engine.complete([Request(ids, params, policy, eos_token_ids, reuse="exact") for ids in prompts])


def score(llm: LLM, policy: DepthPolicy, turns: Sequence[tuple[Reference, Reference]]) -> dict[str, Any]:
    """KL and agreement of the second answers with intervals, and what the policy itself costs the first ones."""
    replay = Replay(llm.engine, [second for _, second in turns])
    filled = Scores.joined([replay.after_tapered(index, policy, first) for index, (first, _) in enumerate(turns)])
    replay.close()
    steps = len(filled.step)
    return {"conversations": len(turns), "steps": steps, "second_answer": to_plain(over_steps(filled))["all steps"]}


def main() -> None:
    """Score each shipped policy of a model and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, context=1024, threads=options.threads, max_batch_size=16)
    about = conditions(llm.path) | {"threads": options.threads, "answer_tokens": options.tokens}
    result: dict[str, Any] = {"conditions": about | {"follow_ups": FOLLOW_UPS}, "policies": {}}
    for name, policy in llm.shipped_policies().items():
        turns = conversations(llm, policy, options.conversations, options.tokens)
        result["policies"][name] = score(llm, policy, turns)
        if options.out:
            write(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
