"""What policies lose in long outputs, as users get them: sampled as the model's authors recommend, up to 1,024 tokens.

    python research/long_outputs.py --model MODEL --out research/results/long_outputs-MODEL.json

Twenty questions that nothing else here uses. Agreement and KL are on full depth's outputs; the policy's own outputs
are scored by full depth. Word problems are asked, and next outputs made, only of policies that pass the rest of the
rule for defaults (`taper.lab.calibration.long_outputs`). Each policy is written as it comes; measurements are kept in
the cache, so that the command goes on where it was interrupted. The files of shipped policies keep what was found.
Layers that are skipped at every step, without adapters, show by step whether later tokens are easier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from decode import conditions, write
from word_problems import problems

from taper import LLM, DepthPolicy
from taper.lab.calibration.long_outputs import BOUNDS, MAX_TOKENS
from taper.lab.calibration.measured_model import MeasuredModel, measured_model
from taper.lab.calibration.problems import Problems, WordProblem, word_problems
from taper.lab.calibration.replay import Reference
from taper.lab.calibration.statistics import over_steps
from taper.lab.calibration.store import skipping
from taper.lab.calibration.summary import Validation, interval, to_plain
from taper.lab.calibration.validation import validate
from taper.models.download import DEFAULT_MODEL
from taper.models.files import write_whole

SHIPPED = Path(__file__).parent.parent / "src" / "taper" / "policies"
QUESTIONS = json.loads((Path(__file__).parent / "long_questions.json").read_text())
ROWS = 8  # outputs at a time
SAME = 256  # tokens that outputs have on which constant depths are compared by steps
LATER = ["word problems", "next output"]  # are measured of policies that pass the rest of the rule
PROBLEMS_SEED = 1  # of word problems that nothing else here uses


def full_depth(model: MeasuredModel, seeds: int) -> list[Reference]:
    """So many outputs of full depth to each question."""
    prompts = [tuple(model.llm.encode(question)) for _ in range(seeds) for question in QUESTIONS]
    return model.complete("outputs at full depth", prompts, model.full, MAX_TOKENS, model.sampling)


def new_problems(model: MeasuredModel, count: int) -> Problems | None:
    """New word problems of the hardest level that the model can do."""
    levels = [[WordProblem(**one) for one in problems(count, PROBLEMS_SEED, [steps])] for steps in (1, 2, 3)]
    found = word_problems(model.llm, model.store, levels)
    return found and replace(found, search=(), validation=range(count))


def measured(model: MeasuredModel, full: Sequence[Reference], policy: DepthPolicy, count: int) -> Validation:
    """A policy's figures beside full depth's outputs; word problems and next outputs if it passes all else."""
    found = validate(model, full, policy, MAX_TOKENS, None, goes_on=False)[0]
    if found.long_outputs.failures == LATER:
        found = validate(model, full, policy, MAX_TOKENS, new_problems(model, count))[0]
    return found


def constant(model: MeasuredModel, full: Sequence[Reference], skip_order: Sequence[int], fewer: int) -> dict[str, Any]:
    """What so many fewer layers at every step cost, by ranges of steps, on the same outputs in each range."""
    long = [output for output in full if len(output.completion_ids) >= SAME]
    scores = model.scores("constant depth", long, skipping(model.num_hidden_layers, skip_order[:fewer]))
    ranges = []
    for first, end in pairwise(bound for bound in BOUNDS if bound <= SAME):
        losses = over_steps(scores.where((scores.step >= max(1, first)) & (scores.step < end))).all_steps
        ranges.append({"first": first, "end": end, "agreement": losses.agreement, "kl": losses.kl})
    return {"outputs": len(long), "ranges": ranges}


def note(file: Path, found: Any) -> None:
    """Keep the figures in the file of a shipped policy, which decides who gets it unasked."""
    if file.exists():
        data = json.loads(file.read_text())
        data["provenance"]["long_outputs"] = found
        write_whole(file, (json.dumps(data, indent=1) + "\n").encode())


def printed(name: str, found: Validation) -> None:
    """A policy's figures as lines."""
    long = found.long_outputs
    print(f"{name}: may be worse: {', '.join(long.failures) or 'nothing'}")
    for part in long.ranges:
        nll = [interval(value) for value in vars(part.nll).values()] if part.nll else []
        print(" ", part.first, part.end, part.outputs, part.depth, interval(part.agreement), interval(part.kl), *nll)
    for metric in ("tokens", "ended", "circles"):
        print(" ", metric, *(interval(value) for value in vars(getattr(long, metric)).values()))
    print("  next output", found.next_output and interval(found.next_output.kl), found.problems)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the shipped policies of a model, or others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--policies", nargs="*", help="names or files; by default the shipped ones, the deepest first")
    parser.add_argument("--seeds", type=int, default=1, help="outputs to each question; default %(default)s")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--constant", type=int, nargs="*", default=[1, 2, 4, 8], help="layers fewer, at every step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    # The whole head: a policy's loss is what is measured, and replay has no shortlist.
    llm = LLM(options.model, threads=options.threads, context=2048, max_batch_size=ROWS, head="full")
    result: dict[str, Any] = {"policies": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    about = conditions(llm.path) | {"answer_tokens": MAX_TOKENS, "batch": ROWS, "threads": options.threads}
    result |= {
        "questions": len(QUESTIONS),
        "conditions": about | {"sampling": llm.sampling, "library": llm.engine.backend.kernels},
    }
    with measured_model(llm, None) as model:
        for name in list(llm.shipped_policies()) if options.policies is None else options.policies:
            policy = llm.resolve_policy(name)
            found = measured(model, full_depth(model, options.seeds), policy, options.problems)
            row = to_plain(found) | {"label": policy.label, "min_depth": policy.min_depth}
            result["policies"][Path(name).stem] = row
            write(options.out, result)
            note(SHIPPED / options.model / f"{name}.json", row["long_outputs"])
            printed(Path(name).stem, found)
        order = min(llm.shipped_policies().values(), key=lambda policy: policy.min_depth).skip_order
        for fewer in options.constant:
            depth = str(llm.config.num_hidden_layers - fewer)
            result.setdefault("constant", {})[depth] = to_plain(constant(model, full_depth(model, 1), order, fewer))
            write(options.out, result)
            print(depth, result["constant"][depth])


if __name__ == "__main__":
    main()
