"""`taper bench`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from ..bench.options import Options, from_given


def _with_options(command: click.Command) -> click.Command:
    """The command with the options of `Options`, in their order."""
    for option in fields(Options):
        flag, given = f"--{option.name.replace('_', '-')}", option.metadata
        if given["kind"] is bool:
            command.params.append(click.Option([flag], is_flag=True, help=given["help"]))
        else:
            repeat, metavar = given["repeat"], given["metavar"]
            command.params.append(
                click.Option([flag], type=given["kind"], multiple=repeat, metavar=metavar, help=given["help"])
            )
    return command


@click.command()
@click.pass_context
def bench(context: click.Context, /, **given: Any) -> None:
    """Measure how fast a model runs at full depth and under policies.

    Times to first token and per output token, tokens per second, the memory bandwidth that this uses, and how much of
    the ideal speedup comes out; beside other programs that are installed, each in turn. Leave the machine alone
    meanwhile. Quality is not measured: taper calibrate does that.
    """
    options = from_given(**given)
    from ..bench.run import bench as run

    context.exit(run(options))


_with_options(bench)
