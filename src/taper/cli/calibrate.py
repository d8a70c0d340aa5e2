"""`taper calibrate`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, TaperError
from .common import load, model_options, say

if TYPE_CHECKING:
    from ..calibration.calibrate import Calibration

_NOT_MET = 1
_SLOTS = {"cpu": 64, "cuda": 16}  # prompts whose keys and values stay; a GPU takes memory for all at once


@click.command()
@model_options
@click.option(
    "--prompts", type=Path, metavar="FILE", help='JSON lines ("prompt" or "messages") or text. Default: ours.'
)
@click.option("--max-kl", type=float, help="Budget: mean KL(full || policy) in nats over tapered steps.")
@click.option("--min-agreement", type=float, help="Budget: share of tapered steps with full depth's likeliest token.")
@click.option(
    "--max-nll-increase", type=float, metavar="PERCENT", help="Budget: rise of the NLL of full depth's answers."
)
@click.option("--speedup", type=float, metavar="X", help="Instead of a budget: the best quality at this speed.")
@click.option(
    "--answer-tokens", type=click.IntRange(2, 100_000), help="Length to plan for. Default: the median answer."
)
@click.option("--baselines", is_flag=True, help="Also measure other methods' layers on the same data. Takes long.")
@click.option("--out", type=Path, default=Path("policy.json"), show_default=True, help="Where the policy goes.")
@click.option("--report", type=Path, metavar="FOLDER", help="Write a page and pictures.")
@click.option("--name", default="", help="What to call the policy.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the split into search and proof."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as one JSON object.")
def calibrate(
    prompts: Path | None,
    max_kl: float | None,
    min_agreement: float | None,
    max_nll_increase: float | None,
    speedup: float | None,
    out: Path,
    report: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find which layers a model can spare, under a budget, and prove it on prompts the search never saw.

    At least one of the four budgets is needed. What is measured is kept: an interrupted calibration goes on
    where it was, and another budget on the same prompts is quick. Exit code 1: no policy meets the budget.
    """
    from ..calibration.calibrate import calibrate as run
    from ..calibration.fit import Budget
    from ..calibration.references import builtin_prompts, read_prompts
    from ..calibration.store import write_whole
    from ..llm import choose_device

    budget = Budget(max_kl, min_agreement, max_nll_increase, speedup)
    given = builtin_prompts() if prompts is None else read_prompts(prompts)
    _check_writable(out.parent)
    if out.is_dir():
        raise RequestError(f"--out {out} is a folder", "name a file")
    if report is not None:
        _check_report(report)
    llm = load(options, max_batch_size=min(len(given), _SLOTS[choose_device(options["device"])]))
    names = ("answer_tokens", "seed", "baselines", "name")
    with _progress() as progress:
        found = run(llm, given, budget, progress=progress, **{name: options[name] for name in names})
    if found.met:
        write_whole(out, found.policy.to_json().encode())
    if report is not None:
        from ..calibration.report import write_report

        write_report(report, found.summary)
    click.echo(json.dumps(found.summary) if as_json else summary(found))
    if report is not None:
        say(f"report: {report / 'index.html'}")
    if found.met:
        say(f'policy: {out}; try: taper generate --policy {out} "..."')
    else:
        say(f"taper: no policy that was found keeps the budget on held-out prompts; nothing written to {out}")
        sys.exit(_NOT_MET)


def summary(found: Calibration) -> str:
    """The result in a few lines."""
    data, layers = found.summary, found.summary["model"]["num_hidden_layers"]
    speed = data["speedup"]
    low, high = speed["measured"][1:]
    lines = [
        f"{'policy' if found.met else 'nearest policy'} {data['policy']}: "
        f"mean depth {data['mean_depth']:.1f} of {layers} over {data['answer_tokens']} tokens",
        f"speed  {speed['measured'][0]:.2f}x measured ({low:.2f} to {high:.2f}), {speed['predicted']:.2f}x predicted",
        "",
        f"{data['prompts']['held_out']} held-out prompts, 95 % intervals   tapered steps               all steps",
    ]
    rows = [("kl", "KL to full depth, nats", 1.0), ("agreement", "same likeliest token, %", 100.0)]
    rows += [("nll_increase", "NLL of its answers, + %", 1.0)]
    for key, title, factor in rows:
        cells = [_interval(data["held_out"].get(part, {}).get(key), factor) for part in ("tapered steps", "all steps")]
        lines.append(f"  {title:<32} {cells[0]:<27} {cells[1]}")
    lines += ["", f"{'its own answers':<34} {'policy':<27} full depth"]
    free = data["free_running"]
    rows = [
        ("nll", "NLL at full depth, nats", 1.0),
        ("length", "tokens", 1.0),
        ("repetition", "repeated 4-grams, %", 100.0),
    ]
    for key, title, factor in rows:
        lines.append(
            f"  {title:<32} {_interval(free[key]['policy'], factor):<27} {_interval(free[key]['full'], factor)}"
        )
    tapered = data["held_out"].get("tapered steps")
    if tapered and tapered["agreement"][0] < 0.9:
        changed = 1 / (1 - tapered["agreement"][0])
        lines += ["", f"This policy hurts: of the tapered steps, one in {changed:.1f} has another likeliest token."]
    return "\n".join(lines)


def _interval(estimate: list[float] | None, factor: float) -> str:
    if estimate is None:
        return "-"
    value, low, high = (f"{x * factor:.4g}" for x in estimate)
    return f"{value} ({low} to {high})"


@contextmanager
def _progress() -> Generator[Callable[[str, float], None], None, None]:
    """A bar a stage, with the time it took and the time left; without a terminal, a line a stage."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from ..terminal import console

    screen = console()
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:

        def advance(stage: str, part: float) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, completed=1)
                tasks[stage] = bars.add_task(stage, total=1)
                if not screen.is_terminal:
                    say(stage)
            bars.advance(tasks[stage], part)

        yield advance


def _check_report(folder: Path) -> None:
    """Refuse before the work what could not be written after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TaperError("--report draws with matplotlib", 'pip install "taper-llm[report]"') from None
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--report {folder} is not a folder")
    _check_writable(folder)


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, leaving nothing there."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RequestError(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
