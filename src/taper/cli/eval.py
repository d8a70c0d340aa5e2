"""`taper eval`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, one_of
from ..models import model_name
from .common import OF_MODELS, GroupedCommand, Share, beginning, check_file, conclusion, load, model_options, say

if TYPE_CHECKING:
    from ..lab.evals.records import Record
    from ..lab.evals.run import OnRecord
    from ..lab.evals.summary import EvalSummary, TaskSummary

_EVERY = 30  # seconds between lines of progress where there is no terminal
_OFTEN_CUT_OFF = 0.05  # share of outputs at the limit of tokens from which readers are warned
_MOSTLY_EMPTY = 0.5  # share of outputs without text from which no verdict means anything


MODES = ("full", "taper")  # mode exact gives the outputs of full


_GROUPS = {
    "Problems": ("tasks", "limit", "split", "fewshot", "data_dir", "seed"),
    "What is compared": ("policies", "modes", "margin", "filter_name"),
    "Outputs": ("chat", "max_tokens", "batch_size"),
    "Results": ("out", "as_json"),
    "Model": OF_MODELS,
}


@click.command(name="eval", cls=GroupedCommand, groups=_GROUPS)
@model_options
@click.option(
    "--tasks",
    required=True,
    metavar="NAMES",
    help="Files of your own, .jsonl or .csv with prompt and answer, or tasks of lm-evaluation-harness, with commas "
    "between them.",
)
@click.option("--modes", default="full,taper", metavar="MODES", help="full, taper or both.")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="Name or file, for taper. May be repeated.")
@click.option("--limit", type=int, metavar="N", help="Only the first N problems of each task.")
@click.option("--split", metavar="NAME", help="Part of the data, such as train. Default: the one for testing.")
@click.option("--fewshot", type=int, metavar="N", help="Examples before each problem. Default: the task's own number.")
@click.option(
    "--chat/--no-chat", default=None, help="Ask by the model's chat template; the default if all problems are your own."
)
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens of an output. Default: the task's own limit.")
@click.option("--data-dir", type=Path, metavar="FOLDER", help="Data of GSM8K and BBH. Default: the Hugging Face hub.")
@click.option(
    "--margin", type=Share(below_one=True), default=0.01, help="Loss of accuracy that you accept: 0.03 or 3%."
)
@click.option("--filter", "filter_name", metavar="NAME", help="Filter to compare by. Default: the most lenient one.")
@click.option("--batch-size", type=click.IntRange(1), default=16, help="Outputs generated at a time.")
@click.option("--seed", type=click.IntRange(0), default=0, help="For tasks that sample.")
@click.option("--out", type=Path, metavar="FILE", help="Records, as JSON lines. Default: eval-MODEL-TASKS.jsonl.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def evaluate(
    tasks: str,
    modes: str,
    policies: tuple[str, ...],
    margin: float,
    filter_name: str | None,
    batch_size: int,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare full depth and policies on problems with answers.

    \b
    On problems of your own:
      taper eval --tasks problems.jsonl --policy fast --margin 3%

    Or on tasks of lm-evaluation-harness in which the model writes its answer, such as gsm8k and bbh_cot_fewshot. Each
    problem is recorded as soon as it is answered: the same command continues an interrupted evaluation.
    """
    from ..lab.evals import evaluate as run
    from ..lab.evals import load_tasks, summarise
    from ..lab.evals.summary import check_comparison
    from ..lab.evals.tasks import is_own
    from ..models.download import DEFAULT_MODEL

    names, wanted = listed("tasks", tasks), [one_of("a mode", mode, MODES) for mode in listed("modes", modes)]
    if policies and "taper" not in wanted:
        raise RequestError("--policy does nothing without mode taper", "leave it out, or give --modes full,taper")
    model = model_name(options["model"] or DEFAULT_MODEL)
    parts = [model, *(Path(name).stem if is_own(name) else name for name in names)]
    out = out or Path(f"eval-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', '-'.join(parts))[:100]}.jsonl")
    check_file("--out", out)
    say(f"loading {', '.join(names)}")
    selection = load_tasks(names, **{name: options[name] for name in ("fewshot", "data_dir", "split")})
    filters = check_comparison(selection, margin, filter_name)
    count = sum(min(task.num_problems, options["limit"] or task.num_problems) for task in selection.tasks)
    first = beginning(selection.tasks[0].first_prompt)
    how = {"full": "at full depth", "taper": f"under {' and '.join(policies)}" if policies else "tapered"}
    runs = " and ".join(how[mode] for mode in wanted)
    say(f"{count} problems of {', '.join(names)}, each {runs}; the first: {first}")
    llm = load(options, max_batch_size=batch_size)
    given = {name: options[name] for name in ("limit", "chat", "max_tokens", "seed")}
    asked: list[Any] = []
    for mode in wanted:
        asked += ["full"] if mode == "full" else policies or [llm.resolve_policy(mode="taper")]
    try:
        with _progress(filters) as progress:
            result = run(llm, selection, asked, out=out, progress=progress, **given)
    except KeyboardInterrupt:
        say(f"taper: interrupted; the same command continues from {out}")
        raise
    summary = summarise(result, margin, filter_name)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        _print(summary, bool(llm.tokenizer.chat_template))
    say(f"records: {out}")


def listed(option: str, names: str) -> list[str]:
    """The names in an option that takes several, with commas between them."""
    unique = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if not unique:
        raise RequestError(f"--{option} is empty", "give one name, or several with commas between them")
    return list(unique)


@contextmanager
def _progress(filters: dict[str, str]) -> Generator[OnRecord, None, None]:
    """A bar with the time left and the accuracy so far; without a terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..lab.evals.summary import solved
    from .terminal import console

    screen = console()
    right: dict[str, dict[str, list[bool]]] = {task: {} for task in filters}  # by task and policy
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = last_line = time.monotonic()
    num_stored = 0
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:

        def advance(record: Record, total: int, was_there: bool) -> None:
            nonlocal last_line, num_stored
            if (is_right := solved(record, filters[record.task])) is not None:
                right[record.task].setdefault(record.policy, []).append(is_right)
            if was_there:
                num_stored += 1
                return
            accuracies = (f"{policy} {sum(own) / len(own):.1%}" for policy, own in right[record.task].items())
            text = f"{record.task}: {', '.join(accuracies)}"
            if not bars.tasks:  # added late, so that its speed is that of new records
                bars.add_task(text, total=total, completed=num_stored)
            (bar,) = bars.tasks
            bars.update(bar.id, description=text, advance=1)
            if not screen.is_terminal and time.monotonic() - last_line > _EVERY:
                last_line = time.monotonic()
                left = (last_line - started) / (bar.completed - num_stored) * (total - bar.completed)
                say(f"{bar.completed:.0f} of {total}, {left / 60:.0f} min left; {text}")

        yield advance


def _print(summary: EvalSummary, has_template: bool) -> None:
    """A table for each task and group, and what a reader should know before and after it."""
    from ..lab.calibration.summary import interval
    from .terminal import print_table

    if warnings := list(_warnings(summary, has_template)):
        click.echo("\n".join(warnings) + "\n")
    loss = f"loss within {100 * summary.margin:g} {'point' if summary.margin == 0.01 else 'points'}"
    for result in summary.results:
        titles = ["", "solved, %", "mean depth", "tokens"]
        if any(score.against_full for score in result.scores):
            titles += ["difference, points", "McNemar p", loss]
        rows = []
        for score in result.scores:
            name = "full" if score.mode == "full" else f"taper {score.policy}"
            row = [name, interval(score.accuracy, 100, digits=1), f"{score.mean_depth:.1f}", f"{score.tokens:.0f}"]
            if compared := score.against_full:
                difference = interval(compared.difference, 100, digits=1)
                row += [difference, f"{compared.p_value:.2g}", conclusion(compared, summary.problem_s)]
            rows.append(row)
        click.echo(_title(result, summary))
        print_table(titles, rows)
        click.echo()
    click.echo("\n".join(_remarks(summary)))


def _warnings(summary: EvalSummary, has_template: bool) -> Iterator[str]:
    """Why accuracies say nothing."""
    for result in summary.results:
        if len(result.tasks) == 1 and any(score.empty > _MOSTLY_EMPTY for score in result.scores):
            shares = ", ".join(f"{score.empty:.0%} ({score.policy})" for score in result.scores)
            chat = "; ask by the chat template: --chat" if has_template and not summary.settings["chat"] else ""
            yield f"{result.name}: most outputs are empty, so its figures say nothing: {shares}{chat}."


def _title(result: TaskSummary, summary: EvalSummary) -> str:
    from ..lab.evals.tasks import OWN

    settings, is_chat = summary.settings["tasks"][result.tasks[0]], summary.settings["chat"]
    facts = [] if len(result.tasks) == 1 else [f"{len(result.tasks)} tasks together"]
    facts.append("1 problem" if result.problems == 1 else f"{result.problems} problems")
    if settings["version"] == OWN:
        return f"{result.name}: {', '.join(facts)}, asked {'by the chat template' if is_chat else 'in plain text'}"
    facts.append(f"{settings['fewshot']}-shot{' chat' if is_chat else ''}")
    if len(result.tasks) == 1:
        facts.append(f"version {settings['version']}")
    facts.append(result.metric or "no metric that is right or wrong; the records have its metrics")
    return f"{result.name}: {', '.join(facts)}"


def _remarks(summary: EvalSummary) -> Iterator[str]:
    yield "Intervals are 95 %; the verdict is a one-sided test at the 5 % level."
    for result in summary.results:
        if len(result.tasks) == 1 and any(score.cut_off > _OFTEN_CUT_OFF for score in result.scores):
            shares = ", ".join(f"{score.cut_off:.0%} ({score.policy})" for score in result.scores)
            yield f"{result.name}: outputs that reached the limit of tokens, which --max-tokens raises: {shares}."
    if summary.missing:
        yield f"Not run, as the data folder has no data for them: {', '.join(summary.missing)}."
    if summary.num_truncated:
        prompts = f"{summary.num_truncated} prompts did" if summary.num_truncated > 1 else "1 prompt did"
        yield f"{prompts} not fit with the output and lost the beginning; --context raises the limit."
