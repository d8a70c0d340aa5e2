"""What several commands need."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import DEVICES, DRAFTERS, DTYPES, HEADS, OFF, REPACK, REUSE, RequestError
from ..models.files import check_writable

if TYPE_CHECKING:
    from ..lab.calibration.statistics import PairedComparison
    from ..llm import LLM

INTERRUPTED = 130
NOT_HEALED = "the adapters did not help: KL on held-out prompts did not fall"
_LONG = 2  # seconds of loading
Command = Callable[..., Any]

# `model_options`
OF_MODELS = ("model", "device", "gpu_layers", "dtype", "context", "threads", "repack", "head", "offline")


class LayerCount(click.ParamType):
    """A number of layers, or all of them: None."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number."""
        try:
            return None if value == "all" else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of layers; write 12 or all", param, ctx)


MODEL = click.option("-m", "--model", metavar="MODEL", help="Name, file, folder, or ORG/MODEL:TYPE of the hub.")
THREADS = click.option("-t", "--threads", type=int, help="CPU threads. Default: the cores this process may use.")
DEVICE = click.option(
    "--device",
    default="auto",
    metavar=f"[{'|'.join(DEVICES)}|NAME]",
    help="Where the model runs; NAME is one that taper --version lists, or vulkan, metal and so on.",
)
DTYPE = click.option(
    "--dtype", type=click.Choice(DTYPES), default="auto", help="Convert or quantise weights when loading."
)
REPACK_OPTION = click.option(
    "--repack",
    type=click.Choice(REPACK),
    default=REPACK[0],
    help="Layouts of matrices on a CPU: never uses the file as it is, always repacks it, auto keeps a second layout "
    "where prompts are faster with it and memory is free.",
)
HEAD_OPTION = click.option(
    "--head",
    type=click.Choice(HEADS),
    default=HEADS[0],
    help="Logits: full computes those of the whole vocabulary, shortlist those that matter, auto the latter "
    "where it is faster.",
)
REUSE_OPTION = click.option(
    "--reuse",
    type=click.Choice(REUSE),
    default=REUSE[0],
    help="Where earlier turns skipped layers: filled takes the approximate keys and values that they left, exact "
    "computes these tokens again.",
)
GPU_LAYERS = click.option(
    "--gpu-layers",
    "-ngl",
    type=LayerCount(),
    metavar="N|all",
    help="With a device of ggml that lacks memory: how many layers, the last ones, it runs. Default: all.",
)
OFFLINE = click.option("--offline", is_flag=True, help="Do not fetch a model that is not on this machine.")


def with_options(options: Sequence[Command], command: Command) -> Command:
    """A command with these options; help lists them in this order, before the command's own."""
    for option in reversed(options):
        command = option(command)
    return command


class Share(click.ParamType):
    """A part of a whole, written as 0.95 or as 95%; all of it only if that is not `below_one`."""

    name = "share"

    def __init__(self, below_one: bool = False) -> None:
        self._below_one = below_one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share as a number; what is too large without a percent sign is refused, with what was meant."""
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{text!r} is no share; write 0.95 or 95%", param, ctx)
        if not text.endswith("%") and (1 < share <= 100 or (share == 1 and self._below_one)):
            rule = "not below 1" if share == 1 else "above 1"
            self.fail(f"{text} is {rule}; for {share:g} % write {share / 100:g} or {share:g}%", param, ctx)
        return share


class Percent(click.ParamType):
    """A number of per cent, written as 5 or as 5%."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            return float(str(value).strip().removesuffix("%"))
        except ValueError:
            self.fail(f"{value!r} is not a number of per cent; write 5 or 5%", param, ctx)


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings.

    `groups` has the names of the parameters under each heading, which the command need not have; others come last.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        described = {option.name: option.get_help_record(ctx) for option in options}
        rest = [name for name in described if not any(name in names for names in self._groups.values())]
        for heading, names in {**self._groups, "Other": rest}.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names if (record := described.get(name))])


def model_options(command: Command) -> Command:
    """Options for which model runs, and how."""
    context = click.option(
        *("-c", "--context", "--ctx-size"),
        "context",
        type=int,
        help="Tokens of prompt and output. Default: 4096 or the model's limit.",
    )
    how = (DEVICE, GPU_LAYERS, DTYPE, REPACK_OPTION, HEAD_OPTION, OFFLINE)
    return with_options([MODEL, THREADS, context, *how], command)


# The options that limit drafts, and what `LLM.resolve_drafting` calls them.
DRAFT_LIMITS = {"draft_max": "max_tokens", "draft_min_match": "min_match", "draft_p_min": "min_probability"}


def draft_options(command: Command) -> Command:
    """Options for how tokens are proposed, which changes no output."""
    kinds = click.Choice((*DRAFTERS, OFF))
    options = [
        click.option("--draft", type=kinds, help="Propose tokens. Default: auto in mode exact, else off."),
        click.option("--draft-max", type=int, help="Most proposed tokens at a time. Default: 16."),
        click.option("--draft-min-match", type=int, help="ngram: least tokens that occurred before. Default: 4."),
        click.option("--draft-p-min", type=float, help="mtp, policy: stop below this probability. Default: 0.5."),
        click.option("--exact-bits", is_flag=True, help="Verify only as many tokens as round like single ones."),
    ]
    return with_options(options, command)


def limits_of_drafts(options: dict[str, Any]) -> dict[str, Any]:
    """The limits of drafts among the options, which it takes out."""
    given = {theirs: options.pop(ours) for ours, theirs in DRAFT_LIMITS.items()}
    return {name: value for name, value in given.items() if value is not None}


def load(options: dict[str, Any], **more: Any) -> LLM:
    """Load the model that the options name; if that takes long, a terminal shows how far it is."""
    from ..llm import LLM
    from ..models.download import DEFAULT_MODEL
    from .terminal import console

    model = DEFAULT_MODEL if options["model"] is None else options["model"]
    given = {name: options[name] for name in OF_MODELS if name != "model"}
    started = time.monotonic()
    with console().status(f"loading {model}") as status:
        highest = 0.0

        def progress(part: float) -> None:
            nonlocal highest
            what, highest = "loading" if part >= highest else "preparing", max(part, highest)
            if time.monotonic() - started > _LONG:
                status.update(f"{what} {model}, {part:.0%}")

        return LLM(model, **given, progress=progress, **more)


def num_used(prompts: Sequence[Any], most: int) -> int:
    """How many of the prompts are used: different ones, and so many at most."""
    return min(most, len({json.dumps(prompt) for prompt in prompts}))


def say_what_was_read(prompts: Sequence[Any], file: Path | None, used: int, rest: str, held_out: int) -> None:
    """Say how many prompts were read, from where, how they are split, and how the first one begins.

    Args:
        prompts: texts or messages.
        file: they come from; None: they are built in.
        used: how many of them.
        rest: what those that are not held out are for, with their number.
        held_out: how many are.
    """
    first = prompts[0] if isinstance(prompts[0], str) else prompts[0][-1].get("content", "")
    origin = "that are built in" if file is None else f"from {file}"
    some = "" if used == len(prompts) else f", {used} of them used"
    say(f"{len(prompts)} prompts {origin}{some}: {rest}, {held_out} held out; the first: {beginning(str(first))}")


def beginning(text: str) -> str:
    """How a text begins, on one line."""
    return textwrap.shorten(text, 60, placeholder=" ...")


def conclusion(compared: PairedComparison, problem_s: float | None) -> str:
    """The verdict on two accuracies in words; with more problems needed, how long they take at so many seconds each."""
    if not compared.needed or problem_s is None:
        return compared.conclusion
    return f"{compared.conclusion}, {duration(compared.needed * problem_s)} here"


def duration(seconds: float) -> str:
    """A time in the unit that suits it, such as "about 3 h"."""
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next(((unit, size) for unit, size in units if seconds >= 2 * size), units[-1])
    return f"about {max(1, round(seconds / size))} {unit}"


def say(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def say_why_full(llm: LLM) -> None:
    """Where nobody chose a policy and every layer runs, say why, and what is a word away."""
    if llm.default_policy is not None:
        return
    if names := "|".join(name for name in llm.shipped_policies() if not name.endswith("-plain")):
        say(f"taper: every layer runs, as no policy here holds in long outputs; to skip some: --policy {names}")
    else:
        say("taper: every layer runs, as no policy comes with this model; taper calibrate makes one")


def check_file(option: str, path: Path) -> None:
    """Before the work, raise RequestError for a file that could not be written: a folder, a device, no permission."""
    if path.exists() and not path.is_file():  # it would be replaced, a device too
        raise RequestError(f"{option} {path} is a folder or a device", "name a file")
    check_writable(path.parent)


def check_matplotlib(option: str) -> None:
    """Before the work, raise RequestError for an option that draws if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise RequestError(f"{option} needs matplotlib", 'pip install "taper-llm[report]"')


def check_report(option: str, folder: Path) -> None:
    """Before the work, raise RequestError for a folder that cannot be written to, or if matplotlib is not installed."""
    check_matplotlib(option)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{option} {folder} is not a folder", "name a folder")
    check_writable(folder)


@contextmanager
def stages() -> Generator[Callable[[str, float], None], None, None]:
    """A bar for each stage, with the time it took and the time left; without a terminal, a line for each stage."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from .terminal import TimeLeft, console

    screen = console()
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
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
