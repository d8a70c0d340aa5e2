"""What a benchmark is asked to do: one list of options, from which both command lines are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ..errors import DEVICES, DTYPES, RequestError, number, one_of, shown, whole_number
from ..models.files import check_writable

LENGTHS = (128, 512, 2048)
_MAX_LENGTH = 1 << 20


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens, as "128,512".

    Raises:
        RequestError: one is not a whole number of at least 2.
    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 2 <= int(part) <= _MAX_LENGTH for part in numbers):
        rule = f"they must be whole numbers from 2 to {_MAX_LENGTH}"
        raise RequestError(f"lengths are {shown(text)}; {rule}", "such as 128,512,2048")
    return tuple(sorted({int(part) for part in numbers}))


def _given(kind: Callable[[str], Any], metavar: str, help_text: str, repeat: bool = False) -> dict[str, Any]:
    """How the command line gives a field of `Options`; `bool` is a flag, and `repeat` collects several values."""
    return {"kind": kind, "metavar": metavar, "help": help_text, "repeat": repeat}


@dataclass(frozen=True)
class Options:
    """What to measure, and where to write it.

    Raises:
        RequestError: an option is out of range, or options contradict each other.
    """

    model: str | None = field(default=None, metadata=_given(str, "MODEL", "Name, file, folder or hub id ORG/MODEL."))
    shape: str | None = field(
        default=None,
        metadata=_given(str, "SHAPE", "Random weights instead: llama-2-7b, llama-2-13b, llama-3-8b or 34b."),
    )
    policy: tuple[str, ...] = field(
        default=(),
        metadata=_given(
            str, "POLICY", "Measure it beside full depth; may be repeated. Default: those shipped.", repeat=True
        ),
    )
    lengths: tuple[int, ...] = field(
        default=LENGTHS, metadata=_given(parse_lengths, "N,N", "Output lengths. Default: 128,512,2048.")
    )
    prompts: tuple[int, ...] = field(
        default=LENGTHS, metadata=_given(parse_lengths, "N,N", "Prompt lengths. Default: 128,512,2048.")
    )
    rounds: int = field(
        default=5, metadata=_given(int, "N", "Runs of each, after a warm-up; figures are medians. Default: 5.")
    )
    minutes: float = field(
        default=9.0, metadata=_given(float, "MINUTES", "Time budget; what does not fit is left out. Default: 9.")
    )
    device: str = field(default="auto", metadata=_given(str, "DEVICE", "auto, cpu or cuda. Default: auto."))
    dtype: str = field(
        default="auto", metadata=_given(str, "DTYPE", f"Type of the weights: {', '.join(DTYPES)}. Default: auto.")
    )
    threads: int | None = field(
        default=None, metadata=_given(int, "N", "CPU threads. Default: the cores this process may use.")
    )
    no_repack: bool = field(
        default=False, metadata=_given(bool, "", "Use the mapped file as it is: less memory, slower on a CPU.")
    )
    llama_bin: Path | None = field(
        default=None, metadata=_given(Path, "DIR", "Folder of llama.cpp's programs. Default: that on PATH.")
    )
    no_peers: bool = field(
        default=False, metadata=_given(bool, "", "Leave out other programs: llama.cpp, transformers, vLLM.")
    )
    json: Path | None = field(default=None, metadata=_given(Path, "FILE", "Write everything as JSON, phase by phase."))
    plot: Path | None = field(default=None, metadata=_given(Path, "FILE", "Draw the figures: a .png or .svg file."))

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise RequestError("--shape has random weights, and --model a model's own", "give one of the two")
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, DTYPES)
        whole_number("rounds", self.rounds, 1, 1000)
        number("minutes", self.minutes, 0, 1e6, above=True)
        if self.threads is not None:
            whole_number("threads", self.threads, 1, 512)
        if self.llama_bin is not None:
            from .peers import find_llama_bench

            find_llama_bench(self.llama_bin)
        for name in ("json", "plot"):
            path = getattr(self, name)
            if path is not None:
                if path.exists() and not path.is_file():  # it would be replaced, a device too
                    raise RequestError(f"--{name} {path} is a folder or a device", "name a file")
                check_writable(path.parent)
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise RequestError(f"--plot {self.plot} is neither a .png nor a .svg file", "name one of these")
        if self.plot is not None and find_spec("matplotlib") is None:
            raise RequestError("--plot needs matplotlib", 'pip install "taper-llm[report]"')


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message, "see --help")


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line, with nothing but the standard library.

    Raises:
        RequestError: an unknown option, or a value out of range.
    """
    parser = _Parser(prog="python -m taper.bench", description="Measure how fast a model runs.", allow_abbrev=False)
    for option in fields(Options):
        name, given = f"--{option.name.replace('_', '-')}", option.metadata
        if given["kind"] is bool:
            parser.add_argument(name, action="store_true", help=given["help"])
        else:
            rest: dict[str, Any] = {"action": "append"} if given["repeat"] else {}
            parser.add_argument(
                name, type=given["kind"], default=None, metavar=given["metavar"], help=given["help"], **rest
            )
    return from_given(**vars(parser.parse_args(arguments)))


def from_given(**given: Any) -> Options:
    """Options from the values that were given: None or () means the default."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Options(**{name: value for name, value in values.items() if value not in (None, ())})
