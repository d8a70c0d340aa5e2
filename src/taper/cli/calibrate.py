"""`taper calibrate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, TaperError
from ..models.files import check_writable, write_whole
from .common import load, model_options, say, stages

if TYPE_CHECKING:
    from ..calibration.run import Calibration
    from ..evals.trials import TaskCalibration

_NOT_MET = 1
_LIMITS = ("max_kl", "min_agreement", "max_nll_increase", "speedup")


@click.command()
@model_options
@click.option(
    "--prompts",
    type=Path,
    metavar="FILE",
    help='JSON lines with "prompt" or "messages", or text, one prompt a line. Default: 72 built-in prompts.',
)
@click.option("--max-kl", type=float, help="Budget: mean KL(full || policy) over tapered steps, in nats.")
@click.option(
    "--min-agreement", type=float, help="Budget: share of tapered steps whose likeliest token is that of full depth."
)
@click.option(
    "--max-nll-increase",
    type=float,
    metavar="PERCENT",
    help="Budget: how much the NLL of full depth's own answers may rise.",
)
@click.option("--speedup", type=float, metavar="X", help="Instead of a budget: the best quality at this speed.")
@click.option(
    "--answer-tokens",
    type=click.IntRange(2),
    help="Length of answer to plan for. Default: the median of the model's own, up to 128.",
)
@click.option(
    "--baselines", is_flag=True, help="Also measure other methods' choices of layers on the same data. Takes long."
)
@click.option("--task", metavar="NAME|FILE", help="Instead of a budget: hold the accuracy on a task (see --margin).")
@click.option("--margin", type=float, metavar="X", help="With --task: loss of accuracy that you accept, such as 0.03.")
@click.option("--problems", type=int, metavar="N", help="With --task: most problems for each comparison. Default: 192.")
@click.option("--split", metavar="NAME", help="With --task: part of the data to calibrate on. Default: train.")
@click.option("--data-dir", type=Path, metavar="FOLDER", help="With --task: local data of GSM8K and BBH.")
@click.option("--fewshot", type=int, metavar="N", help="With --task: examples before each problem.")
@click.option("--chat/--no-chat", default=None, help="With --task: ask by the model's chat template.")
@click.option("--max-tokens", type=int, metavar="N", help="With --task: most tokens of an output.")
@click.option("--filter", "filter_name", metavar="NAME", help="With --task: whose figure counts.")
@click.option("--out", type=Path, default=Path("policy.json"), help="Where to write the policy.")
@click.option("--report", type=Path, metavar="FOLDER", help="Write a page with pictures into this folder.")
@click.option("--name", default="", show_default=False, help="What to call the policy.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed for splitting the prompts in two.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as one JSON object.")
def calibrate(prompts: Path | None, out: Path, report: Path | None, as_json: bool, **options: Any) -> None:
    """Find the layers that a model can spare under a budget, and validate the result on held-out prompts.

    Give at least one of the three budgets, or a speed. What is measured is kept: an interrupted calibration continues
    where it was, and another budget on the same prompts is quick. If no policy meets the budget, taper says so, writes
    no policy and exits with code 1.

    With --task, the budget is the accuracy on a task of lm-evaluation-harness, or on your own problems: JSON lines with
    "prompt" and "answer". This is the measure that counts, and it takes longest.
    """
    check_task_options(options, prompts, report)
    if options["task"] is not None:
        calibrate_to_task(out, as_json, options)
        return
    from ..calibration.prompts import builtin_prompts, read_prompts
    from ..calibration.run import batch_size
    from ..calibration.run import calibrate as run
    from ..calibration.summary import Budget

    Budget(**{name: options[name] for name in _LIMITS})  # a mistake is told before the model loads
    given = builtin_prompts() if prompts is None else read_prompts(prompts)
    check_writable(out.parent)
    if out.exists() and not out.is_file():  # it would be replaced, a device too
        raise RequestError(f"--out {out} is a folder or a device", "name a file")
    if report is not None:
        _check_report(report)
    llm = load(options, max_batch_size=batch_size(len(given), options["device"]))
    names = (*_LIMITS, "answer_tokens", "seed", "baselines", "name")
    with stages() as progress:
        result = run(llm, given, progress=progress, **{name: options[name] for name in names})
    if result.met:
        write_whole(out, result.policy.to_json().encode())
    click.echo(json.dumps(result.summary.to_json()) if as_json else _as_text(result))
    if report is not None:
        from ..calibration.report import write_report

        write_report(report, result.summary)
        say(f"report: {report / 'index.html'}")
    if result.met:
        say(f'policy: {out}; try: taper generate --policy {out} "..."')
    else:
        say(f"taper: no policy that was found keeps the budget on held-out prompts; {out} was not written")
        sys.exit(_NOT_MET)


def _as_text(result: Calibration) -> str:
    """The result in a few lines."""
    from ..calibration.summary import interval, limits, remarks, verdict

    summary, held_out, own = result.summary, result.summary.held_out, result.summary.free_running
    measured, tapered = summary.speedup.measured, held_out.tapered_steps
    lines = [
        f"{'policy' if result.met else 'nearest policy'} {summary.policy}: mean depth {summary.mean_depth:.1f} of "
        f"{summary.model.num_hidden_layers} over {summary.answer_tokens} tokens",
        f"budget {', '.join(asked for asked, _ in limits(summary))}: {verdict(summary)}",
        f"speed  {measured.median:.2f}x measured ({measured.slowest:.2f} to {measured.fastest:.2f}), "
        f"{summary.speedup.predicted:.2f}x predicted",
        "",
        f"{summary.prompts.held_out} held-out prompts, 95 % intervals   tapered steps               all steps",
    ]
    rows = [("kl", "KL to full depth, nats", 1), ("agreement", "same likeliest token, %", 100)]
    for figure, title, factor in [*rows, ("nll_increase", "NLL of its answers, + %", 1)]:
        cells = [interval(getattr(losses, figure, None), factor) for losses in (tapered, held_out.all_steps)]
        lines.append(f"  {title:<32} {cells[0]:<27} {cells[1]}")
    lines += ["", f"{'its own answers':<34} {'policy':<27} full depth"]
    pairs = [("NLL at full depth, nats", own.nll, 1), ("tokens", own.length, 1)]
    pairs.append(("repeated 4-grams, %", own.repetition, 100))
    if summary.problems is not None:
        pairs.append(("word problems solved, %", summary.problems, 100))
    for title, pair, factor in pairs:
        lines.append(f"  {title:<32} {interval(pair.policy, factor):<27} {interval(pair.full, factor)}")
    if summary.problems is None:
        lines.append(
            f"  {'word problems solved, %':<32} none: full depth solves too few of them, or the context is too short"
        )
    notes = remarks(summary)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _check_report(folder: Path) -> None:
    """Reject before the work a report that could not be written after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TaperError("--report needs matplotlib", 'pip install "taper-llm[report]"') from None
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--report {folder} is not a folder")
    check_writable(folder)


_NOT_MET = 1
_TASK = ("margin", "problems", "split", "data_dir", "fewshot", "chat", "max_tokens", "filter_name")
_OTHER = ("max_kl", "min_agreement", "max_nll_increase", "speedup", "answer_tokens", "baselines")
_BATCH_SIZE = 32


def check_task_options(options: Mapping[str, Any], prompts: Path | None, report: Path | None) -> None:
    """Reject options that would do nothing.

    Raises:
        RequestError: one that goes only with a task, without a task; or the other way round.
    """
    if options["task"] is None:
        given = [name for name in _TASK if options[name] is not None]
        if given:
            raise RequestError(f"{_flag(given[0])} does nothing without --task", "leave it out, or give a task")
        return
    given = [name for name in _OTHER if options[name]] + ["prompts"] * bool(prompts) + ["report"] * bool(report)
    if given:
        raise RequestError(f"{_flag(given[0])} does nothing with --task", "leave it out")
    if options["margin"] is None:
        raise RequestError("--task needs --margin, the loss of accuracy that you accept", "such as --margin 0.03")


def calibrate_to_task(out: Path, as_json: bool, options: dict[str, Any]) -> None:
    """Calibrate, write the policy if one holds, and print what was tried."""
    from ..evals import load_tasks
    from ..evals.calibrate import PROBLEMS
    from ..evals.calibrate import calibrate_to_task as run
    from ..evals.summary import check_comparison

    check_writable(out.parent)
    if out.exists() and not out.is_file():  # it would be replaced, a device too
        raise RequestError(f"--out {out} is a folder or a device", "name a file")
    own = options["task"].endswith(".jsonl")
    if own and options["split"] is not None:
        raise RequestError("--split does nothing for a file of your own", "leave it out")
    split = None if own else options["split"] or "train"
    selection = load_tasks([options["task"]], fewshot=options["fewshot"], data_dir=options["data_dir"], split=split)
    check_comparison(selection, options["margin"], options["filter_name"])
    llm = load(options, max_batch_size=_BATCH_SIZE)
    with stages() as progress:
        result = run(
            llm,
            selection,
            options["margin"],
            problems=options["problems"] or PROBLEMS,
            chat=bool(options["chat"]),
            progress=progress,
            **{name: options[name] for name in ("max_tokens", "filter_name", "seed", "name")},
        )
    if result.policy is not None:
        write_whole(out, result.policy.to_json().encode())
    click.echo(json.dumps(result.plain(), indent=1) if as_json else _task_text(result, options))
    if result.policy is None:
        say(f"taper: no policy was shown to hold; {out} was not written")
        sys.exit(_NOT_MET)
    say(f'policy: {out}; try: taper generate --policy {out} "..."')


def _task_text(result: TaskCalibration, options: Mapping[str, Any]) -> str:
    """A line for each policy that was tried, gentle to fast."""
    from ..calibration.summary import interval

    lines = [f"{options['task']}, loss of accuracy within {100 * options['margin']:g} points"]
    for trial in result.trials:
        c = trial.comparison
        lines.append(
            f"  layers {' '.join(map(str, trial.policy.skip_order)):<24} {trial.speedup:.2f}x  {c.problems} problems: "
            f"{100 * c.tapered.value:.1f} % solved, full depth {100 * c.full.value:.1f} %, "
            f"difference {interval(c.difference, 100, digits=1)}: {c.conclusion}"
        )
    return "\n".join(lines)


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_name').replace('_', '-')}"
