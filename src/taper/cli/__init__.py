"""The command line. Outputs go to standard output, everything else to standard error."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from ..errors import Names, TaperError, TaperWarning
from . import bench, calibrate, chat, eval, generate, heal, models, serve
from .common import INTERRUPTED, say

_CLOSED_PIPE, _WRONG = 141, 2
_NATIVE = 'pip install "taper-llm[native]" compiles ggml for this processor (with a C++ compiler, three minutes)'
_DEVICES = 'pip install "taper-llm[vulkan]", or [cuda] or [torch], for a graphics card'
_ADVICE = {
    "AVX2": "this processor is old, or ggml was built on another one; every kernel is slow",
    "REPACK": f"matrices cannot be repacked for this processor; {_NATIVE}",
}
_REPRODUCE = "it is research/reproduce.py now, in a copy of the repository"
# What older versions had, and what one may guess.
_RENAMED = {
    "reproduce": _REPRODUCE,
    "--baselines": _REPRODUCE,
    "--no-repack": "write --repack never",
    "compare": "write taper generate --compare",
}
# Where a command takes the file that was given without an option's name.
_FILES = {"prompts": "a file of prompts goes with --prompts", "tasks": "a file of problems goes with --tasks"}


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print the versions, and what the CPU's kernels were built with."""
    if not wanted or context.resilient_parsing:
        return
    from importlib import metadata

    from ..backends import available_threads
    from ..backends.ggml.layouts import in_words, layout_for_many
    from ..backends.ggml.library import ggml
    from ..models.preview import kept_previews, previews_folder
    from ..models.tensors import WEIGHT_TYPES

    built = ggml.features()
    click.echo(f"taper {metadata.version('taper-llm')}, {ggml}")
    click.echo(f"{ggml.place.folder}, built with {', '.join(name for name in built if built[name])}")
    for device in ggml.devices:
        click.echo(f"--device {device.name.lower()}: {device}")
    if not ggml.devices:
        click.echo(f"no device besides the processor; {_DEVICES}")
    layouts = {dtype: layout_for_many(dtype, available_threads()) for dtype in WEIGHT_TYPES}
    if two := in_words({dtype: layout for dtype, layout in layouts.items() if layout is not None}):
        click.echo(f"two layouts, with --repack auto: {two}")
    click.echo(f"previews of output heads, with --head auto: {len(kept_previews())} in {previews_folder()}")
    for reason in ggml.rejected:
        click.echo(f"not used: {reason}")
    for name, advice in _ADVICE.items():
        if not built.get(name):
            click.echo(f"without {name}: {advice}")
    if slower := [*(["LLAMAFILE"] if not built.get("LLAMAFILE") else []), *ggml.unused_instructions()]:
        click.echo(f"without {', '.join(slower)}: prompts are slower than necessary; {_NATIVE}")
    context.exit()


class _InOrder(click.Group):
    """Commands whose help lists them as they were added: what one needs first comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "auto_envvar_prefix": "TAPER"},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    allow_from_autoenv=False,
    help="Print the versions, and which kernels run.",
)
def cli() -> None:
    """Language models that run fewer layers per token as the output grows, without retraining.

    Start with: taper generate "Why is the sky blue?"
    """
    Names.are_options = True  # in tests, which do not come by `main`


_OF_MODELS = (models.policy, models.list_models, models.pull, models.show, models.rm, models.vllm_args)
_OF_THE_LAB = (calibrate.calibrate, eval.evaluate, bench.bench, heal.heal)
for _command in (generate.generate, chat.chat, chat.run, serve.serve, *_OF_THE_LAB, *_OF_MODELS):
    cli.add_command(_command)


def _variables(command: click.Command, prefix: str) -> None:
    """Give each option a variable of the option's name; click would take the parameter's, which may differ."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            _variables(part, f"{prefix}_{name}")
    for option in command.params:
        if isinstance(option, click.Option) and option.allow_from_autoenv:
            name = max(option.opts, key=len).removeprefix("--")
            own = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
            option.envvar = [*own, f"{prefix}_{name}".replace("-", "_").upper()]


_variables(cli, "TAPER")


def main() -> NoReturn:
    """Run the command line; a user's mistake is one line and exit code 2."""
    Names.are_options = True
    _open_standard_streams()
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", TaperWarning)  # whatever PYTHONWARNINGS says: error would be a traceback
    encoding = "utf-8" if sys.platform == "win32" else None  # there, pipes and files would get an old code page
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=encoding)
    if isinstance(sys.stderr, io.TextIOWrapper):
        theirs = sys.stderr.encoding
        sys.stderr = _Diagnostics(sys.stderr.detach(), theirs, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 must not end an output
            stream.reconfigure(encoding=encoding, errors="replace")
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
    except click.exceptions.NoSuchOption as error:
        if error.option_name in _RENAMED:
            _fail(TaperError(f"No such option {error.option_name}", _RENAMED[error.option_name]))
        hint = "see --help"
        if error.ctx is not None and any(param.name == "prompt" for param in error.ctx.command.params):
            hint += '; a prompt that begins with a dash comes after --: taper generate -- "-1 + 2 = ?"'
        _fail(TaperError(error.format_message(), hint))
    except click.ClickException as error:
        _fail(TaperError(error.format_message(), _hint(error)))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        if isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL):
            sys.exit(_CLOSED_PIPE)
        _fail(TaperError(f"{error.filename or 'cannot write the output'}: {error.strerror or error}"))
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Replace each standard stream that was closed before Python started, and is None, by one to nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process)


class _Diagnostics(io.TextIOWrapper):
    """Standard error. If it cannot be written to (a full disk, a closed pipe), the output must go on all the same."""

    def write(self, text: str) -> int:
        """Write, or give up on this and all that follows."""
        with self._or_to_nowhere():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or give up."""
        with self._or_to_nowhere():
            super().flush()

    @contextmanager
    def _or_to_nowhere(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def _hint(error: click.ClickException) -> str:
    """What to do about a mistake on the command line."""
    message, context = error.format_message(), error.ctx if isinstance(error, click.UsageError) else None
    if now := next((now for old, now in _RENAMED.items() if f"'{old}'" in message), None):
        return now
    if context is None:
        return "see taper --help"
    if "unexpected extra argument" in message or "Missing option '--tasks'" in message:
        for param in context.command.params:
            if param.name in _FILES:
                return _FILES[param.name]
    return f"see {context.command_path} --help"


def _fail(error: TaperError) -> NoReturn:
    say(f"taper: {error}")
    sys.exit(_WRONG)


def _show_warning(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
    if issubclass(category, TaperWarning):
        say(f"taper: {message}")
