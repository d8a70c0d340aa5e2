"""What a user can get wrong, and the checks that say so, in one line. Anything else that is raised is a bug of ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

MAX_CHARACTERS = 1000  # of a message and of a hint; names that come from files have no limit of their own

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])\b")
# Colours, cursor movements and the like; titles and links. Of an incomplete one, only the control characters go.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)")


class Names:
    """Errors name parameters as the reader knows them: options, `--max-kl`, or in Python arguments, `max_kl`."""

    are_options = False  # set by the command line

    @classmethod
    def spoken(cls, text: str) -> str:
        """A text in the names that its reader knows."""
        return text if cls.are_options else _OPTION.sub(lambda option: option[1].replace("-", "_"), text)


class TaperError(Exception):
    """A mistake that the user can correct: the wrong value and the rule it breaks, then a hint what to do about it.

    `param` is the name of the parameter with the value, if a parameter has it.
    """

    def __init__(self, message: str, hint: str = "", param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        message, hint = (printable(Names.spoken(text)) for text in (self.message, self.hint))
        return f"{message} ({hint})" if hint else message


class PolicyError(TaperError):
    """A depth policy that breaks a rule, or does not belong to the model."""


class ModelError(TaperError):
    """A model that is missing, damaged or not supported."""


class MissingModelError(ModelError):
    """A model that is not on this machine, or only in part."""


class RequestError(TaperError):
    """A request that cannot be served: a sampling parameter out of range, a prompt that does not fit."""


class DeviceLostError(TaperError):
    """A device that is gone, or whose driver failed; `what` is its message. Only a new process can use one again."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the device was lost, or there is a bug: {what}", "start again")


class TaperWarning(UserWarning):
    """Something the user should know and need not act on: one line."""

    def __str__(self) -> str:
        return printable(Names.spoken(super().__str__()))


def printable(text: str) -> str:
    """Text as one line that a terminal only shows: no escape sequences, control characters or bidi overrides."""
    line = " ".join(_ESCAPES.sub("", text).split())
    if len(line) > MAX_CHARACTERS:
        line = f"{line[: MAX_CHARACTERS - 3]}..."
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


DEVICES = ("auto", "cpu", "cuda")
QUANTISED_DTYPES = ("q8_0", "q6_k", "q4_k", "iq4_nl", "q4_0")
DTYPES = ("auto", "f32", "f16", "bf16", *QUANTISED_DTYPES)
EXACT = "exact"
MODES = ("full", "taper", EXACT)
DRAFTERS, OFF = ("auto", "ngram", "mtp", "policy"), "off"
REPACK = ("auto", "always", "never")  # layouts of matrices on a CPU; see `LLM`
HEADS = ("auto", "full", "shortlist")  # which logits are computed; see `LLM`
REUSE = ("filled", "exact")  # of keys and values: also those that were filled in for skipped layers, or not


def whole_number(
    name: str, value: Any, low: int, high: int | None = None, error: type[TaperError] = RequestError
) -> int:
    """`value` as an int; raises `error` if it is not a whole number from `low` to `high`."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        converted = int(value)
        if low <= converted and (high is None or converted <= high):
            return converted
    rule = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise error(f"{name} is {shown(value)}; it must be a whole number {rule}", param=name)


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    error: type[TaperError] = RequestError,
    *,
    above: bool = False,
    below: bool = False,
) -> float:
    """`value` as a float; raises `error` if it is not a finite number from `low` to `high`.

    `above` leaves out `low` itself, `below` leaves out `high`.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int beyond every float
            converted = float(value)
            if (low < converted if above else low <= converted) and (converted < high if below else converted <= high):
                return converted
    interval = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    raise error(f"{name} is {shown(value)}; it must be a number in {interval}", param=name)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; raises RequestError if it is neither True nor False."""
    if type(value).__name__ in ("bool", "bool_"):  # Python's or numpy's
        return bool(value)
    raise RequestError(f"{name} is {shown(value)}; it must be True or False", param=name)


def one_of(name: str, value: Any, choices: Collection[str], error: type[TaperError] = RequestError) -> str:
    """`value`; raises `error` if it is not one of the choices."""
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices)
    raise error(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}", hint, param=name)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """A hint at the name that somebody may have meant; "" if none is near."""
    near = get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]}?" if near else ""


def as_tuple(name: str, values: Any, error: type[TaperError] = RequestError) -> tuple[Any, ...]:
    """`values` as a tuple; raises `error` if they are text or cannot be listed."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise error(f"{name} is {shown(values)}; it must be a list", param=name)
    return tuple(values)


def limited_attention(config: object) -> str:
    """The kind of attention with which some layers do not see the whole context: "sliding-window", "hybrid" or "".

    `config` is a transformers config or has its attributes; those that the model does not have may be missing.
    """
    layer_types = {str(kind) for kind in getattr(config, "layer_types", None) or ["full_attention"]}
    if layer_types - {"full_attention", "sliding_attention"}:
        return "hybrid"
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return "sliding-window" if window or "sliding_attention" in layer_types else ""


def shown(value: object) -> str:
    """A value as it stands in an error message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # of a class of the caller's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:157]}..."


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object for `json.loads`; raises ValueError for a duplicate key: readers differ in which one they take."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("duplicate key in an object")
    return data
