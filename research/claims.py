"""The claims of the paper (D3, arXiv 2503.08524), measured one by one on a model.

    python research/claims.py --data-dir DATA --folder FOLDER perplexity curves core nesting accuracy length start

`length` times outputs, so leave the machine alone meanwhile; the other parts need no idle machine. Each part writes its
figures and conditions to the file of results. Outputs and replays are kept in FOLDER, which research/methods.py
shares, and are never computed twice.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from comparison import FULL, MEASURED_ORDER, Study, TaskStudy, by_step, closest_d3, closest_policy, joined, mean_depth
from decode import write
from task_options import (
    add_options,
    chosen,
    conditions,
    listed,
    losses,
    mean_depth_of,
    open_results,
    open_study,
    open_task,
    run,
    say,
)

from taper import DepthPolicy
from taper.lab.bench.measure import mean_step_bytes
from taper.lab.calibration.clock import measure_speedup
from taper.lab.calibration.progress import SILENT
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.search import first_steps
from taper.lab.calibration.statistics import Estimate, by_completion, ratio_estimate
from taper.lab.calibration.summary import to_plain
from taper.lab.evals import Evaluation, summarise
from taper.policy import Schedule, middle_first_order

FEWER = 1.5  # times fewer operations, as the paper has them
ALPHA = 0.998  # the paper's, of which it reports savings
ORDERS = (f"D3, {MEASURED_ORDER}", "D3, middle first (our reading)")
GSM8K = "gsm8k"
LENGTHS = (32, 64, 128, 256, 512)  # of outputs, in tokens
STARTS = (0.0, 0.125, 0.25, 0.5, 0.75)  # where depth begins to fall, in median answers
ALONE_STEPS = 32  # of each answer on which layers are skipped alone
HALVED = 16  # an answer with fewer steps has no halves to compare
PARTS = ("perplexity", "curves", "core", "nesting", "accuracy", "length", "start")
Json = dict[str, Any]


class Claims:
    """The parts on one model and its tasks.

    Args:
        study: the model.
        tasks: at least one.
        depth: the mean depth at which policies are compared.
    """

    def __init__(self, study: Study, tasks: Sequence[TaskStudy], depth: float) -> None:
        self._study, self._tasks, self._depth, self._layers = study, tasks, depth, study.num_hidden_layers

    def perplexity(self) -> Json:
        """(a) NLL at full depth by step, and what skipping the same layers at every step costs by step."""
        references = self._references()
        constant = DepthPolicy.static(self._layers, round(self._depth), self._study.order)
        scores = self._study.scores(references, {"constant": constant})["constant"]
        measured = {"nll": scores.nll_full, "kl": scores.kl, "disagreement": 1 - scores.agreement}
        change = {name: _second_half_less_first(scores, values) for name, values in measured.items()}
        figures: Json = {"depth": constant.min_depth, "answers": len(references), "change": change}
        figures["rows"] = by_step(scores, measured)
        if human := self._solutions():
            read = self._study.scores(human, {"full": DepthPolicy.full(self._layers)})["full"]
            figures["human"] = {"answers": len(human), "nll": _second_half_less_first(read, read.nll_full)}
        return figures

    def curves(self) -> Json:
        """(b) Curves of one mean depth over all answers, in the measured order, by KL over all steps."""
        references, order, layers = self._references(), self._study.order, self._layers
        lengths = [len(reference.completion_ids) for reference in references]
        lowest = max(layers - len(order), round(layers - 2 * (layers - self._depth)))
        longest = max(lengths)

        def tuned(policy_of: Callable[[int], DepthPolicy], largest: int) -> DepthPolicy:
            return closest_policy(policy_of, largest, self._depth, lengths)

        policies = {
            "power": closest_d3(layers, order, self._depth, lengths),
            "linear": tuned(lambda n: DepthPolicy(Schedule(layers, "linear", lowest, span=n), order), 4 * longest),
            "constant": DepthPolicy.static(layers, round(self._depth), order),
            "late start": tuned(lambda n: DepthPolicy(Schedule(layers, "constant", lowest, start=n), order), longest),
        }
        scores = self._study.scores(references, policies)
        power = scores["power"]
        ones = by_completion(power, np.ones(len(power.step)))
        rows = {}
        for name, policy in policies.items():
            row: Json = {"mean_depth": mean_depth(policy, lengths), "schedule": dict(vars(policy.schedule))}
            row |= losses(scores[name])
            if name != "power":
                row["kl_above_power"] = ratio_estimate(by_completion(power, scores[name].kl - power.kl), ones)
            rows[name] = row
        return {"depth": self._depth, "answers": len(references), "steps": len(power.step), "curves": rows}

    def core(self) -> Json:
        """(c) What skipping each layer alone costs, and the first and last eighth against the layers between."""
        references = first_steps(self._references(), ALONE_STEPS)
        with self._study.measurements(references) as measured:
            each = [range(index, index + 1) for index in range(len(references))]
            sums = np.stack([measured.kl_sums(frozenset(), range(self._layers), one, SILENT) for one in each])
        steps = np.array([len(reference.completion_ids) - 1 for reference in references], float)
        middle = sorted(middle_first_order(self._layers))
        head, tail = list(range(middle[0])), list(range(middle[-1] + 1, self._layers))
        between = sums[:, middle].mean(1)
        layers = [
            {"kl": ratio_estimate(row, steps), "above_middle": ratio_estimate(row - between, steps)} for row in sums.T
        ]
        blocks = {
            name: {"layers": block, "above_middle": ratio_estimate(sums[:, block].mean(1) - between, steps)}
            for name, block in (("head", head), ("tail", tail))
        }
        count = {"answers": len(references), "steps": int(steps.sum())}
        return {**count, "layers": layers, "middle": ratio_estimate(between, steps), **blocks}

    def nesting(self) -> Json:
        """(d) The nested rule against one that leaves keys and values missing, in transformers in f32."""
        from unnested import compare_nesting

        by_task = [task.references for task in self._tasks]
        mixed = [reference for group in zip(*by_task, strict=False) for reference in group]
        return compare_nesting(self._study, mixed, self._depth)

    def accuracy(self) -> Json:
        """(e) D3 at 1.5 times fewer layers than full depth, on GSM8K, on BBH, and on each task."""
        depth = self._layers / FEWER
        parts = []
        for task in self._tasks:
            policies = task.methods(depth)
            parts.append(task.evaluate([policies[name] for name in chosen(policies, ORDERS)]))
        return {"depth": depth, "tasks": _summaries(parts)}

    def length(self) -> Json:
        """(f) What a policy with the paper's alpha saves by output length: by layers, by bytes and by the clock."""
        engine, layers = self._study.llm.engine, self._layers
        full, policy = DepthPolicy.full(layers), DepthPolicy.middle_first(layers, ALPHA)
        sizes, prompt = engine.backend.weight_bytes, self._tasks[0].prompts[0]
        rows = [
            {
                "tokens": tokens,
                "by_layers": layers / policy.mean_depth(tokens),
                "by_bytes": mean_step_bytes(sizes, full, tokens) / mean_step_bytes(sizes, policy, tokens),
                "by_clock": measure_speedup(engine, prompt, policy, tokens),
            }
            for tokens in LENGTHS
        ]
        return {"alpha": ALPHA, "min_depth": policy.min_depth, "rows": rows}

    def start(self) -> Json:
        """(g) D3 with several starts at one mean depth on each task: does the best start differ between tasks?"""
        kls: dict[str, np.ndarray] = {}  # by task, sums over each answer: [starts, answers]
        rows = {}
        for task in self._tasks:
            name, references = task.task.name, task.references
            policies = self._by_start([len(reference.completion_ids) for reference in references])
            scores = self._study.scores(references, {str(part): policy for part, policy in policies.items()})
            ones = by_completion(scores["0.0"], np.ones(len(scores["0.0"].step)))
            kls[name] = np.stack([by_completion(own, own.kl) for own in scores.values()])
            rows[name] = {
                str(part): {
                    "start": policy.schedule.start,
                    "alpha": policy.schedule.alpha,
                    "kl": ratio_estimate(kl, ones),
                }
                for (part, policy), kl in zip(policies.items(), kls[name], strict=True)
            }
        return {"depth": self._depth, "tasks": rows, "saved_by_own_start": _saved_by_own_start(kls)}

    def _references(self) -> list[Reference]:
        """Full depth's outputs to all tasks."""
        return [reference for task in self._tasks for reference in task.references]

    def _solutions(self) -> list[Reference]:
        """Problems of GSM8K with the solutions that people wrote, without the calculator's marks."""
        encode, references = self._study.llm.tokenizer.encode, []
        for task in self._tasks:
            if task.task.name == GSM8K:
                problems = task.task.problems(range(min(self._study.num_replayed, task.num_problems)))
                for index, problem in problems.items():
                    text = re.sub("<<.*?>>", "", problem.requests[0].doc["answer"])
                    ids = tuple(encode(text, add_special_tokens=False))
                    references.append(Reference(task.prompts[index], ids))
        return references

    def _by_start(self, lengths: Sequence[int]) -> dict[float, DepthPolicy]:
        """D3 in the measured order with each start, at one mean depth, by the start in median answers."""
        middle, layers, order = statistics.median(lengths), self._layers, self._study.order
        return {part: closest_d3(layers, order, self._depth, lengths, start=round(part * middle)) for part in STARTS}


def _second_half_less_first(scores: Scores, values: np.ndarray) -> Estimate | None:
    """The mean over the second half of an answer's steps less that over the first; answers of `HALVED` steps count."""
    answers = [values[scores.reference == index] for index in np.unique(scores.reference)]  # steps are in order
    changes = [one[len(one) // 2 :].mean() - one[: len(one) // 2].mean() for one in answers if len(one) >= HALVED]
    return ratio_estimate(np.array(changes), np.ones(len(changes))) if changes else None


def _summaries(parts: Sequence[Evaluation]) -> Json:
    """The comparison with full depth on each task, and on all tasks of BBH together."""
    bbh = [name for part in parts for name in part.settings["tasks"] if name.startswith("bbh")]
    summary = summarise(joined(parts, {"BBH": bbh} if len(bbh) > 1 else {}))
    return {
        result.name: {
            "problems": result.problems,
            "figure": result.metric,
            "scores": dict(zip((FULL, *ORDERS), result.scores, strict=True)),
        }
        for result in summary.results
    }


def _saved_by_own_start(kls: Mapping[str, np.ndarray]) -> Estimate:
    """The share of the KL of the best common start that each task's own best start saves.

    Starts are chosen on one half of the answers of each task and judged on the other, and the other way round.
    `kls`: by task, sums of KL over each answer, [starts, answers].
    """
    saved, common = [], []
    for chosen_on, judged_on in ((0, 1), (1, 0)):
        # Each task counts alike: its KL is a share of its mean over starts.
        shares = [kl[:, chosen_on::2].sum(1) / kl[:, chosen_on::2].mean(0).sum() for kl in kls.values()]
        best = int(np.sum(shares, 0).argmin())
        for kl in kls.values():
            own = int(kl[:, chosen_on::2].sum(1).argmin())
            judged = kl[:, judged_on::2]
            scale = judged.mean()
            saved.append((judged[best] - judged[own]) / scale)
            common.append(judged[best] / scale)
    return ratio_estimate(np.concatenate(saved), np.concatenate(common))


def main(arguments: Iterable[str] | None) -> None:
    """Measure the parts asked for; the file of results is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    add_options(parser)
    options = parser.parse_args(arguments)
    study = open_study(options)
    path, result = open_results(options, "claims", study.llm)
    names = listed(options.tasks)
    tasks = [open_task(study, name, options) for name in names]
    claims = Claims(study, tasks, mean_depth_of(options, study.num_hidden_layers))
    about = conditions(study.llm, options) | {"tasks": names}
    for part in options.parts:
        say(f"{part} ...")
        figures: Json = getattr(claims, part)()
        if part == "accuracy":  # tasks differ in their limits, so those of other runs stay
            own = {name: task | {"conditions": about} for name, task in figures["tasks"].items()}
            figures["tasks"] = result.get(part, {}).get("tasks", {}) | own
        else:
            figures["conditions"] = about
        result[part] = to_plain(figures)
        write(path, result)


if __name__ == "__main__":
    run(main)
