"""`taper calibrate --task`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from ..files import check_writable, write_whole
from .common import load, say, stages

if TYPE_CHECKING:
    from ..evals.trials import TaskCalibration

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
    click.echo(json.dumps(result.plain(), indent=1) if as_json else _as_text(result, options))
    if result.policy is None:
        say(f"taper: no policy was shown to hold; {out} was not written")
        sys.exit(_NOT_MET)
    say(f'policy: {out}; try: taper generate --policy {out} "..."')


def _as_text(result: TaskCalibration, options: Mapping[str, Any]) -> str:
    """A line for each policy that was tried, gentle to fast."""
    from ..calibration.wording import interval

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
