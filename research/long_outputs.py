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
from taper.lab.calibration.long_outputs import BOUNDS, MAX_TOKENS, LongOutputs
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
BALANCED_AGREEMENT, BALANCED_NLL = 0.88, 0.25  # what `balanced` keeps in every range of steps, and costs in the last


def full_depth(model: MeasuredModel, seeds: int) -> list[Reference]:
    """So many outputs of full depth to each question."""
    prompts = [tuple(model.llm.encode(question)) for _ in range(seeds) for question in QUESTIONS]
    return model.complete("outputs at full depth", prompts, model.full, MAX_TOKENS, model.sampling)


def new_problems(model: MeasuredModel, count: int) -> Problems | None:
    """New word problems of the hardest level that the model can do."""
    levels = [[WordProblem(**one) for one in problems(count, PROBLEMS_SEED, [steps])] for steps in (1, 2, 3)]
    found = word_problems(model.llm, model.store, levels)
    return found and replace(found, search=(), validation=range(count))


def measured(
    model: MeasuredModel, full: Sequence[Reference], policy: DepthPolicy, options: argparse.Namespace
) -> tuple[Validation, float]:
    """A policy's figures beside full depth's outputs, and its mean depth on them.

    Word problems and next outputs are measured of policies that pass all else.
    """
    found, scores, _ = validate(model, full, policy, MAX_TOKENS, None, goes_on=False)
    if found.long_outputs.failures == LATER:
        found = validate(model, full, policy, MAX_TOKENS, new_problems(model, options.problems))[0]
    return found, float(scores.depth[scores.step > 0].mean())


def constant(model: MeasuredModel, full: Sequence[Reference], skip_order: Sequence[int], fewer: int) -> dict[str, Any]:
    """What so many fewer layers at every step cost, by ranges of steps, on the same outputs in each range."""
    long = [output for output in full if len(output.completion_ids) >= SAME]
    scores = model.scores("constant depth", long, skipping(model.num_hidden_layers, skip_order[:fewer]))
    ranges = []
    for first, end in pairwise(bound for bound in BOUNDS if bound <= SAME):
        losses = over_steps(scores.where((scores.step >= max(1, first)) & (scores.step < end))).all_steps
        ranges.append({"first": first, "end": end, "agreement": losses.agreement, "kl": losses.kl})
    return {"outputs": len(long), "ranges": ranges}


def kept_names(found: LongOutputs) -> list[str]:
    """The names of shipped policies whose promise a policy keeps.

    `gentle` loses nothing that can be seen: it passes the rule for defaults. `balanced` loses a little: it keeps at
    least `BALANCED_AGREEMENT` of full depth's tokens in each range of steps, and full depth finds its own outputs at
    most `BALANCED_NLL` nats a token less likely in the last one. `fast` promises nothing but depth that falls.
    """
    agreement = [part.agreement.value for part in found.ranges if part.agreement]
    nll = [part.nll.difference.value for part in found.ranges if part.nll]
    holds = {
        "gentle": not found.failures,
        "balanced": bool(nll) and nll[-1] <= BALANCED_NLL and min(agreement) >= BALANCED_AGREEMENT,
        "fast": True,
    }
    return [name for name, kept in holds.items() if kept]


def note(file: Path, found: Any) -> None:
    """Keep the figures in the file of a shipped policy, which decides who gets it unasked."""
    if file.exists():
        data = json.loads(file.read_text())
        data["provenance"]["long_outputs"] = found
        write_whole(file, (json.dumps(data, indent=1) + "\n").encode())


def ship(folder: Path, name: str, policy: DepthPolicy, row: Any, about: Any) -> None:
    """Ship a policy under a name whose promise it keeps; its speed comes from `head.py speed`."""
    if name not in row["long_outputs"]["names"]:
        raise SystemExit(f"the policy keeps {row['long_outputs']['names']}, so it does not ship as {name}")
    conditions = {
        "machine": about["cpu"],
        "kernels": about["library"],
        "threads": about["threads"],
        "date": about["date"],
    }
    keys = ("mean_depth", "held_out", "free_running", "problems", "next_output", "long_outputs")
    provenance = {key: row[key] for key in keys if key in row} | {"answer_tokens": MAX_TOKENS, "conditions": conditions}
    data = json.loads(replace(policy.without_adapters(), name=name, provenance=provenance).to_json())
    if policy.adapters is not None:
        data["adapters"] = "adapters.safetensors"
    write_whole(folder / f"{name}.json", (json.dumps(data, indent=1) + "\n").encode())


def printed(name: str, found: Validation) -> None:
    """A policy's figures as lines."""
    long = found.long_outputs
    print(f"{name}: may be worse: {', '.join(long.failures) or 'nothing'}; keeps {', '.join(kept_names(long))}")
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
    parser.add_argument("--ship", choices=("gentle", "balanced", "fast"), help="ship the policy by this name")
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
            found, mean_depth = measured(model, full_depth(model, options.seeds), policy, options)
            row = to_plain(found) | {"label": policy.label, "min_depth": policy.min_depth, "mean_depth": mean_depth}
            row["long_outputs"]["names"] = kept_names(found.long_outputs)
            result["policies"][Path(name).stem] = row
            write(options.out, result)
            printed(Path(name).stem, found)
            if options.ship:
                ship(SHIPPED / options.model, options.ship, policy, row, result["conditions"])
            else:
                note(SHIPPED / options.model / f"{name}.json", row["long_outputs"])
        order = min(llm.shipped_policies().values(), key=lambda policy: policy.min_depth).skip_order
        for fewer in options.constant:
            depth = str(llm.config.num_hidden_layers - fewer)
            result.setdefault("constant", {})[depth] = to_plain(constant(model, full_depth(model, 1), order, fewer))
            write(options.out, result)
            print(depth, result["constant"][depth])


if __name__ == "__main__":
    main()
