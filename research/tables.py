"""What pages need computed from results: pooled scores, verdicts on the paper's claims, rankings, commands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from comparison import FULL
from formats import FORMATS, TAPER, TESTS
from task_options import DEFAULTS

from taper.lab.calibration.statistics import (
    MIN_OUTPUTS,
    Estimate,
    PairedComparison,
    bootstrap_difference,
    mcnemar,
    wilson,
)

Json = dict[str, Any]
GSM8K, BBH = "gsm8k", "bbh"
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "inconclusive"
PAPER_SPEEDUP = 1.12  # D3's gain by the clock on Llama 2 7B, from its table of speeds
LEAST_SAVED = 0.05  # share of KL; a start of each task's own that saves less than this is of no use


# Methods on tasks


def by_depth(result: Json) -> dict[str, dict[str, Json]]:
    """The tasks of a model by mean depth, deepest first."""
    depths = sorted({depth for cells in result["tasks"].values() for depth in cells}, key=float, reverse=True)
    return {d: {task: cells[d] for task, cells in result["tasks"].items() if d in cells} for d in depths}


def bbh_tasks(cells: Mapping[str, Json]) -> dict[str, Json]:
    """The tasks of BBH."""
    return {task: cell for task, cell in cells.items() if task.startswith(BBH)}


def groups(cells: Mapping[str, Json]) -> dict[str, list[Json]]:
    """GSM8K alone, and all tasks of BBH together, by title."""
    bbh, groups = bbh_tasks(cells), {"GSM8K": [cells[GSM8K]]} if GSM8K in cells else {}
    if bbh:
        groups[f"BBH, {len(bbh)} tasks together" if len(bbh) > 1 else next(iter(bbh))] = list(bbh.values())
    return groups


def common(cells: Sequence[Json]) -> list[str]:
    """The methods that were measured on all of some tasks; full depth is the first."""
    return [name for name in cells[0]["methods"] if all(name in cell["methods"] for cell in cells)]


def pooled(cells: Sequence[Json], name: str) -> tuple[Estimate, Estimate | None, float]:
    """Accuracy of a method on some tasks together, its difference to full depth, and McNemar's p-value.

    The difference is over the problems that the method was asked, which may be fewer than full depth was.
    """
    rows = [cell["methods"][name] for cell in cells]
    problems = sum(row["problems"] for row in rows)
    solved = wilson(sum(round(row["accuracy"][0] * row["problems"]) for row in rows if row["accuracy"]), problems)
    if name == FULL:
        return solved, None, 1.0
    only = [sum(row["against_full"][key] for row in rows) for key in ("only_full", "only_tapered")]
    return solved, bootstrap_difference(problems, *only), mcnemar(*only)


def best_on_gsm8k(models: Iterable[Json]) -> list[Json]:
    """At each depth where full depth solves anything of GSM8K: the best method, and the range of the others."""
    lines = []
    for model in models:
        for depth, cells in by_depth(model).items():
            rows = {n: row["accuracy"][0] for n, row in cells.get(GSM8K, {"methods": {}})["methods"].items()}
            if len(rows) > 2 and rows.pop(FULL) > 0:
                best, *others = sorted(rows, key=lambda name: -rows[name])
                full = cells[GSM8K]["methods"][FULL]["accuracy"][0]
                line = {"model": model["model"], "depth": depth, "full": full, "best": best, "solved": rows[best]}
                lines.append(line | {"low": rows[others[-1]], "high": rows[others[0]]})
    return lines


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over different tasks; its interval from theirs, which are independent."""
    value = sum(one.value for one in estimates) / len(estimates)
    below, above = (math.sqrt(sum((one[end] - one.value) ** 2 for one in estimates)) / len(estimates) for end in (1, 2))
    return Estimate(value, value - below, value + above)


# Commands that measure something again


def command(script: str, model: str, about: Json, tasks: Sequence[str], depth: str | None, parts: str) -> str:
    """The line that measures methods or claims again, under the same conditions."""
    options = {"model": model, "policy": about.get("policy"), "data-dir": "DATA", "folder": "FOLDER", "depth": depth}
    options |= {name: about[name.replace("-", "_")] for name in ("limit", "replayed", "max-tokens")}
    options |= {name.replace("_", "-"): about[name] for name, value in DEFAULTS.items() if about[name] != value}
    return f"python research/{script} {_options(options | {'tasks': ','.join(tasks)})} {parts}"


def methods_commands(model: str, depth: str, cells: Mapping[str, Json]) -> list[str]:
    """Those of a table of methods: one for tasks of the same limits."""
    alike: dict[tuple[int, int, bool], list[str]] = {}
    for task, cell in cells.items():
        limits = (cell["conditions"]["limit"], cell["conditions"]["max_tokens"], "speed" in cell)
        alike.setdefault(limits, []).append(task)
    return [
        command("methods.py", model, cells[tasks[0]]["conditions"], tasks, depth, "quality" + " speed" * timed)
        for (*_, timed), tasks in alike.items()
    ]


def claim_runs(model: str, part: str, metrics: Json) -> list[tuple[str, Json]]:
    """The commands of a part of the claims, or of its tasks as far as these differ, and their conditions."""
    every = [metrics["conditions"]] if "conditions" in metrics else [f["conditions"] for f in metrics["tasks"].values()]
    depth = metrics.get("depth")
    fixed = part in ("accuracy", "length") or depth is None  # these depend on no --depth
    return [
        (command("claims.py", model, about, about["tasks"], None if fixed else f"{depth:.6g}", part), about)
        for place, about in enumerate(every)
        if about not in every[:place]
    ]


def calibrate_command(s: Json) -> str:
    """That of a calibration to a task, from its settings."""
    asked, own = s["asked"], s["split"] is None
    options = {
        "model": s["model"]["name"],
        "task": f"{s['task']}.jsonl" if own else s["task"],
        "data-dir": None if own else "DATA",
        "split": s["split"],
        "fewshot": s["fewshot"],
        "max-tokens": asked["max_tokens"],
        "filter": s["figure"],
        "margin": s["margin"],
        "problems": s["problems"]["validation"],
        "seed": asked["seed"],
        "threads": s["conditions"]["threads"],
    }
    return f"taper calibrate {_options(options)}{' --chat' if asked['chat'] else ''} --json > FILE"


def _options(options: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items() if value not in (None, ""))


# Verdicts on the paper's claims


def above_zero(estimate: Sequence[float] | None) -> str:
    """Whether a metric is above zero: by its whole 95 % interval."""
    if estimate is None:
        return UNKNOWN
    _, low, high = estimate
    return HOLDS if low > 0 else FAILS if high < 0 else UNKNOWN


def below_zero(estimate: Sequence[float] | None) -> str:
    """Whether it is below zero."""
    return above_zero(None if estimate is None else [-x for x in (estimate[0], estimate[2], estimate[1])])


def all_of(verdicts: Iterable[str]) -> str:
    """A claim in several parts holds if all do, and does not if one does not."""
    different = set(verdicts)
    return FAILS if FAILS in different else HOLDS if different == {HOLDS} else UNKNOWN


def has_solutions(f: Json) -> bool:
    """Whether there are enough of people's solutions for an interval of their perplexity."""
    return "human" in f and f["human"]["answers"] >= MIN_OUTPUTS


def start_verdict(f: Json) -> str:
    """Whether a start of each task's own is better than one for all."""
    _, low, high = f["saved_by_own_start"]
    return HOLDS if low > 0 else FAILS if high < LEAST_SAVED else UNKNOWN


def verdicts(part: str, f: Json) -> dict[str, str]:
    """The verdicts of a part of the claims, by what they are about."""
    if part == "perplexity":
        human = "perplexity falls along people's solutions"
        return {
            "perplexity falls along full depth's outputs": below_zero(f["change"]["nll"]),
            **({human: below_zero(f["human"]["nll"])} if has_solutions(f) else {}),
            "skipping costs less at later steps (KL)": below_zero(f["change"]["kl"]),
        }
    if part == "curves":
        above = [row["kl_above_power"] for row in f["curves"].values() if "kl_above_power" in row]
        return {"power law against the other curves": all_of(map(above_zero, above))}
    if part == "core":
        ends = ("head", "tail")
        return {f"the {name} matters more than the middle": above_zero(f[name]["above_middle"]) for name in ends}
    if part == "nesting":
        return {
            "a rule that is not nested is worse": above_zero(f["kl_above_nested"]),
            "missing keys and values are the reason": above_zero(f["kl_of_missing"]),
        }
    if part == "accuracy":
        return {
            f"{name}, {order}": _accuracy_verdict(score["against_full"])
            for name, task in f["tasks"].items()
            if name in (GSM8K, "BBH")
            for order, score in task["scores"].items()
            if order != FULL
        }
    if part == "length":
        (_, low, high), (_, low_long, high_long) = (f["rows"][end]["by_clock"] for end in (0, -1))
        longer = HOLDS if low_long > high else FAILS if high_long <= low else UNKNOWN
        return {"the clock saves more on longer outputs": longer}
    return {"a start of each task's own is better than one for all": start_verdict(f)}


def _accuracy_verdict(compared: Json | None) -> str:
    return {"holds": HOLDS, "fails": FAILS}.get(compared["verdict"] if compared else "", UNKNOWN)


def cheaper_than_middle(core: Json) -> list[int]:
    """The layers of head and tail that cost less than the mean of the middle, if they are skipped alone."""
    ends = sorted(core["head"]["layers"] + core["tail"]["layers"])
    return [layer for layer in ends if core["layers"][layer]["above_middle"][2] < 0]


def claims_by_verdict(titles: Mapping[str, str], models: Iterable[Json]) -> dict[str, list[str]]:
    """The claims that hold wherever they were measured, that fail somewhere, and the others."""
    by_verdict: dict[str, list[str]] = {HOLDS: [], FAILS: [], UNKNOWN: []}
    for part, title in titles.items():
        every = [verdict for model in models if part in model for verdict in verdicts(part, model[part]).values()]
        if every:
            by_verdict[all_of(every)].append(title)
    return by_verdict


# Signals


def mean_correlations(models: Sequence[Json]) -> list[tuple[str, float, list[float]]]:
    """Each signal's Spearman correlation: its mean over the models and each of them; strongest mean first.

    A signal that is the same for all sets of a model is left out.
    """
    names = [n for n in models[0]["correlation"] if all(any(m["correlation"][n]["spearman"]) for m in models)]
    values = {name: [model["correlation"][name]["spearman"][0] for model in models] for name in names}
    rows = [(name, sum(own) / len(own), own) for name, own in values.items()]
    return sorted(rows, key=lambda row: -abs(row[1]))


def best_of_replay(rows: Sequence[tuple[str, float, list[float]]]) -> tuple[str, float, list[float]]:
    """The first of these rows that needs no outputs of its own."""
    return next(row for row in rows if row[0].startswith("replay"))


def strongest_first(correlation: Json) -> list[tuple[str, Json]]:
    """The signals of a model that differ between the sets."""
    ranked = sorted(correlation.items(), key=lambda item: -abs(item[1]["spearman"][0]))
    return [(name, one) for name, one in ranked if any(one["spearman"])]


def signals_command(c: Json, sets: Iterable[str]) -> str:
    """The line that measures the signals of a model again."""
    task = f"{c['task']}.jsonl" if c["version"] == "own" else f"{c['task']} --data-dir DATA"
    numbers = f"--signal-problems {c['signal_problems']} --problems {c['problems']} --max-tokens {c['max_tokens']}"
    return (
        f"python research/task_signals.py --model {c['model']} --task {task} --sets '{', '.join(sets)}' {numbers} "
        "--records FOLDER/records.jsonl --out FILE"
    )


# Calibration, formats and types


def conclusion(comparison: Json) -> str:
    """What a comparison on a task says of the margin."""
    measures = {name: Estimate(*comparison[name]) for name in ("full", "tapered", "difference")}
    return PairedComparison(**comparison | measures).conclusion


def solves_less(policies: Mapping[str, Json]) -> list[str]:
    """The policies that solve significantly fewer word problems than full depth."""
    return [name for name, p in policies.items() if p.get("problems") and p["problems"]["difference"][2] < 0]


def shipped_healed(healing: Json) -> Json:
    """By name, what is known of the policies that ship with adapters."""
    curves = [healing.get(kind, {}) for kind in ("healed", "earlier_curves")]
    return {name: row for rows in curves for name, row in rows.items() if row["shipped"]}


def by_minutes_trained(runs: Sequence[Json]) -> dict[int, Json]:
    """What a policy costs after so many minutes of the runs that trained its adapters, where it was measured."""
    ends = list(accumulate((round(run["seconds"] / 60) for run in runs), initial=0))
    known: dict[int, Json | None] = {}
    for run, start, end in zip(runs, ends, ends[1:], strict=False):
        known |= {start: run.get("before"), end: run.get("after")}
    return {minutes: part for minutes, part in known.items() if part}


def format_peers(formats: Json) -> list[str]:
    """The names of the llama.cpp's, in the order in which they were measured."""
    speeds = [
        cell["tokens_per_second"] for kind in ("decode", "prefill", "batch") for *_, cell in cells_of(formats, kind)
    ]
    return [name for name in max(speeds, key=len) if name != TAPER]


def cells_of(formats: Json, kind: str) -> list[tuple[str, int, Json]]:
    """Format, size and cell of each test of a kind that was measured, in the order of the table."""
    sizes = sorted(size for other, size in TESTS if other == kind)
    measured = [
        (name, size, formats["formats"].get(name, {}).get(f"{kind} {size}")) for name in FORMATS for size in sizes
    ]
    return [(name, size, cell) for name, size, cell in measured if cell]


def commits(formats: Json) -> list[str]:
    """All commits at which a format was measured."""
    return sorted({cell["commit"] for kind in ("decode", "prefill", "batch") for *_, cell in cells_of(formats, kind)})


def counted(matrices: Mapping[str, int]) -> str:
    """How many matrices are of each type."""
    return ", ".join(f"{count} {dtype}" for dtype, count in Counter(matrices).most_common())


# Sessions


def session_models(session: Mapping[str, Json], default_model: str) -> list[str]:
    """The models that were measured, the default model first."""
    return sorted(session, key=lambda model: (model != default_model, model))


def session_cells(session: Mapping[str, Json], default_model: str, name: str) -> dict[str, Json]:
    """A cell of each model that has it."""
    cells = {model: session[model]["cells"] for model in session_models(session, default_model)}
    return {model: own[name] for model, own in cells.items() if name in own}


def session_rows(cell: Json, wanted: Iterable[str] = ()) -> dict[str, str]:
    """The targets of a cell and their titles, without the policies that are not wanted; llama-server comes last."""
    titles = {"full": "full depth", "llama_server": "llama-server"}
    policies = [name for name in cell["seconds"] if name not in titles]
    chosen = [name for name in policies if not wanted or name in wanted]
    names = ["full", *chosen, *(["llama_server"] if "llama_server" in cell["seconds"] else [])]
    return {name: titles.get(name, f"`{name}`") for name in names}


def with_spread(values: Sequence[float] | None) -> str:
    """A ratio with the least and the most of the rounds; a dash for None."""
    return "–" if values is None else "{:.2f}x ({:.2f} to {:.2f})".format(*values)


def session_title(name: str) -> str:
    """What a cell was, from its name, such as "default 8"."""
    sampling, clients = name.split()
    asked = "the server's own sampling" if sampling == "default" else "greedy"
    return f"{asked}, {'one client' if clients == '1' else f'{clients} clients at once'}"


def head_row(kinds: dict[str, Any]) -> dict[str, float]:
    """What a shortlist misses, over all kinds of text."""
    steps = sum(kind["steps"] for kind in kinds.values())
    means = ("argmax", "total_variation", "mean_tokens", "whole_head")
    row = {key: sum(kind[key] * kind["steps"] for kind in kinds.values()) / steps for key in means}
    return row | {"steps": steps, "worst": min(kind["argmax"] for kind in kinds.values())}


def shown_failures(policy: Json) -> str:
    """What a policy may lose in long outputs, without what was not measured."""
    measured = {"word problems": "problems", "next output": "next_output"}
    names = [name for name in policy["long_outputs"]["failures"] if measured.get(name, "held_out") in policy]
    return ", ".join(names) or "nothing"
