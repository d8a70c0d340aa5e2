"""What a chat template works on, metered: operands and results by their size, so that time and memory are bounded."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from itertools import chain
from string import Formatter
from typing import Any

from ..errors import RequestError

# Characters of a value, the rendered text included, and of all that a template works on; and how many more of each for
# every one that it is given. Of 71 real templates all but one work on less than 80 for each, mostly 5 to 30.
MAX_VALUE, VALUE_PER_CHARACTER = 1 << 20, 4
MAX_WORK, WORK_PER_CHARACTER = 1 << 27, 64
_STEP, _ITEM = 256, 32  # what an operation counts besides its operands, and an item of a list besides what it is
# Of a whole number, as greater ones can have the same hash, and of lists in lists.
_MAX_BITS, _MAX_NESTING = 64, 100

# Filters and methods that may make more than their operands have together; "%" is the filter "format".
AMPLIFY = frozenset(("batch", "center", "expandtabs", "format", "indent", "join", "ljust", "replace", "rjust", "%")) | {
    *("format_map", "round", "slice", "sum", "tojson", "zfill")
}
_CONTAINERS = (list, tuple, Mapping, Set, ValuesView)


class Meter:
    """What is left of the work that a template may do."""

    def __init__(self) -> None:
        self._max_value, self._max_work, self._left = MAX_VALUE, MAX_WORK, MAX_WORK
        self._containers: dict[int, tuple[object, int, int]] = {}  # by id: itself, kept alive, its size and nesting

    @contextmanager
    def on(self, values: object) -> Iterator[None]:
        """Meter what is done with these values."""
        given = self.size(values)
        self._max_value = MAX_VALUE + VALUE_PER_CHARACTER * given
        self._max_work = self._left = MAX_WORK + WORK_PER_CHARACTER * given
        try:
            yield
        finally:
            self._containers.clear()

    def spend(self, work: int) -> None:
        """Pay for so much work."""
        self._left -= work
        if self._left < 0:
            raise too_much(f"works on more than {self._max_work} characters")

    def read(self, value: Any) -> Any:
        """Pay for an operand as a whole, with all that is in it; return it."""
        self.spend(_STEP + self.size(value))
        return value

    def made(self, value: Any) -> Any:
        """Pay for a result, where what is in it was there before; return it."""
        size = self.size(value)
        self.check_size(size)
        self.spend(_STEP + (_ITEM * len(value) if isinstance(value, _CONTAINERS) else size))
        return value

    def check_size(self, size: int) -> None:
        """Refuse to go on with a value of this size."""
        if size > self._max_value:
            raise too_much(f"makes more than {self._max_value} characters")

    def check_power(self, base: Any, exponent: Any) -> None:
        """Refuse to calculate a number of too many bits."""
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
            raise too_much(f"makes a number of more than {_MAX_BITS} bits")

    def size(self, value: Any) -> int:
        """Characters of a value, with what is in it each time that it is in it."""
        if not isinstance(value, _CONTAINERS):
            return self._measure(value)[0]
        if id(value) not in self._containers:
            self._containers[id(value)] = value, *self._measure(value)
        return self._containers[id(value)][1]

    def foresee(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Pay for the most that an operation of `AMPLIFY` may make of a value and its other operands."""
        size, amounts = self.size(value), [self._amount(other) for other in others]
        if name in ("format", "format_map", "%"):  # each mark may stand for all the others, at the greatest width
            size, widths = _marks(str(value), name)
            amounts = [sum(map(self.size, others)) + sum(widths)]
        elif name == "replace" and len(amounts) > 1:
            size, amounts = 1 + size // max(1, amounts[0]), amounts[1:2]
        elif name == "sum":  # of lists: each sum is a copy of the one before
            amounts = [size for other in others if isinstance(other, _CONTAINERS)]
        made = size * max(amounts, default=0)
        self.check_size(made)
        self.spend(made)

    def _amount(self, value: Any) -> int:
        """The size of a value, where a number counts as much as it says."""
        return abs(value) if isinstance(value, int) else self.size(value)

    def _measure(self, value: Any) -> tuple[int, int]:
        """Size and nesting. What a template puts into lists was measured before, so this goes only once through it."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, range):
            return _ITEM * len(value), 1
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise too_much(f"makes a number of more than {_MAX_BITS} bits")
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        pairs = value.items() if isinstance(value, Mapping) else value
        items = chain.from_iterable(pairs) if isinstance(pairs, ItemsView) else pairs
        size, nesting = 0, 0
        for item in items:
            _, item_size, depth = self._containers.get(id(item)) or (None, *self._measure(item))
            size, nesting = size + _ITEM + item_size, max(nesting, depth)
        if nesting >= _MAX_NESTING:
            raise too_much(f"puts lists into each other more than {_MAX_NESTING} deep")
        return size, nesting + 1


def _marks(text: str, name: str) -> tuple[int, list[int]]:
    """How many operands a text to be formatted may ask for, and the widths and precisions that it gives them."""
    if name == "%":
        marks = re.findall(r"[%)]([-#0 +\d.*]*)", text)
    else:
        marks = [spec or "" for _, field, spec, _ in Formatter().parse(text) if field is not None]
    if any("*" in mark or "{" in mark for mark in marks):
        raise too_much("formats with a width that it calculates")
    return len(marks), [int(width) for mark in marks for width in re.findall(r"\d+", mark)]


def too_much(what: str) -> RequestError:
    """Why a template is not run, or not to its end."""
    return RequestError(f"the model's chat template {what}", "a template of a chat model does far less")
