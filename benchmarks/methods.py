"""Every published rule of skipping layers on one engine, at one mean depth: accuracy on tasks, KL, agreement, speed.

    python benchmarks/methods.py --data-dir DATA --folder FOLDER quality speed

Policies are tuned to the same mean depth over the answers that full depth writes. `quality` needs no idle machine;
`speed` does, and measures only tasks that have their quality. The file of results grows task by task, and a second run
measures only what it lacks. Answers are kept in FOLDER, results hold figures alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from decode import write
from task_answers import (
    Study,
    add_options,
    conditions,
    listed,
    losses,
    open_results,
    open_study,
    run,
    say,
    wanted_depth,
)

from taper import DepthPolicy
from taper.bench.measure import alternate, measure
from taper.calibration.baselines import mean_depth
from taper.calibration.measure import numbers
from taper.calibration.summary import to_plain
from taper.engine import Engine
from taper.evals import summarise
from taper.evals.methods import FULL, methods
from taper.schedule import Schedule

ROUNDS = 3
Json = dict[str, Any]


def quality(study: Study, task: str, depth: float) -> Json:
    """Every method on the problems of a task, at mean depth `depth` over full depth's answers to them."""
    answers = study.full_depth(task)
    policies = methods(study.layers, depth, answers.lengths, study.order, study.influence())
    evaluation = study.with_policies(answers, policies, f"depth-{depth:g}-limit-{study.limit}")
    (result,) = summarise(evaluation).results
    replayed = study.scores(answers.references, {name: one for name, one in policies.items() if name != FULL})
    rows = {}
    for (name, policy), score in zip(policies.items(), result.scores, strict=True):
        row: Json = {"numbers": numbers(policy), "depth_over_full_answers": mean_depth(policy, answers.lengths)}
        row |= to_plain(score)
        if name in replayed:
            row |= losses(replayed[name])
        rows[name] = row
    return {
        "settings": evaluation.settings["tasks"][task] | {"chat": evaluation.settings["chat"]},
        "problems": result.problems,
        "figure": result.figure,
        "answer_tokens": round(statistics.median(answers.lengths)),
        "prompt_tokens": round(statistics.median(map(len, answers.prompts))),
        "replayed_answers": len(answers.references),
        "replayed_steps": len(next(iter(replayed.values())).step),
        "answers_of_same_length": answers.same_length,
        "methods": rows,
    }


def speed(engine: Engine, cell: Mapping[str, Any]) -> dict[str, Json]:
    """Milliseconds a token of every method, and speed against full depth, at a task's median prompt and answer."""
    policies = {name: restored(row["numbers"]) for name, row in cell["methods"].items()}
    lengths = {"prompt_tokens": cell["prompt_tokens"], "max_tokens": cell["answer_tokens"]}
    runs = {name: partial(measure, engine, policy, **lengths) for name, policy in policies.items()}
    results = alternate(runs, ROUNDS)
    speeds = {}
    for name, rounds in results.items():
        ratios = [full.tpot_s / own.tpot_s for full, own in zip(results[FULL], rounds, strict=True)]
        speeds[name] = {
            "tpot_ms": round(1e3 * statistics.median(one.tpot_s for one in rounds), 3),
            "speedup": [round(value, 4) for value in (statistics.median(ratios), min(ratios), max(ratios))],
            "mean_depth": round(policies[name].mean_depth(lengths["max_tokens"]), 3),
        }
    return speeds


def restored(policy: Mapping[str, Any]) -> DepthPolicy:
    """A policy from its numbers."""
    schedule = {name: value for name, value in policy.items() if name != "skip_order"}
    return DepthPolicy(Schedule(**schedule), tuple(policy["skip_order"]))


def is_same(cell: Mapping[str, Any] | None, about: Mapping[str, Any]) -> bool:
    """Whether a task was measured on as many problems, with as long outputs."""
    return cell is not None and all(cell["conditions"][key] == about[key] for key in ("limit", "max_tokens"))


def main(arguments: Iterable[str] | None) -> None:
    """Measure what the file of results lacks; it is written after each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["quality", "speed"])
    add_options(parser)
    options = parser.parse_args(arguments)
    study = open_study(options)
    path, result = open_results(options, "methods", study.llm)
    depth, tasks = wanted_depth(options, study.layers), result.setdefault("tasks", {})
    about = conditions(study.llm, options)
    for task in listed(options.tasks):
        cells = tasks.setdefault(task, {})
        key = f"{depth:g}"
        if "quality" in options.parts and not is_same(cells.get(key), about):
            say(f"{task} at depth {depth:g} ...")
            cells[key] = quality(study, task, depth) | {"conditions": about}
        if "speed" in options.parts and key in cells and "speed" not in cells[key]:
            say(f"{task} at depth {depth:g}: speed ...")
            cells[key]["speed"] = {"rows": speed(study.llm.engine, cells[key]), "conditions": about}
        write(path, to_plain(result))


if __name__ == "__main__":
    run(main)
