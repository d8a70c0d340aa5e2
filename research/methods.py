"""Every published rule of skipping layers on one engine, at one mean depth: accuracy on tasks, KL, agreement, speed.

    python research/methods.py --data-dir DATA --folder FOLDER quality speed

Policies are tuned to the same mean depth over the outputs of full depth. `quality` needs no idle machine; `speed` does,
and measures only tasks that have their quality. Outputs and replays are kept in FOLDER and never computed twice, so a
run can be interrupted, and a later one can ask for more problems, methods or tasks. Results hold figures alone; those
of methods that a run does not ask for stay.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comparison import FULL, Study, TaskStudy, mean_depth
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
from taper.errors import RequestError
from taper.lab.calibration.clock import measure_speedup
from taper.lab.calibration.store import numbers
from taper.lab.calibration.summary import to_plain
from taper.lab.evals import summarise
from taper.lab.evals.tasks import EvalTask
from taper.policy import Schedule

Json = dict[str, Any]


def quality(task: TaskStudy, policies: Mapping[str, DepthPolicy]) -> Json:
    """Methods by name on the problems of a task; full depth is the first of them."""
    evaluation = task.evaluate(list(policies.values()))
    (result,) = summarise(evaluation).results
    replayed = task.study.scores(task.references, {n: policy for n, policy in policies.items() if n != FULL})
    outputs = [record.completions[0].token_ids for record in task.records]
    rows = {}
    for (name, policy), score in zip(policies.items(), result.scores, strict=True):
        row: Json = {"problems": result.problems, "numbers": numbers(policy)}
        row["tuned_mean_depth"] = mean_depth(policy, task.lengths)
        row |= to_plain(score)
        if name in replayed:
            row |= losses(replayed[name])
        rows[name] = row
    return {
        "settings": evaluation.settings["tasks"][task.task.name] | {"chat": task.chat},
        "figure": result.metric,
        "guessed": guessed(task.task),
        "output_tokens": round(statistics.median(map(len, outputs))),
        "replayed_outputs": len(task.references),
        "replayed_steps": sum(len(reference.completion_ids) - 1 for reference in task.references),
        "methods": rows,
    }


def guessed(task: EvalTask) -> float | None:
    """The share of a task's problems that its most frequent answer solves; None where answers are whole solutions."""
    targets = [problem.requests[0].doc.get("target") for problem in task.problems(range(task.num_problems)).values()]
    return None if None in targets else max(Counter(targets).values()) / len(targets)


def speed(study: Study, prompt_ids: Sequence[int], cell: Mapping[str, Any]) -> dict[str, Json]:
    """Speed of every method against full depth over outputs of a task's median length."""
    engine, tokens = study.llm.engine, max(2, cell["output_tokens"])
    policies = {name: restored(row["numbers"], study) for name, row in cell["methods"].items() if name != FULL}
    return {
        name: {
            "speedup": measure_speedup(engine, prompt_ids, policy, tokens),
            "mean_depth": round(policy.mean_depth(tokens), 3),
        }
        for name, policy in policies.items()
    }


def restored(policy: Mapping[str, Any], study: Study) -> DepthPolicy:
    """A policy from its numbers, with the adapters of the study if it had them."""
    schedule = {name: value for name, value in policy.items() if name not in ("skip_order", "adapters")}
    adapters = study.adapters if "adapters" in policy else None
    if policy.get("adapters") != (adapters and adapters.digest):
        raise RequestError("the results have other adapters", "give the --policy that they were measured with")
    return DepthPolicy(Schedule(**schedule), tuple(policy["skip_order"]), adapters=adapters)


def main(arguments: Iterable[str] | None) -> None:
    """Measure what is asked for; the file of results is written after each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["quality", "speed"])
    parser.add_argument("--methods", default="", help='words of their names, such as "measured,ShortGPT"; default all')
    add_options(parser)
    options = parser.parse_args(arguments)
    study = open_study(options)
    path, result = open_results(options, "methods", study.llm)
    depth, tasks = mean_depth_of(options, study.num_hidden_layers), result.setdefault("tasks", {})
    about = conditions(study.llm, options)
    for name in listed(options.tasks):
        cells, key = tasks.setdefault(name, {}), f"{depth:.6g}"
        before = cells.get(key, {})
        task = open_task(study, name, options)
        if "quality" in options.parts:
            say(f"{name} at depth {key} ...")
            every = task.methods(depth)
            cell = quality(task, {one: every[one] for one in chosen(every, listed(options.methods))})
            if before and before["conditions"]["max_tokens"] == options.max_tokens:
                rows = before["methods"] | cell["methods"]  # those that are not measured again stay as they are
                cell = before | cell | {"methods": {one: rows[one] for one in every if one in rows}}
            cells[key] = cell | {"conditions": about}
        if "speed" in options.parts and key in cells:
            say(f"{name} at depth {key}: speed ...")
            cells[key]["speed"] = {"rows": speed(study, task.prompts[0], cells[key]), "conditions": about}
        write(path, to_plain(result))


if __name__ == "__main__":
    run(main)
