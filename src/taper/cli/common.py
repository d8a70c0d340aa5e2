"""What several commands need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..llm import LLM
    from ..policy import DepthPolicy

INTERRUPTED = 130
Command = Callable[..., Any]


def with_options(options: Sequence[Command], command: Command) -> Command:
    """A command with these options, listed in their order before those it has."""
    for option in reversed(options):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """Which model, and how it runs."""
    options = [
        click.option("--model", default=None, metavar="MODEL", help="Name, file, folder or hub id ORG/MODEL."),
        click.option("--threads", type=int, help="CPU threads. Default: the cores this process may use."),
        click.option("--context", type=int, help="Tokens of prompt and answer. Default: 4096 or the model's limit."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "f32", "f16", "bf16", "q8_0"]),
            default="auto",
            show_default=True,
            help="Convert weights when loading.",
        ),
    ]
    return with_options(options, command)


def load(options: dict[str, Any], **more: Any) -> LLM:
    """The model that the options ask for."""
    from ..llm import LLM
    from ..loading import DEFAULT_MODEL
    from ..terminal import waiting

    model = DEFAULT_MODEL if options["model"] is None else options["model"]
    with waiting(f"loading {model}"):
        return LLM(model, **{name: options[name] for name in ("device", "dtype", "context", "threads")}, **more)


def find_policy(name: str) -> DepthPolicy:
    """A shipped policy by its name, else that of a file."""
    from ..policy import load_policy, shipped_policies

    shipped = (policy for policies in shipped_policies().values() for policy in policies)
    return next((policy for policy in shipped if policy.name == name), None) or load_policy(name)


def say(line: str) -> None:
    print(line, file=sys.stderr)
