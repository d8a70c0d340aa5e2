"""A benchmark from its options to its results: measured, shown and written phase by phase, within a time budget."""

from __future__ import annotations

import datetime
import json
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from .. import __version__
from ..calibration.conditions import machine
from ..errors import TaperError
from ..files import write_whole
from .measure import Clock, OutOfTimeError
from .options import Options, parse
from .peers import one_line
from .phases import Phases
from .target import Target, open_target
from .text import as_text, failed_checks

FORMAT_VERSION = 1
_PACKAGES = ("numpy", "ggml-python", "torch", "triton", "transformers", "vllm")
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
    versions = {"python": platform.python_version(), "taper-llm": __version__}
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
