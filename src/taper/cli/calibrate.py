"""`taper calibrate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, number
from ..models.policies import ADAPTERS_SUFFIX, load_policy, save_policy
from .common import (
    NOT_HEALED,
    OF_MODELS,
    GroupedCommand,
    Percent,
    Share,
    beginning,
    check_file,
    check_report,
    conclusion,
    load,
    model_options,
    num_used,
    say,
    say_what_was_read,
    stages,
)

if TYPE_CHECKING:
    from ..lab.calibration.long_outputs import StepRange
    from ..lab.calibration.run import Calibration
    from ..policy import DepthPolicy

_NOT_MET = 1
_LIMITS = ("max_kl", "min_agreement", "max_nll_increase", "speedup")
# Options that do nothing without a task, and those that do nothing with one.
_FOR_TASKS = ("margin", "problems", "split", "data_dir", "fewshot", "chat", "max_tokens", "filter_name")
_FOR_PROMPTS = (*_LIMITS, "answer_tokens", "quick", "prompts", "report", "heal")
_TASK_BATCH_SIZE = 32
_GROUPS = {
    "Budget, one at least, or a speed": ("min_agreement", "max_kl", "max_nll_increase", "speedup"),
    "Prompts": ("prompts", "quick", "answer_tokens", "seed"),
    "Results": ("report", "out", "name", "as_json"),
    "A task, instead of a budget and prompts": ("task", *_FOR_TASKS),
    "Adapters": ("adapters", "heal"),
    "Model": OF_MODELS,
}


@click.command(cls=GroupedCommand, groups=_GROUPS)
@model_options
@click.option(
    "--prompts",
    type=Path,
    metavar="FILE",
    help='JSON lines with "prompt" or "messages", text, one prompt a line, or a CSV with a column prompt. Default: 72 '
    "built-in prompts.",
)
@click.option("--max-kl", type=float, help="Mean KL(full depth || policy) over these steps, in nats.")
@click.option(
    "--min-agreement",
    type=Share(),
    help="At so many of the steps that skip layers, the likeliest token is full depth's: 0.95 or 95%.",
)
@click.option(
    "--max-nll-increase",
    type=Percent(),
    metavar="PERCENT",
    help="How much the NLL of full depth's outputs may rise at these steps: 3 or 3%.",
)
@click.option(
    "--speedup",
    type=float,
    metavar="X",
    help="Instead of a budget: the best quality at X times the speed, such as 1.2.",
)
@click.option(
    "--adapters",
    type=Path,
    metavar="FILE",
    help="A policy from taper heal: keep its order and adapters, and find its curve anew.",
)
@click.option("--heal", type=float, metavar="MINUTES", help="Train adapters too, and find the curve anew with them.")
@click.option(
    "--answer-tokens",
    type=click.IntRange(2),
    help="Length of output to plan for. Default: the median of the model's own, up to 1024.",
)
@click.option(
    "--quick",
    is_flag=True,
    default=None,
    show_default=False,
    help="A first look in minutes: up to 24 prompts, short outputs, no word problems; wide intervals.",
)
@click.option("--task", metavar="NAME|FILE", help="Problems with answers, on which the accuracy must hold.")
@click.option(
    "--margin",
    type=Share(below_one=True),
    metavar="X",
    help="Loss of accuracy that you accept: 0.03 or 3%.",
)
@click.option("--problems", type=int, metavar="N", help="Most problems for each comparison. Default: 192.")
@click.option("--split", metavar="NAME", help="Part of the data to calibrate on. Default: train.")
@click.option("--data-dir", type=Path, metavar="FOLDER", help="Local data of GSM8K and BBH.")
@click.option("--fewshot", type=int, metavar="N", help="Examples before each problem.")
@click.option("--chat/--no-chat", default=None, help="Ask by the model's chat template; the default for a file.")
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens of an output.")
@click.option("--filter", "filter_name", metavar="NAME", help="The filter whose metric counts.")
@click.option(
    "--out", type=Path, help="Where to write the policy. Default: policy.json, with adapters policy.safetensors."
)
@click.option("--report", type=Path, metavar="FOLDER", help="Write a page with pictures into this folder.")
@click.option("--name", default="", show_default=False, help="What to call the policy.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed for splitting the prompts in two.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as one JSON object.")
def calibrate(out: Path | None, as_json: bool, **options: Any) -> None:
    """Find the layers that a model can spare under a budget.

    \b
    A first look in minutes:
      taper calibrate --quick --speedup 1.1 --report report

    Give at least one budget, or a speed. Prompts that the search never saw decide the verdict. Measurements are kept:
    an interrupted calibration continues where it was, and another budget on the same prompts is quick. If no policy
    meets the budget, taper says so, writes no policy and exits with code 1.

    With --task, the budget is the accuracy on problems with known answers: your own, as JSON lines or a CSV with
    "prompt" and "answer", or a task of lm-evaluation-harness. This is the measure that counts, and it takes longest.
    """
    _check_options(options)
    has_adapters = options["adapters"] is not None or options["heal"] is not None
    suffix = ADAPTERS_SUFFIX if has_adapters else ".json"
    out = Path("policy").with_suffix(suffix) if out is None else out
    if (out.suffix == ADAPTERS_SUFFIX) != has_adapters:
        raise RequestError(f"--out is {out}; this policy is written as {suffix}", "rename it")
    check_file("--out", out)
    try:
        policy = _to_prompts(out, as_json, options) if options["task"] is None else _to_task(out, as_json, options)
    except KeyboardInterrupt:
        say("what was measured is kept; the same command goes on from there")
        raise
    if policy is None:
        sys.exit(_NOT_MET)
    save_policy(out, policy)
    say(f'policy: {out}; try: taper generate --policy {out} "..."')


def _check_options(options: Mapping[str, Any]) -> None:
    """Reject options that would do nothing."""
    has_task = options["task"] is not None
    rule, hint = ("with", "leave it out") if has_task else ("without", "leave it out, or give a task")
    for name in _FOR_PROMPTS if has_task else _FOR_TASKS:
        if options[name] is not None:
            option = f"--{name.removesuffix('_name').replace('_', '-')}"
            raise RequestError(f"{option} does nothing {rule} --task", hint)
    if has_task and options["margin"] is None:
        raise RequestError("--task needs --margin, the loss of accuracy that you accept", "such as --margin 0.03")


def _to_prompts(out: Path, as_json: bool, options: dict[str, Any]) -> DepthPolicy | None:
    """The policy for a budget or a speed; None if none keeps it."""
    from ..lab.calibration.measured_model import batch_size
    from ..lab.calibration.prompts import builtin_prompts, read_prompts, split
    from ..lab.calibration.run import MAX_PROMPTS, QUICK_PROMPTS
    from ..lab.calibration.run import calibrate as run
    from ..lab.calibration.summary import Budget
    from ..lab.healing.run import MAX_MINUTES, heal, import_healing

    Budget(**{name: options[name] for name in _LIMITS})  # reports a mistake before the model loads
    healed = None if options["adapters"] is None else load_policy(options["adapters"])
    if options["heal"] is not None:
        if healed:
            raise RequestError("--heal trains adapters; --adapters gives them", "leave out one of the two")
        number("heal", options["heal"], 0, MAX_MINUTES, above=True)
        import_healing()  # reports that PyTorch is missing before the model loads
    prompts = builtin_prompts() if options["prompts"] is None else read_prompts(options["prompts"])
    used = num_used(prompts, QUICK_PROMPTS if options["quick"] else MAX_PROMPTS)
    search, held_out = map(len, split(range(used)))
    say_what_was_read(prompts, options["prompts"], used, f"{search} for the search", held_out)
    if options["report"] is not None:
        check_report("--report", options["report"])
    llm = load(options, max_batch_size=batch_size(len(prompts), options["device"]))
    names = (*_LIMITS, "answer_tokens", "seed", "name")
    find = partial(run, llm, prompts, quick=bool(options["quick"]), **{name: options[name] for name in names})
    with stages() as progress:
        result = find(progress=progress, healed=healed)
    if options["heal"] is not None:
        with stages() as progress:
            healing = heal(llm, result.policy, minutes=options["heal"], seed=options["seed"], progress=progress)
        if not healing.helped:
            say(f"taper: {NOT_HEALED}; {out} was not written")
            return None
        with stages() as progress:
            result = find(progress=progress, healed=healing.policy)
    if as_json:
        click.echo(json.dumps(result.summary.to_json()))
    else:
        _print(result)
    if options["report"] is not None:
        from ..lab.calibration.report import write_report

        write_report(options["report"], result.summary)
        say(f"report: {options['report'] / 'index.html'}")
    if not result.met:
        no_verdict = result.summary.verdict == "not enough steps"
        why = "no verdict" if no_verdict else "no policy that was found keeps the budget on held-out prompts"
        say(f"taper: {why}; {out} was not written")
        return None
    return result.policy


def _print(result: Calibration) -> None:
    """The result in a few lines and two tables."""
    from ..lab.calibration.summary import interval, limits, remarks, verdict
    from .terminal import METRICS, print_table

    summary, held_out, own = result.summary, result.summary.held_out, result.summary.free_running
    measured = summary.speedup.measured
    click.echo(
        f"{'policy' if result.met else 'nearest policy'} {summary.policy}: mean depth {summary.mean_depth:.1f} of "
        f"{summary.model.num_hidden_layers} over {summary.answer_tokens} tokens\n"
        f"budget {', '.join(asked for asked, _ in limits(summary))}: {verdict(summary)}\n"
        f"speed  {measured.median:.2f}x measured ({measured.slowest:.2f} to {measured.fastest:.2f}), "
        f"{summary.speedup.predicted:.2f}x predicted\n"
    )
    losses = (held_out.tapered_steps, held_out.all_steps)
    rows = [
        (title, *(interval(getattr(loss, name, None), factor) for loss in losses)) for title, name, factor in METRICS
    ]
    print_table((f"{summary.prompts.held_out} held-out prompts, 95 % intervals", "tapered steps", "all steps"), rows)
    click.echo()
    long = summary.long_outputs
    pairs = (
        ("NLL at full depth, nats", own.nll, 1),
        ("tokens", own.length, 1),
        ("ended by the model, %", long.ended, 100),
        ("repeated 4-grams, %", own.repetition, 100),
        ("in circles, %", long.circles, 100),
        ("word problems solved, %", summary.problems, 100),
    )
    rows = [(title, interval(p.policy, factor), interval(p.full, factor)) for title, p, factor in pairs if p]
    print_table(("its own outputs", "policy", "full depth"), rows)
    click.echo()
    rows = [
        (f"{part.first} to {part.end}", str(part.outputs), *_of_steps(part)) for part in long.ranges if part.agreement
    ]
    titles = ("agreement, %", "KL, nats", "NLL of its own outputs, nats", "and at full depth")
    print_table(("steps", "outputs", *titles), rows)
    if (after := summary.next_output) is not None:
        click.echo()
        title = "the next output, at full depth, after a tapered one"
        print_table((title, "KL, nats", "agreement, %"), [("", interval(after.kl), interval(after.agreement, 100))])
    notes = remarks(summary)
    if summary.problems is None and not summary.prompts.quick:
        notes.insert(0, "No word problems: full depth solves too few of them, or the context is too short.")
    if notes:
        click.echo("\n" + "\n".join(notes))


def _of_steps(part: StepRange) -> tuple[str, ...]:
    """What a policy loses over some steps, as cells of a table."""
    from ..lab.calibration.summary import interval

    own, full = (part.nll.policy, part.nll.full) if part.nll else (None, None)
    return interval(part.agreement, 100), interval(part.kl), interval(own), interval(full)


def _to_task(out: Path, as_json: bool, options: dict[str, Any]) -> DepthPolicy | None:
    """The policy that keeps a task's accuracy; None if none was shown to."""
    from ..lab.calibration.summary import interval
    from ..lab.calibration.task import PROBLEMS, SEARCH_PROBLEMS, calibrate_to_task, check_count
    from ..lab.evals import load_tasks
    from ..lab.evals.run import TaskProblems
    from ..lab.evals.summary import check_comparison
    from ..lab.evals.tasks import is_own
    from .terminal import print_table

    own = is_own(options["task"])
    if own and options["split"] is not None:
        raise RequestError("--split does nothing for a file of your own", "leave it out")
    split = None if own else options["split"] or "train"
    selection = load_tasks([options["task"]], fewshot=options["fewshot"], data_dir=options["data_dir"], split=split)
    check_comparison(selection, options["margin"], options["filter_name"])
    most = PROBLEMS if options["problems"] is None else options["problems"]
    check_count(selection.tasks[0].num_problems)
    task, parts = selection.tasks[0], f"{SEARCH_PROBLEMS} for the search, up to {most} of the others for each verdict"
    read = f"{task.num_problems} problems {'from' if own else 'of'} {options['task']}"
    say(f"{read}: {parts}; the first: {beginning(task.first_prompt)}")
    healed = None if options["adapters"] is None else load_policy(options["adapters"])
    llm = load(options, max_batch_size=_TASK_BATCH_SIZE)
    seed, asked = options["seed"], {name: options[name] for name in ("max_tokens", "filter_name")}
    problem_set = TaskProblems(llm, selection, chat=options["chat"], seed=seed, **asked)
    given = {"problems": most, "seed": seed, "name": options["name"]}
    with stages() as progress:
        result = calibrate_to_task(llm, problem_set, options["margin"], healed=healed, progress=progress, **given)
    if as_json:
        click.echo(json.dumps(result.plain(), indent=1))
    else:
        click.echo(f"{options['task']}, loss of accuracy within {100 * options['margin']:g} points")
        rows = []
        problem_s = problem_set.record_s and 2 * problem_set.record_s
        for trial in result.trials:
            compared, layers = trial.comparison, " ".join(map(str, trial.policy.skip_order))
            shares = (interval(s, 100, digits=1) for s in (compared.full, compared.tapered, compared.difference))
            verdict = conclusion(compared, problem_s)
            rows.append((layers, f"{trial.speedup:.2f}x", str(compared.problems), *shares, verdict))
        titles = ("layers", "speed", "problems", "full depth, %", "solved, %", "difference, points", "verdict")
        print_table(titles, rows)
    if result.policy is None:
        say(f"taper: no policy was shown to hold; {out} was not written")
    return result.policy
