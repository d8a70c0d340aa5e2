"""`taper eval`."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MODES, RequestError, one_of
from .common import load, model_options, say

if TYPE_CHECKING:
    from ..evals.records import Record
    from ..llm import LLM

_EVERY = 30  # seconds between lines of progress where there is no terminal


@click.command(name="eval")
@model_options
@click.option("--tasks", required=True, metavar="NAMES", help="Tasks of lm-evaluation-harness, or groups of them.")
@click.option("--modes", default="full,taper", metavar="MODES", help="full, taper or both.")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="Name or file, for taper. May be repeated.")
@click.option("--limit", type=int, metavar="N", help="Only the first N problems of each task.")
@click.option("--split", metavar="NAME", help="Part of the data, such as train. Default: the one for testing.")
@click.option("--fewshot", type=int, metavar="N", help="Examples before each problem. Default: the task's own number.")
@click.option("--chat/--no-chat", default=False, help="Ask by the model's chat template.")
@click.option("--max-tokens", type=int, metavar="N", help="Most tokens of an output. Default: the task's own limit.")
@click.option("--data-dir", type=Path, metavar="FOLDER", help="Data of GSM8K and BBH. Default: the Hugging Face hub.")
@click.option("--margin", type=float, default=0.01, help="Loss of accuracy that you accept, between 0 and 1.")
@click.option("--filter", "filter_name", metavar="NAME", help="Whose figure counts. Default: the most lenient filter.")
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
    """Compare a model at full depth and tapered, on the same problems of a task.

    Runs tasks of lm-evaluation-harness in which the model writes its answer, such as gsm8k and bbh_cot_fewshot. Each
    problem is recorded as soon as it is answered: an interrupted evaluation continues where it was.
    """
    from ..evals import evaluate as run
    from ..evals import load_tasks, summarise
    from ..evals.records import check_out
    from ..evals.summary import as_text, check_comparison, chosen_filter

    names, wanted = _listed("tasks", tasks), [one_of("a mode", mode, MODES) for mode in _listed("modes", modes)]
    if policies and "taper" not in wanted:
        raise RequestError("--policy does nothing without mode taper", "leave it out, or give --modes full,taper")
    out = out or Path(_file_name(options["model"], names))
    check_out(out)
    selection = load_tasks(names, **{name: options[name] for name in ("fewshot", "data_dir", "split")})
    check_comparison(selection, margin, filter_name)
    llm = load(options, max_batch_size=batch_size)
    filters = {task.name: chosen_filter(task, filter_name) for task in selection.tasks}
    given = {name: options[name] for name in ("limit", "chat", "max_tokens", "seed")}
    try:
        with _progress(filters) as progress:
            result = run(llm, selection, _policies(llm, wanted, policies), out=out, progress=progress, **given)
    except KeyboardInterrupt:
        say(f"taper: interrupted; the same command continues from {out}")
        raise
    summary = summarise(result, margin, filter_name)
    click.echo(json.dumps(summary.to_json()) if as_json else as_text(summary))
    say(f"records: {out}")


def _policies(llm: LLM, modes: Sequence[str], policies: Sequence[str]) -> list[Any]:
    """The policies of each mode, in the order of the modes."""
    tapered: list[Any] = list(policies) or [llm.resolve_policy(mode="taper")] if "taper" in modes else []
    by_mode = {"full": ["full"], "taper": tapered}
    return [policy for mode in dict.fromkeys(modes) for policy in by_mode[mode]]


def _listed(option: str, names: str) -> list[str]:
    """The names of a list with commas."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise RequestError(f"--{option} is empty", "give one name, or several with commas between them")
    return list(dict.fromkeys(listed))


def _file_name(model: str | None, tasks: Sequence[str]) -> str:
    """Where records go by default: evaluations of other models or tasks have other files."""
    from ..models.download import DEFAULT_MODEL

    name = f"{Path(model or DEFAULT_MODEL).name.removesuffix('.gguf')}-{'-'.join(tasks)}"
    return f"eval-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', name)[:100]}.jsonl"


@contextmanager
def _progress(filters: dict[str, str]) -> Generator[Callable[[Record, int, bool], None], None, None]:
    """A bar with the time left and the running accuracy; without a terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from ..evals.summary import solved
    from .terminal import console

    screen = console()
    right: Counter[tuple[str, str]] = Counter()
    answered: Counter[tuple[str, str]] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = last_line = time.monotonic()
    bar: TaskID | None = None
    were_there = 0
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:

        def advance(record: Record, total: int, was_there: bool) -> None:
            nonlocal bar, were_there, last_line
            is_right = solved(record, filters[record.task])
            right[record.task, record.policy] += bool(is_right)
            answered[record.task, record.policy] += is_right is not None
            if was_there:
                were_there += 1
                return
            done = answered.total()
            shares = [
                f"{policy} {right[task, policy] / count:.1%}"
                for (task, policy), count in answered.items()
                if task == record.task and count
            ]
            text = f"{record.task}: {', '.join(shares)}"
            if bar is None:  # speed is that of new problems
                bar = bars.add_task(text, total=total, completed=were_there)
            bars.update(bar, description=text, advance=1)
            if not screen.is_terminal and time.monotonic() - last_line > _EVERY:
                last_line = time.monotonic()
                left = (last_line - started) / max(1, done - were_there) * (total - done)
                say(f"{done} of {total}, {left / 60:.0f} min left; {text}")

        yield advance
