"""The command line. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from typing import NoReturn

import click

from .. import __version__
from ..errors import TaperError, TaperWarning
from . import calibrate, generate, models, policy, vllm
from .common import INTERRUPTED, say

_CLOSED_PIPE, _WRONG = 141, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="taper")
def cli() -> None:
    """Language models that run fewer layers per token as the answer grows, without retraining.

    Start with: taper pull, then: taper generate "Why is the sky blue?"
    """


cli.add_command(generate.generate)
cli.add_command(generate.chat)
cli.add_command(models.pull)
cli.add_command(calibrate.calibrate)
cli.add_command(policy.policy)
cli.add_command(vllm.vllm_args)


def main() -> NoReturn:
    """Run the command line; a user's mistake is one line and exit code 2."""
    _open_standard_streams()
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 must not end an answer
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) == signal.SIG_DFL:  # an exit lets temporary files be removed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except TaperError as error:
        _fail(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(_WRONG)
    except click.ClickException as error:
        _fail(TaperError(error.format_message(), "see --help"))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        if isinstance(error, BrokenPipeError):
            sys.exit(_CLOSED_PIPE)
        _fail(TaperError(f"{error.filename or 'cannot write the output'}: {error.strerror or error}"))
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Python has None for a standard stream that was closed before it started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process)


def _fail(error: TaperError) -> NoReturn:
    say(f"taper: {error}")
    sys.exit(_WRONG)


def _show_warning(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
    if issubclass(category, TaperWarning):
        say(f"taper: {message}")
