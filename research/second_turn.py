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
from taper.engine import Request
from taper.lab.calibration.prompts import FOLLOW_UP, builtin_prompts, next_prompts
from taper.lab.calibration.replay import Reference, Replay, Scores
from taper.lab.calibration.statistics import over_steps
from taper.lab.calibration.summary import to_plain
from taper.models.download import DEFAULT_MODEL

CONVERSATIONS = 48


def score(llm: LLM, policy: DepthPolicy, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
    """KL and agreement of the second answers, with 95 % intervals."""
    full, references = llm.resolve_policy(mode="full"), complete(llm, prompts, policy, tokens)
    going_on = next_prompts(llm, references, tokens)
    replay = Replay(llm.engine, complete(llm, [prompt for _, prompt in going_on], full, tokens))
    filled = Scores.joined([replay.after_tapered(index, policy, first) for index, (first, _) in enumerate(going_on)])
    replay.close()
    losses = to_plain(over_steps(filled))["all steps"]
    return {"conversations": len(going_on), "steps": len(filled.step), "second_answer": losses}


def complete(llm: LLM, prompts: Sequence[tuple[int, ...]], policy: DepthPolicy, tokens: int) -> list[Reference]:
    """Greedy completions, each as from a cold start."""
    params, eos_token_ids = SamplingParams(max_tokens=tokens), llm.tokenizer.eos_token_ids
    requests = [Request(ids, params, policy, eos_token_ids, reuse="exact") for ids in prompts]
    return [Reference(ids, tuple(said)) for ids, said in zip(prompts, llm.engine.complete(requests), strict=True)]


def main() -> None:
    """Score each shipped policy of a model and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="the file of results; policies that it has stay")
    options = parser.parse_args()
    llm = LLM(options.model, context=1024, threads=options.threads, max_batch_size=16)
    about = {
        name: value for name, value in conditions(llm.path).items() if name not in ("batch", "rounds", "statistic")
    }
    about |= {"threads": options.threads, "answer_tokens": options.tokens, "follow_up": FOLLOW_UP}
    prompts = [tuple(llm.encode(prompt)) for prompt in builtin_prompts()[:CONVERSATIONS]]
    result: dict[str, Any] = {"conditions": about, "policies": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    for name, policy in llm.shipped_policies().items():
        if name not in result["policies"]:
            result["policies"][name] = score(llm, policy, prompts, options.tokens)
            write(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
