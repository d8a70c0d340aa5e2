"""A benchmark from its options to its results: measured, shown and written phase by phase, within a time budget."""

from __future__ import annotations

import datetime
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from ..calibration.store import machine
from ..errors import TaperError
from ..models.files import write_whole
from .measure import Clock, OutOfTimeError
from .options import Options, parse
from .peers import one_line
from .phases import Phases
from .target import Target, open_target

FORMAT_VERSION = 1
_PACKAGES = ("taper-llm", "numpy", "ggml-python", "torch", "triton", "transformers", "vllm")
_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130


def run(options: Options, show: Callable[[str], None], torch_device: str = "cuda") -> dict[str, Any]:
    """Measure what the options ask for, and return it as JSON data.

    Args:
        options: what to measure, and where to write it.
        show: takes each line of progress.
        torch_device: where PyTorch runs; "cpu" in tests.

    Raises:
        TaperError: a model, policy or option that does not work.
    """
    clock = Clock(60 * options.minutes)
    show("loading")
    target = open_target(options, torch_device)
    phases = Phases(target, options, clock).all()
    result: dict[str, Any] = {"format_version": FORMAT_VERSION, "conditions": _conditions(target, options)}
    result |= {"phases": {}, "dropped": [], "failed": {}}
    for name, phase in phases.items():
        show(name)
        try:
            clock.check()
            result["phases"][name] = phase()
        except OutOfTimeError:
            result["dropped"].append(name)
            show(f"{name}: left out, as the {options.minutes:g} minutes are over")
        except Exception as error:  # a phase that fails must not cost the others their results
            traceback.print_exc()
            result["failed"][name] = one_line(error)
        _write(result, options)
    return result


def main(arguments: Sequence[str]) -> int:
    """`python -m taper.bench`: as `taper bench`, without the libraries of the command line. Returns the exit code."""
    try:
        return bench(parse(arguments))
    except TaperError as error:
        _say(f"taper: {error}")
        return _WRONG
    except OSError as error:
        _say(f"taper: {error.filename or 'cannot write the results'}: {error.strerror or error}")
        return _WRONG
    except KeyboardInterrupt:
        return _INTERRUPTED


def bench(options: Options) -> int:
    """Measure, and print the tables. Returns the exit code: 1 if a check of the tokens or a phase failed."""
    result = run(options, _say)
    print(as_text(result))
    if options.plot is not None:
        from .plot import draw

        draw(result, options.plot)
    return _FAILED if failed_checks(result) or result["failed"] else 0


def _write(result: dict[str, Any], options: Options) -> None:
    if options.json is not None:
        write_whole(options.json, (json.dumps(result, indent=1) + "\n").encode())


def _conditions(target: Target, options: Options) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    versions = {
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    accelerator = None
    if target.on_torch:
        from .torch_device import device_name

        accelerator = device_name(target.device)
    return {
        "date": datetime.date.today().isoformat(),
        "model": target.name,
        "weights": "random" if target.path is None else "the model's own",
        "backend": "torch" if target.on_torch else "ggml",
        "dtype": options.dtype,
        "gpu": accelerator,
        "machine": machine(),
        "threads": target.threads,
        "versions": versions,
        "batch": 1,
        "decoding": "greedy, from a prompt of one token, sampling included",
        "statistic": f"median of up to {options.rounds} alternated rounds after a warm-up",
        "num_hidden_layers": target.config.num_hidden_layers,
        "policies": {name: policy.label for name, policy in target.policies.items()},
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Json = dict[str, Any]

_MEMORY = (("GB/s", "gb_per_s", 1, ".1f"), ("of memory, %", "bandwidth_used", 100, ".0f"))
_GAIN = (
    ("speedup", "speedup", 1, ".2f"),
    ("ideal", "ideal_speedup", 1, ".2f"),
    ("realised", "realised_fraction", 1, ".2f"),
)
_DEPTH = (("layers", "depth", 1, "d"), ("step, ms", "step_ms", 1, ".2f"), *_MEMORY, *_GAIN)
_PROMPTS = (
    ("prompt", "prompt_tokens", 1, "d"),
    ("TTFT, s", "ttft_s", 1, ".3f"),
    ("tokens/s", "tokens_per_s", 1, ".1f"),
    ("rounds", "rounds", 1, "d"),
)
_SPEED = (("TPOT, ms", "tpot_ms", 1, ".2f"), ("tokens/s", "tokens_per_s", 1, ".1f"))
_OUTPUTS = (
    ("policy", "policy", 1, "s"),
    ("mean depth", "mean_depth", 1, ".1f"),
    *_SPEED,
    *_MEMORY,
    *_GAIN,
    ("rounds", "rounds", 1, "d"),
)
_PEERS = (
    ("program", "name", 1, "s"),
    ("TTFT, s", "ttft_s", 1, ".3f"),
    *_SPEED,
    ("rounds", "rounds", 1, "d"),
)


def as_text(result: Json) -> str:
    """Every phase as a table, and the conditions above them."""
    c, phases = result["conditions"], result["phases"]
    sections = [f"{c['model']}\n{c['gpu'] or c['machine']}, {c['backend']}, {c['date']}, batch {c['batch']}"]
    failed = failed_checks(result)
    if failed:
        sections.append(f"CHECK FAILED, so the figures below are of wrong outputs: {', '.join(failed)}")
    for name, phase in phases.items():
        if "equal" in phase and not failed:
            sections.append(f"{name}: {phase.get('left_out') or 'in all of ' + ', '.join(phase['equal'])}")
    if "bandwidth" in phases:
        sections.append(f"memory: {phases['bandwidth']['gb_per_s']:.1f} GB/s ({phases['bandwidth']['kind']})")
    for name, phase in phases.items():
        if name == "depth":
            line = f"{phase['ms_per_layer']:.4g} ms for each layer and {phase['fixed_ms']:.4g} ms for all else"
            sections.append(_table("one decode step by depth", _DEPTH, phase["rows"]) + f"\n{line}")
        elif name == "prompts":
            sections.append(_table("prompts at full depth", _PROMPTS, phase["rows"]))
        elif "output_tokens" in phase:
            sections.append(_table(f"outputs of {phase['output_tokens']} tokens", _OUTPUTS, phase["rows"]))
        elif phase.get("rows") and "unavailable" in phase:
            sections.append(_peers(name, phase["rows"]))
    unavailable = {peer: why for phase in phases.values() for peer, why in phase.get("unavailable", {}).items()}
    lines = [f"{peer} was left out: {reason}" for peer, reason in unavailable.items()]
    lines += [f"{name} failed: {reason}" for name, reason in result["failed"].items()]
    lines += [f"{name} was left out for want of time" for name in result["dropped"]]
    return "\n\n".join([*sections, *(["\n".join(lines)] if lines else [])])


def failed_checks(result: Json) -> list[str]:
    """The comparisons of tokens that failed, by what was compared and the policy."""
    outcomes = {name: phase["equal"] for name, phase in result["phases"].items() if "equal" in phase}
    return [f"{name} ({policy})" for name, equal in outcomes.items() for policy, same in equal.items() if not same]


def _peers(name: str, rows: Sequence[Json]) -> str:
    """Programs beside each other; how many times as fast as each of the others Taper is."""
    others = [row["name"] for row in rows if "over" not in row]
    columns = [*_PEERS, *((f"over {other}", other, 1, ".2f") for other in others)]
    flat = [row | {other: row.get("over", {}).get(other) for other in others} for row in rows]
    return _table(f"{name}: a prompt and an output of that length", columns, flat)


def _table(title: str, columns: Sequence[tuple[str, str, float, str]], rows: Iterable[Json]) -> str:
    """Aligned columns; text to the left, figures to the right."""
    cells = [[_cell(row[key], factor, form) for _, key, factor, form in columns] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells)) for i, (header, *_) in enumerate(columns)]
    lines = [title]
    for row in ([header for header, *_ in columns], *cells):
        aligned = [
            cell.ljust(width) if form == "s" else cell.rjust(width)
            for cell, width, (*_, form) in zip(row, widths, columns, strict=True)
        ]
        lines.append("  " + "  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: Any, factor: float, form: str) -> str:
    if value is None:
        return "-"
    return str(value) if form == "s" else format(value * factor, form)
