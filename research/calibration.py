"""What calibration takes and what comes out of it, part by part: JSON files for a model.

    python research/calibration.py --cache EMPTY_FOLDER policies training healed orders growth
    python research/calibration.py --cache EMPTY_FOLDER --model MODEL policies healed earlier_curves

`policies` makes the shipped policies without adapters from an empty cache (a quarter of an hour for the default model),
`healed` those over the adapters in the model's folder of policies, which `taper heal` has trained. A healed policy
ships if its KL is lower than that of the plain one and their intervals do not overlap; it takes the plain one's name,
and that one ends in `-plain`. What does not ship stays as it was, so a policy with adapters then has new ones on the
curve of the old ones; `earlier_curves` measures that. `training` keeps how the adapters were trained. The results of
these three are in `healing-MODEL.json`, the others in `calibration-MODEL.json`. `orders` compares the order found with
every baseline on held-out prompts (a quarter of an hour), `growth` times whole calibrations on more and more prompts
(half an hour). The last two are of the default model. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from comparison import MEASURED_ORDER, baseline_policies, random_orders

from taper.lab.calibration.progress import SILENT
from taper.lab.calibration.prompts import builtin_prompts
from taper.lab.calibration.run import MAX_PROMPTS
from taper.lab.calibration.statistics import Estimate, by_completion, ratio_estimate
from taper.lab.calibration.store import Measurements, skipping
from taper.lab.calibration.summary import to_plain
from taper.models.download import DEFAULT_MODEL, PACKAGED_MODELS
from taper.models.files import write_whole
from taper.models.policies import load_policy
from taper.policy import DepthPolicy, middle_first_order

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "research" / "results"
SHIPPED = ROOT / "src" / "taper" / "policies"
PAGES = ROOT / "research" / "pages"
SPEEDS = {"fast": 1.20, "balanced": 1.10, "gentle": 1.05}  # the first finds the cache empty
REPORTED = "balanced"  # has a report
ADAPTERS, PLAIN = "adapters.safetensors", "-plain"
PARTS, HEALING_PARTS = ("policies", "orders", "growth"), ("training", "healed", "earlier_curves")
HEALED = (
    "mean_depth",
    "speedup",
    "held_out",
    "free_running",
    "problems",
    "answer_tokens",
    "conditions",
)  # what is kept of those
ANSWER_TOKENS, CONTEXT, THREADS = 128, 1024, 2
COMPARED_STEPS = 48  # first steps of each held-out output, on which orders are compared
DEPTHS = range(29, 19, -1)
# The order that a first sketch found on other outputs of the same model, with other code.
FIRST_SKETCH = [3, 5, 17, 16, 25, 7, 6, 4, 18, 26]


def run_cli(cache: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`taper calibrate` in a process of its own: its summary, and the time and memory it took."""
    command = [sys.executable, "-m", "taper", "calibrate", "--json", *options]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "TAPER_CACHE": str(cache)}, check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout), {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime - before.ru_utime, 1),
        "peak_mib_so_far": round(after.ru_maxrss / 1024),
    }


def policies(cache: Path, model: str) -> dict[str, Any]:
    """The shipped policies without adapters: time, memory, speed as predicted and measured, held-out quality."""
    for name in SPEEDS:
        (SHIPPED / model / f"{name}{PLAIN}.json").unlink(missing_ok=True)
    return calibrated(cache, model, None)


def healed(cache: Path, model: str) -> dict[str, Any]:
    """The same of policies with adapters; those that are better than the plain ones are shipped in their place."""
    calibrated(cache, model, SHIPPED / model / ADAPTERS)
    policies = {name: load_policy(cache / f"{name}.safetensors") for name in SPEEDS}
    return {name: shipped(SHIPPED / model, name, policy) for name, policy in policies.items()}


def training(cache: Path, model: str) -> dict[str, Any]:
    """How `taper heal` made the adapters, from their file: its runs, each of which went on from the one before."""
    policy = load_policy(SHIPPED / model / ADAPTERS)
    assert policy.adapters is not None
    runs, made = [], policy.provenance["healing"]
    while made:
        runs.insert(0, {key: made[key] for key in ("seconds", "tokens", "before", "after")})
        made = made.get("went_on_from")
    return {"policy": policy.name, "rank": policy.adapters.rank, "runs": runs}


def earlier_curves(cache: Path, model: str) -> dict[str, Any]:
    """Adapters on the curves that the policies have, where they are not shipped on curves of their own."""
    os.environ["TAPER_CACHE"] = str(cache)
    from taper import LLM
    from taper.lab.calibration.measured_model import measured_model
    from taper.lab.calibration.problems import word_problems
    from taper.lab.calibration.prompts import encode_prompts, split
    from taper.lab.calibration.validation import validate

    folder, results = SHIPPED / model, {}
    trained = load_policy(folder / ADAPTERS)
    on_own_curves = json.loads((RESULTS / f"healing-{model}.json").read_text())["healed"]
    llm = LLM(model, threads=THREADS, context=CONTEXT, max_batch_size=64)
    with measured_model(llm, lambda stage, part: None) as measured:
        prompts = list(encode_prompts(llm, builtin_prompts(), 0, MAX_PROMPTS))
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        references = measured.complete(
            "outputs at full depth", prompts, measured.full, ANSWER_TOKENS, measured.sampling
        )
        problems, held_out = word_problems(llm, measured.store), split(references)[1]
        for name in SPEEDS:
            if on_own_curves.get(name, {}).get("shipped"):
                continue
            plain = load_policy(folder / f"{name}.json").without_adapters()
            adapters = trained.adapters.only(plain.skip_order[: plain.num_hidden_layers - plain.min_depth])
            policy = replace(plain, adapters=adapters)
            validated = to_plain(validate(measured, held_out, policy, ANSWER_TOKENS, problems)[0])
            cost = measured.cost(middle, ANSWER_TOKENS, policy)
            timed = {
                kind: to_plain(measured.speedup(middle, one, ANSWER_TOKENS))
                for kind, one in (("measured", policy), ("plain", plain))
            }
            speedup = {"predicted": round(cost.speedup(policy, ANSWER_TOKENS), 4), **timed}
            found = {**validated, "mean_depth": plain.provenance["mean_depth"], "speedup": speedup}
            found |= {"conditions": to_plain(measured.conditions), "answer_tokens": ANSWER_TOKENS}
            healing = {key: trained.provenance[key] for key in ("healing",) if key in trained.provenance}
            provenance = {**plain.provenance, **found, **healing}
            results[name] = shipped(folder, name, replace(policy, provenance=provenance))
    return results


def shipped(folder: Path, name: str, policy: DepthPolicy) -> dict[str, Any]:
    """What the page of healing says of a policy with adapters. It is shipped if it is better than the plain one."""
    return {key: policy.provenance[key] for key in HEALED} | {"shipped": ship(folder, name, policy)}


def ship(folder: Path, name: str, healed: DepthPolicy) -> bool:
    """Ship a healed policy as `name` and the plain one as `name`-plain, if the healed one is better by its interval.

    It is a JSON file that names the file of the adapters.
    """
    file, plain_file = folder / f"{name}.json", folder / f"{name}{PLAIN}.json"
    plain = json.loads((plain_file if plain_file.exists() else file).read_text())
    below, above = (made["held_out"]["all steps"]["kl"] for made in (healed.provenance, plain["provenance"]))
    if below[2] >= above[1]:
        return False
    plain["name"] = plain["provenance"]["policy"] = plain_file.stem
    shipped = json.loads(healed.without_adapters().to_json()) | {"adapters": ADAPTERS}
    for path, policy in ((plain_file, plain), (file, shipped)):
        write_whole(path, json.dumps(policy, indent=1).encode() + b"\n")
    return True


def calibrated(cache: Path, model: str, adapters: Path | None) -> dict[str, Any]:
    """Policies of all speeds by name; with adapters, they are written to the cache folder."""
    (SHIPPED / model).mkdir(exist_ok=True)
    results = {}
    resumed = (cache / "calibration.sqlite").exists()  # so the minutes of the first one are not of a whole calibration
    for name, speed in SPEEDS.items():
        options = ["--model", model, "--speedup", str(speed), "--answer-tokens", str(ANSWER_TOKENS), "--name", name]
        options += ["--threads", str(THREADS), "--context", str(CONTEXT)]
        if adapters is None:
            options += ["--out", str(SHIPPED / model / f"{name}.json")]
        else:
            options += ["--adapters", str(adapters), "--out", str(cache / f"{name}.safetensors")]
        if model != DEFAULT_MODEL and name == REPORTED:
            options += ["--report", str(PAGES / model / "report")]
        summary, took = run_cli(cache, *options)
        keys = ("mean_depth", "speedup", "held_out", "free_running", "cost_ms", "skip_order", "frontier")
        keys += ("answer_tokens", "conditions")
        ratio = round(summary["speedup"]["predicted"] / summary["speedup"]["measured"][0], 4)
        kept = {key: summary[key] for key in keys}
        results[name] = {"resumed": resumed, **took, "predicted_over_measured": ratio, **kept}
    return results


def orders(cache: Path, model: str) -> dict[str, Any]:
    """KL of the order found, every baseline and the first sketch's order on held-out prompts, by depth."""
    os.environ["TAPER_CACHE"] = str(cache)
    from taper import LLM
    from taper.lab.calibration.prompts import completions, encode_prompts, split
    from taper.lab.calibration.search import first_steps
    from taper.lab.calibration.store import current_conditions, open_store
    from taper.models.download import content_hash
    from taper.policy import DepthPolicy

    llm = LLM(model, threads=THREADS, max_batch_size=64)
    store = open_store(content_hash(llm.path), current_conditions(llm))
    full = DepthPolicy.full(llm.config.num_hidden_layers)
    prompts = list(encode_prompts(llm, builtin_prompts(), 0, 256))
    _, held_out = split(completions(llm, prompts, full, ANSWER_TOKENS, store, SILENT))
    measurements = Measurements(llm.engine, first_steps(held_out, COMPARED_STEPS), store)
    order = load_policy(SHIPPED / model / f"fast{PLAIN}.json").skip_order
    started = time.perf_counter()
    compared = compare_orders(measurements, order, {"first sketch": FIRST_SKETCH})
    include_zero = {
        name: {depth: difference for depth, difference in by_depth.items() if difference.low <= 0}
        for name, by_depth in compared["kl_above_measured_order"].items()
    }
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "steps": sum(len(reference.completion_ids) - 1 for reference in measurements.replay.references),
        "answers": len(held_out),
        "answer_tokens": ANSWER_TOKENS,
        "order": order[:10],
        "not_clear_of_zero": {name: to_plain(by_depth) for name, by_depth in include_zero.items() if by_depth},
        **to_plain(compared),
    }


def compare_orders(
    measurements: Measurements, order: Sequence[int], more: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, dict[int, Estimate]]]:
    """Losses of an order, every baseline and `more` orders at each of DEPTHS, by metric, method and depth.

    Depth is constant, except that SkipDecode and HSD have it as their mean. All are measured on the same steps.
    """
    references = measurements.replay.references
    layers = measurements.replay.engine.backend.config.num_hidden_layers
    lengths = [max(len(reference.completion_ids) for reference in references)]
    influence = measurements.block_influence()
    middle_first = [*middle_first_order(layers)]
    middle_first += [layer for layer in range(layers - 1, 0, -1) if layer not in middle_first]  # for any depth
    by_name = {MEASURED_ORDER: order, **more, "middle first (our reading of D3)": middle_first, **random_orders(layers)}
    results: dict[str, dict[str, dict[int, Estimate]]] = {"kl": {}, "agreement": {}, "kl_above_measured_order": {}}
    for depth in DEPTHS:
        policies = {name: skipping(layers, skipped[: layers - depth]) for name, skipped in by_name.items()}
        policies |= baseline_policies(layers, depth, influence, lengths)
        ours, base = policies[MEASURED_ORDER], None
        for name, policy in policies.items():
            scores = measurements.scores(policy, SILENT)
            scores = scores.where(scores.step > 0)
            base = base or scores
            values = {"kl": scores.kl, "agreement": scores.agreement}
            if policy.retained_layers(lengths[0]) != ours.retained_layers(lengths[0]):
                values["kl_above_measured_order"] = scores.kl - base.kl
            ones = by_completion(scores, np.ones(len(scores.step)))
            for metric, of_steps in values.items():
                results[metric].setdefault(name, {})[depth] = ratio_estimate(by_completion(scores, of_steps), ones)
    return results


def growth(cache: Path, model: str) -> dict[str, Any]:
    """Seconds of whole calibrations from empty caches, by the tokens of prompts and answers; and a line."""
    rows = []
    for count in (8, 14, 20, 26):  # above 72 the search has all it takes, and only the rest grows
        folder = cache / f"growth-{count}"
        with_model(folder, model)
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in builtin_prompts()[:count]))
        options = ["--prompts", str(file), "--speedup", "1.1", "--answer-tokens", "24"]
        options += ["--threads", str(THREADS)]
        summary, took = run_cli(folder, *options, "--out", str(folder / "policy.json"))
        rows.append({"prompts": count, "tokens": summary["tokens"], **took})
        shutil.rmtree(folder)
    tokens, seconds = (np.array([row[key] for row in rows], float) for key in ("tokens", "seconds"))
    slope, fixed = np.polyfit(tokens, seconds, 1)
    left = ((seconds - fixed - slope * tokens) ** 2).sum()
    r_squared = 1 - left / ((seconds - seconds.mean()) ** 2).sum()
    line = {"fixed_seconds": fixed, "seconds_per_1000_tokens": 1000 * slope}
    return {"rows": rows, **{key: round(value, 2) for key, value in line.items()}, "r_squared": round(r_squared, 4)}


def with_model(cache: Path, model: str) -> None:
    """A cache folder that holds a model and nothing else."""
    (cache / "models").mkdir(parents=True, exist_ok=True)
    link = cache / "models" / PACKAGED_MODELS[model].path.name
    if not link.exists():
        link.symlink_to(PACKAGED_MODELS[model].path)


def main() -> None:
    """Run the parts asked for; each is written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is measured; empty at first")
    parser.add_argument("--model", choices=PACKAGED_MODELS, default=DEFAULT_MODEL, help="default %(default)s")
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *HEALING_PARTS])
    options = parser.parse_args()
    if options.model != DEFAULT_MODEL and {"orders", "growth"} & {*options.parts}:
        parser.error(f"orders and growth are of {DEFAULT_MODEL}")
    with_model(options.cache, options.model)
    for part in options.parts:
        print(f"{part} ...", file=sys.stderr)
        kind = "healing" if part in HEALING_PARTS else "calibration"
        path = RESULTS / f"{kind}-{options.model}.json"
        result = globals()[part](options.cache, options.model)
        results = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(results | {part: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
