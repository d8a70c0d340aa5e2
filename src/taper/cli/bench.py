"""`taper bench`: its options, and its results as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, shown
from .common import (
    DEVICE,
    DTYPE,
    GPU_LAYERS,
    HEAD_OPTION,
    MODEL,
    OFFLINE,
    REPACK_OPTION,
    THREADS,
    check_file,
    check_matplotlib,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

Json = dict[str, Any]
Column = tuple[str, str, float, str]  # header, key of a row, factor, format

_FAILED = 1  # exit code after a check of the tokens or a phase that failed
_MAX_LENGTH = 1 << 20  # tokens
_ROUNDS: Column = ("rounds", "rounds", 1, "d")
_TTFT: Column = ("TTFT\ns", "ttft_s", 1, ".3f")
_TOKENS: Column = ("tokens\n/s", "tokens_per_s", 1, ".1f")
_SPEED: tuple[Column, ...] = (("TPOT\nms", "tpot_ms", 1, ".2f"), _TOKENS)
_MEMORY: tuple[Column, ...] = (("GB/s", "gb_per_s", 1, ".1f"), ("memory\n%", "bandwidth_used", 100, ".0f"))
_GAIN: tuple[Column, ...] = (
    ("speedup", "speedup", 1, ".2f"),
    ("ideal", "ideal_speedup", 1, ".2f"),
    ("realised", "realised_fraction", 1, ".2f"),
)
_DEPTH = (("layers", "depth", 1, "d"), ("step\nms", "step_ms", 1, ".2f"), *_MEMORY, *_GAIN)
_PROMPTS = (("prompt", "prompt_tokens", 1, "d"), _TTFT, _TOKENS, _ROUNDS)
_SAMPLED: Column = ("at 0.8\n/s", "sampled_tokens_per_s", 1, ".1f")  # run.TEMPERATURE, whose import would be slow
_OUTPUTS = (
    *(("policy", "policy", 1, "s"), ("mean\ndepth", "mean_depth", 1, ".1f")),
    *(*_SPEED, _SAMPLED, *_MEMORY, *_GAIN, _ROUNDS),
)
_PEERS = (("program", "name", 1, "s"), _TTFT, *_SPEED, _ROUNDS)


@click.command()
@MODEL
@click.option("--shape", metavar="SHAPE", help="Random weights: llama-2-7b, llama-2-13b, llama-3-8b or 34b.")
@click.option(
    "--policy", "policies", multiple=True, metavar="POLICY", help="Name or file; repeatable. Default: those shipped."
)
@click.option("--lengths", default="128,512,2048", metavar="N,N", help="Output lengths.")
@click.option("--prompts", default="128,512,2048", metavar="N,N", help="Prompt lengths.")
@click.option("--rounds", type=int, default=5, metavar="N", help="Runs of each, after a warm-up; medians count.")
@click.option("--minutes", type=float, default=9.0, help="Time budget; what does not fit is left out.")
@DEVICE
@GPU_LAYERS
@DTYPE
@THREADS
@REPACK_OPTION
@HEAD_OPTION
@OFFLINE
@click.option("--llama-bin", type=Path, metavar="DIR", help="Folder of llama.cpp's programs. Default: that on PATH.")
@click.option("--no-peers", is_flag=True, help="Leave out other programs: llama.cpp and transformers.")
@click.option("--json", type=Path, metavar="FILE", help="Write the results as JSON, phase by phase.")
@click.option("--plot", type=Path, metavar="FILE", help="Draw the results: a .png or .svg file.")
@click.pass_context
def bench(context: click.Context, /, lengths: str, prompts: str, plot: Path | None, **options: Any) -> None:
    """Measure how fast a model runs at full depth and under policies.

    Times to first token and per output token, tokens per second, the memory bandwidth that this uses, and how much of
    the ideal speedup is realised; beside other programs that are installed, which take turns with Taper. Leave the
    machine alone meanwhile. Quality is not measured: taper calibrate does that.
    """
    from ..lab.bench.run import run
    from ..lab.bench.target import BenchOptions
    from .terminal import console

    chosen = BenchOptions(
        lengths=_whole_numbers("lengths", lengths), prompts=_whole_numbers("prompts", prompts), **options
    )
    if chosen.json is not None:
        check_file("--json", chosen.json)
    if plot is not None:
        check_file("--plot", plot)
        if plot.suffix not in (".png", ".svg"):
            raise RequestError(f"--plot {plot} is neither a .png nor a .svg file", "name one of these")
        check_matplotlib("--plot")
    result = run(chosen, say)
    show_results(result, console(stderr=False, wide=True))
    if plot is not None and not draw(result, plot):
        say(f"{plot} was not written, as nothing that it shows was measured")
    context.exit(_FAILED if failed_checks(result) or result["failed"] else 0)


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers of tokens in ascending order, from text such as "128,512"."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 2 <= int(part) <= _MAX_LENGTH for part in numbers):
        rule = f"they must be whole numbers from 2 to {_MAX_LENGTH}"
        raise RequestError(f"{name} are {shown(text)}; {rule}", "such as 128,512,2048")
    return tuple(sorted({int(part) for part in numbers}))


def failed_checks(result: Json) -> list[str]:
    """The comparisons of tokens that failed, by what was compared and the policy."""
    outcomes = {name: phase["equal"] for name, phase in result["phases"].items() if "equal" in phase}
    return [f"{name} ({policy})" for name, equal in outcomes.items() for policy, same in equal.items() if not same]


def show_results(result: Json, screen: Console) -> None:
    """Print the conditions, every phase as a table, and what was left out or failed."""
    about, phases, failed = result["conditions"], result["phases"], failed_checks(result)
    place = about["gpu"] or about["machine"]
    screen.print(f"{about['model']}\n{place}, {about['backend']}, {about['date']}, batch {about['batch']}")
    screen.print(f"{about['kernels']}; {about['layouts']}")
    screen.print(f"output head: {about.get('head', 'the whole matrix')}")
    if failed:
        screen.print(f"\nCHECK FAILED, so the results below are of wrong outputs: {', '.join(failed)}")
    for name, phase in phases.items():
        if "equal" in phase and not failed:
            screen.print(f"\n{name}: {phase.get('left_out') or 'in all of ' + ', '.join(phase['equal'])}")
        elif name == "bandwidth":
            screen.print(f"\nmemory: {phase['gb_per_s']:.1f} GB/s ({phase['kind']})")
        elif name == "depth":
            screen.print("\none decode step by depth", _table(_DEPTH, phase["rows"]), sep="\n")
            screen.print(f"{phase['ms_per_layer']:.4g} ms per layer and {phase['fixed_ms']:.4g} ms for everything else")
        elif name == "prompts":
            screen.print("\nprompts at full depth", _table(_PROMPTS, phase["rows"]), sep="\n")
        elif "output_tokens" in phase:
            screen.print(f"\noutputs of {phase['output_tokens']} tokens", _table(_OUTPUTS, phase["rows"]), sep="\n")
        elif phase.get("rows"):
            screen.print(f"\n{name}: a prompt and an output of that length", _peers(phase["rows"]), sep="\n")
    unavailable = {peer: reason for phase in phases.values() for peer, reason in phase.get("unavailable", {}).items()}
    lines = [f"{peer} was left out: {reason}" for peer, reason in unavailable.items()]
    lines += [f"{name} failed: {reason}" for name, reason in result["failed"].items()]
    lines += [f"{name} was left out for want of time" for name in result["dropped"]]
    if lines:
        screen.print("", *lines, sep="\n")


def _peers(rows: Sequence[Json]) -> Table:
    """Programs beside each other, and Taper's speed over that of each other program."""
    others = [row["name"] for row in rows if "over" not in row]
    columns = [*_PEERS, *((f"over\n{other}", other, 1, ".2f") for other in others)]
    return _table(columns, [row | {other: row.get("over", {}).get(other) for other in others} for row in rows])


def _table(columns: Sequence[Column], rows: Iterable[Json]) -> Table:
    """Rows of results, text to the left and numbers to the right; "-" for no value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for header, _, _, form in columns:
        table.add_column(header, justify="left" if form == "s" else "right")
    for row in rows:
        table.add_row(*(_cell(row[key], factor, form) for _, key, factor, form in columns))
    return table


def _cell(value: Any, factor: float, form: str) -> str:
    if value is None:
        return "-"
    return value if form == "s" else format(value * factor, form)


def draw(result: Json, path: Path) -> bool:
    """Draw speed by output length and policy, and the time of a step by depth, as a .png or .svg file.

    What was not measured has no panel; if that is both, there is no picture, and False comes back.
    """
    from matplotlib.figure import Figure

    outputs = [phase for phase in result["phases"].values() if "output_tokens" in phase]
    step, panels = result["phases"].get("depth"), []
    if outputs:
        panels.append(partial(_draw_outputs, outputs, result["conditions"]["policies"]))
    if step:
        panels.append(partial(_draw_depths, step))
    if not panels:
        return False
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.legend()
    figure.suptitle(result["conditions"]["model"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def _draw_outputs(phases: Sequence[Json], policies: Iterable[str], axes: Axes) -> None:
    lengths = [phase["output_tokens"] for phase in phases]
    for policy in policies:
        speeds = [row["tokens_per_s"] for phase in phases for row in phase["rows"] if row["policy"] == policy]
        axes.plot(lengths, speeds, marker="o", label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, list(map(str, lengths)))
    axes.set(xlabel="output, tokens", ylabel="tokens per second", ylim=(0, None), title="Speed")


def _draw_depths(step: Json, axes: Axes) -> None:
    layers, full = [row["depth"] for row in step["rows"]], step["rows"][0]["step_ms"]
    axes.plot(layers, [row["step_ms"] for row in step["rows"]], "o", label="measured")
    ends = [0, max(layers)]
    axes.plot(ends, [step["fixed_ms"] + step["ms_per_layer"] * depth for depth in ends], label="straight line")
    axes.plot(layers, [full / row["ideal_speedup"] for row in step["rows"]], "--", label="ideal by bytes")
    axes.set(xlabel="layers run", ylabel="ms", ylim=(0, None), title="One decode step")
