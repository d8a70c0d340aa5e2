"""Does a gate beat the best policy without one at equal measured speed, in outputs of up to 1,024 tokens?

    python research/gates.py --model MODEL --out research/results/gates-MODEL.json

Both have the order and the adapters of a shipped policy. At each speed, the most promising curves and gates by a
forecast from constant depths are replayed on full depth's outputs to twenty questions; gates may start at the first
step, or later. The best of each kind are then timed in turn, in outputs as users get them and as long as full depth's.
If the gate is slower, it skips one layer more. Ratios of losses are with the gate over without it; intervals resample
questions. Each speed is written as it comes; measurements are kept in the cache, so that the command goes on where it
was interrupted. Leave the machine alone while it runs (25 minutes for the larger model on two cores).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, write
from long_outputs import QUESTIONS, ROWS

from taper import LLM, DepthPolicy
from taper.lab.calibration.clock import CostModel, step_times
from taper.lab.calibration.gates import ATTEMPTS, SPARE, THRESHOLDS, Forecasts, mean_depth, speedup, with_gate
from taper.lab.calibration.long_outputs import BOUNDS, MAX_TOKENS
from taper.lab.calibration.measured_model import MeasuredModel, measured_model
from taper.lab.calibration.progress import Progress
from taper.lab.calibration.replay import Scores
from taper.lab.calibration.search import LayerOrder, Skipped, loss_by_depth, power_curve, power_curves
from taper.lab.calibration.statistics import MIN_OUTPUTS, by_completion, ratio_estimate
from taper.lab.calibration.store import numbers
from taper.lab.calibration.summary import interval, to_plain
from taper.models.download import DEFAULT_MODEL

UNGATED, GATED = 3, 3  # candidates that are replayed at each speed
TIMED = 5  # questions
CONTEXT = 2048


class Study:
    """A model, its outputs at full depth, and what policies cost there."""

    def __init__(self, model: MeasuredModel, policy: DepthPolicy, questions: Sequence[str], max_tokens: int) -> None:
        self.model, layers = model, policy.num_hidden_layers
        prompts = [tuple(model.llm.encode(question)) for question in questions]
        self.outputs = model.complete("outputs at full depth", prompts, model.full, max_tokens, model.sampling)
        skipped = policy.adapted_layers or policy.skip_order[: layers // 3]
        adapters = policy.adapters and policy.adapters.only(skipped)
        self.order = LayerOrder([0.0] * layers, [Skipped(layer, 0.0, 0.0) for layer in skipped], adapters)
        self.tokens = round(statistics.mean(len(output.completion_ids) for output in self.outputs))
        self.cost = model.cost(prompts[0], self.tokens, policy if policy.adapted_layers else None)
        with model.measurements(self.outputs) as measurements:
            self.forecasts = Forecasts(loss_by_depth(self.order, measurements, Progress()), layers)

    def replayed(self, policy: DepthPolicy) -> Scores:
        """What a policy costs on full depth's outputs."""
        return self.model.scores(policy.label, self.outputs, policy)

    def ungated(self, speed: float) -> DepthPolicy:
        """The policy of lowest KL without gates that is predicted to be so fast."""
        fast = self._as_fast(self.curves(), speed)
        if not fast:
            raise SystemExit(f"no policy of this order is predicted to be {speed} times as fast")
        return self._lowest_kl(fast[:UNGATED])

    def gated(self, ungated: DepthPolicy) -> DepthPolicy | None:
        """The gated policy of lowest KL that is predicted to be as fast; None if there is none."""
        least = self.cost.speedup(ungated, self.forecasts.mean_depth(ungated)) * SPARE
        found = [with_gate(one, level, one.min_depth) for one, level in product(self.curves(), THRESHOLDS)]
        fast = self._as_fast(found, least)
        return self._lowest_kl(fast[:GATED]) if fast else None

    def curves(self) -> list[DepthPolicy]:
        """Policies without gates: power curves, and constant depths from the first step on."""
        most = len(self.order.searched)
        constant = [power_curve(self.order, skipped, 0, 1) for skipped in range(1, most + 1)]
        return power_curves(self.order, most, self.tokens) + constant

    def _as_fast(self, policies: Iterable[DepthPolicy], speed: float) -> list[DepthPolicy]:
        """Of those that are predicted to be so fast the best of each depth, since they differ most; the best first."""
        fast = [one for one in policies if self.cost.speedup(one, self.forecasts.mean_depth(one)) >= speed]
        worst_first = sorted(fast, key=self.forecasts.kl, reverse=True)
        return sorted({one.min_depth: one for one in worst_first}.values(), key=self.forecasts.kl)

    def _lowest_kl(self, policies: Iterable[DepthPolicy]) -> DepthPolicy:
        return min(policies, key=lambda policy: float(self.replayed(policy).kl.mean()))

    def timed(self, policies: Sequence[DepthPolicy]) -> np.ndarray:
        """Seconds of outputs, without their first tokens, [questions, policies]; as long as full depth's, side by
        side."""
        engine, seconds = self.model.llm.engine, []
        chosen = self.outputs[:: max(1, len(self.outputs) // TIMED)][:TIMED]
        for output in (chosen[0], *chosen):  # the first warms up
            tokens = max(2, len(output.completion_ids))
            rows = step_times(engine, output.prompt_ids, policies, tokens, self.model.sampling)
            seconds.append([sum(row) / 1e3 for row in rows])
        return np.array(seconds[1:])


def compared(study: Study, speed: float) -> dict[str, Any]:
    """The best of both kinds at a speed: what they lose, how fast they are, and the ratios of their losses."""
    ungated = study.ungated(speed)
    gated = study.gated(ungated)
    if gated is None:
        return {"ungated": described(study.cost, ungated, study.replayed(ungated))}
    for attempt in range(ATTEMPTS):
        seconds = study.timed([study.model.full, ungated, gated])
        is_as_fast = seconds[:, 2].sum() <= seconds[:, 1].sum()
        can_go_deeper = gated.min_depth > len(study.order.importance) - len(study.order.searched)
        if is_as_fast or not can_go_deeper or attempt == ATTEMPTS - 1:
            break
        gated = with_gate(gated, gated.schedule.gates[0].threshold, gated.min_depth - 1)
    scores = {"ungated": study.replayed(ungated), "gated": study.replayed(gated)}
    row: dict[str, Any] = {"as_fast": bool(is_as_fast), "gated_over_ungated_speed": ratio(seconds, 1, 2)}
    for place, (name, policy) in enumerate({"ungated": ungated, "gated": gated}.items(), 1):
        row[name] = described(study.cost, policy, scores[name]) | {"speedup": ratio(seconds, 0, place)}
    longest = int(scores["gated"].step.max()) + 1
    bounds = [*(bound for bound in BOUNDS if bound < longest), longest]
    row["all steps"] = ratios(scores["gated"], scores["ungated"], 1, longest)
    row["ranges"] = [
        {"first": first, "end": end} | found
        for first, end in pairwise(bounds)
        if (found := ratios(scores["gated"], scores["ungated"], max(1, first), end))
    ]
    return row


def ratio(seconds: np.ndarray, base: int, policy: int) -> list[float]:
    """How many times as fast a policy is as another: over all outputs, the slowest and the fastest of them."""
    each = seconds[:, base] / seconds[:, policy]
    return [round(float(x), 4) for x in (seconds[:, base].sum() / seconds[:, policy].sum(), each.min(), each.max())]


def described(cost: CostModel, policy: DepthPolicy, scores: Scores) -> dict[str, Any]:
    """A policy, its mean depth, and what it loses, over steps from 1 on."""
    row = {key: value for key, value in numbers(policy).items() if key != "skip_order" and value is not None}
    row |= {"mean_depth": round(mean_depth(scores), 3), "predicted": round(speedup(cost, policy, scores), 4)}
    tapered = scores.where(scores.step > 0)
    count = by_completion(tapered, np.ones(len(tapered.step)))
    for name in ("kl", "agreement"):
        row[name] = ratio_estimate(by_completion(tapered, getattr(tapered, name)), count)
    return row


def ratios(gated: Scores, ungated: Scores, first: int, end: int) -> dict[str, Any] | None:
    """Losses with the gate over those without it at some steps, with intervals; None in too few outputs."""
    part = (gated.step >= first) & (gated.step < end)
    gated, ungated = gated.where(part), ungated.where(part)
    outputs = len(np.unique(gated.reference))
    if outputs < MIN_OUTPUTS:
        return None
    pairs = {"kl": (gated.kl, ungated.kl), "disagreement": (1 - gated.agreement, 1 - ungated.agreement)}
    sums = {name: [by_completion(gated, values) for values in pair] for name, pair in pairs.items()}
    return {"outputs": outputs} | {name: ratio_estimate(*pair) for name, pair in sums.items() if pair[1].any()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare at each speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--policy", default="fast", help="whose order and adapters are meant; default %(default)s")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.05, 1.10], help="times that of full depth")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first ones; default all")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of an output; default %(default)s")
    parser.add_argument("--head", choices=("full", "auto"), default="full", help="of all; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.questions < MIN_OUTPUTS:
        parser.error(f"--questions {options.questions}: {MIN_OUTPUTS} or more make an interval")
    llm = LLM(options.model, threads=options.threads, context=CONTEXT, max_batch_size=ROWS, head=options.head)
    about = conditions(llm.path) | {"threads": options.threads, "library": llm.engine.backend.kernels}
    about |= {"head": llm.engine.backend.head, "answer_tokens": options.max_tokens, "sampling": llm.sampling}
    result: dict[str, Any] = {"speeds": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    with measured_model(llm, None) as model:
        study = Study(model, llm.resolve_policy(options.policy), QUESTIONS[: options.questions], options.max_tokens)
        result |= {"conditions": about, "policy": options.policy, "questions": options.questions}
        result |= {"tokens": study.tokens, "cost_ms": to_plain(study.cost)}
        for speed in options.speeds:
            row = compared(study, speed)
            result["speeds"][str(speed)] = to_plain(row)
            write(options.out, result)
            if "gated" not in row:
                print(f"{speed}x: no gate is predicted to be as fast as {row['ungated']}")
                continue
            loss = " ".join(
                f"{name} {interval(row['all steps'][name])}" for name in row["all steps"] if name != "outputs"
            )
            print(f"{speed}x: with a gate over without one: {loss}, speed {row['gated_over_ungated_speed']}")
            print(*(f"  {kind}: {row[kind]}" for kind in ("ungated", "gated")), sep="\n")


if __name__ == "__main__":
    main()
