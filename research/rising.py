"""Depth that rises again within an output: by sentence, in turns, and by how sure the model was of the token before.

    python research/rising.py --model MODEL --policy fast --out research/results/rising-MODEL.json

Full depth's outputs to the questions of `long_outputs.py` are replayed at depths that may rise, where the cells of
skipped layers are filled. Each schedule runs a policy's layers and adapters at a lower depth where it skips, and every
layer elsewhere:

- constant: the lower depth at every step
- turns: at all but one step in so many
- sentences, paragraphs: at all but the first tokens of each
- random: at steps that are drawn, for comparison
- gate: where the token before was at least so probable, under the tapered model itself

Each schedule is written as it comes, and kept in the file if the command is run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from decode import conditions, write
from long_outputs import ROWS, full_depth

from taper import LLM, DepthPolicy
from taper.lab.calibration.long_outputs import BOUNDS, MAX_TOKENS
from taper.lab.calibration.measured_model import measured_model
from taper.lab.calibration.replay import Replay, Scores
from taper.lab.calibration.statistics import MIN_OUTPUTS, over_steps
from taper.lab.calibration.summary import interval, to_plain
from taper.models.download import DEFAULT_MODEL


class Output(NamedTuple):
    """An output that is replayed."""

    index: int
    texts: list[str]  # of its tokens


Skips = Callable[[Output, int, float], bool]  # whether a step skips, by the probability of the token before it


def turns(every: int) -> Skips:
    """All steps but one in so many."""
    return lambda output, step, probability: step % every != 0


def segments(ends: str, first: int) -> Skips:
    """All but the first tokens after one that holds any of these characters."""

    def skips(output: Output, step: int, probability: float) -> bool:
        before = output.texts[max(0, step - first) : step]
        return step >= first and not any(end in text for text in before for end in ends)

    return skips


def drawn(share: float) -> Skips:
    """This share of all steps."""
    return lambda output, step, probability: np.random.default_rng((output.index, step)).random() < share


def gate(threshold: float) -> Skips:
    """Where the token before was at least so probable."""
    return lambda output, step, probability: probability >= threshold


def always(output: Output, step: int, probability: float) -> bool:
    """Every step."""
    return True


SCHEDULES: dict[str, Skips] = {
    "constant": always,
    **{f"turns {every}": turns(every) for every in (2, 4)},
    **{f"sentences {first}": segments(".!?\n", first) for first in (4, 8)},
    "paragraphs 16": segments("\n", 16),
    **{f"random {share}": drawn(share) for share in (0.35, 0.5)},
    **{f"gate {threshold}": gate(threshold) for threshold in (0.9, 0.97, 0.99)},
}


def figures(scores: Scores) -> dict[str, Any]:
    """A schedule's figures over all steps, and by ranges of steps; intervals resample outputs."""
    ranges = []
    for first, end in pairwise(BOUNDS):
        part = scores.where((scores.step >= max(1, first)) & (scores.step < end))
        if len(np.unique(part.reference)) >= MIN_OUTPUTS:
            losses = over_steps(part).all_steps
            ranges.append({"first": first, "end": end, "agreement": losses.agreement, "kl": losses.kl})
    later = scores.where(scores.step > 0)
    losses = over_steps(later).all_steps
    found = {"depth": float(later.depth.mean()), "agreement": losses.agreement, "kl": losses.kl}
    return to_plain(found | {"ranges": ranges})


def measured(replay: Replay, outputs: Sequence[Output], policy: DepthPolicy, skips: Skips) -> dict[str, Any]:
    """The figures of a schedule on all outputs."""

    def depth(index: int, step: int, probability: float) -> int:
        skipped = skips(outputs[index], step, probability)
        return policy.min_depth if skipped else policy.num_hidden_layers

    groups = (range(len(outputs))[first : first + ROWS] for first in range(0, len(outputs), ROWS))
    return figures(Scores.joined([one for group in groups for one in replay.stepped(group, policy, depth)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure schedules of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--policy", default="fast", help="whose layers and adapters are skipped; default %(default)s")
    parser.add_argument("--depths", type=int, nargs="+", required=True, help="where a schedule skips")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES, metavar="SCHEDULE")
    parser.add_argument("--outputs", type=int, default=20, help="of full depth, replayed; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, threads=options.threads, context=2048, max_batch_size=ROWS, head="full")
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"schedules": {}}
    about = {"answer_tokens": MAX_TOKENS, "policy": options.policy, "library": llm.engine.backend.kernels}
    result["conditions"] = conditions(llm.path) | about | {"outputs": options.outputs, "threads": options.threads}
    skipped = llm.resolve_policy(options.policy)
    with measured_model(llm, None) as model:
        known = full_depth(model, 1)[: options.outputs]
    texts = [[llm.tokenizer.decode([token]) for token in output.completion_ids] for output in known]
    outputs = [Output(index, own) for index, own in enumerate(texts)]
    with closing(Replay(llm.engine, known)) as replay:
        for depth in options.depths:
            policy = DepthPolicy.static(skipped.num_hidden_layers, depth, skipped.skip_order)
            policy = replace(policy, adapters=skipped.adapters)
            for name in options.schedules:
                key = f"{depth} {name}"
                if key not in result["schedules"]:
                    result["schedules"][key] = measured(replay, outputs, policy, SCHEDULES[name])
                    write(options.out, result)
                row = result["schedules"][key]
                by_step = [interval(part["agreement"]) for part in row["ranges"]]
                print(
                    key, round(row["depth"], 2), interval(row["kl"]), interval(row["agreement"]), *by_step, flush=True
                )


if __name__ == "__main__":
    main()
