"""What a chat template makes, metered: the size of every value, how much it makes in all, and its time."""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from itertools import chain
from string import Formatter
from typing import Any

from jinja2.runtime import LoopContext

from ..errors import RequestError

# Characters of a value, the rendered text included, and of all that a template makes; and how many more of each for
# every one that it is given. Real templates make less than 80 in all for each, mostly 5 to 30.
MAX_VALUE, VALUE_PER_CHARACTER = 1 << 20, 4
MAX_TOTAL, TOTAL_PER_CHARACTER = 1 << 27, 64
MAX_SECONDS = 5.0  # of processor time
_ITEM = 32  # what a value counts besides its characters, and an item of a list besides what it is
# Of a whole number, as greater ones can have the same hash, and of lists in lists.
_MAX_BITS, _MAX_NESTING = 64, 100

# Operators, filters and methods that may make more than their operands have together; "%" is the filter "format" too.
_AMPLIFY = {"*", "**", "%", "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust"} | {
    *("replace", "rjust", "round", "slice", "sum", "tojson", "zfill")
}
_SIZED = (str, list, tuple)
_CONTAINERS = (list, tuple, Mapping, Set, ValuesView)


class Meter:
    """What is left of what a template may make, and of its time.

    Every value that a template can reach was measured when it was made, so a single operation on it takes little.
    """

    def __init__(self) -> None:
        self._max_value = self._max_total = self._left = 0
        self._end = 0.0
        self._containers: dict[int, tuple[object, int, int]] = {}  # by id: itself, kept alive, its size and nesting

    @contextmanager
    def on(self, values: object) -> Iterator[None]:
        """Meter what is made of these values by this thread."""
        given = self.size(values)
        self._max_value = MAX_VALUE + VALUE_PER_CHARACTER * given
        self._max_total = self._left = MAX_TOTAL + TOTAL_PER_CHARACTER * given
        self._end = time.thread_time() + MAX_SECONDS
        try:
            yield
        finally:
            self._containers.clear()

    def made(self, value: Any) -> Any:
        """Count a value that was made, where what is in it was there before; return it."""
        size = self.size(value)
        self.check_size(size)
        self.spend(_ITEM * len(value) if isinstance(value, _CONTAINERS) else size)
        return value

    def spend(self, characters: int = 0) -> None:
        """Count an operation that made so many characters."""
        self._left -= characters + _ITEM
        if self._left < 0:
            raise too_much(f"makes more than {self._max_total} characters in all")
        if time.thread_time() > self._end:
            raise too_much(f"takes more than {MAX_SECONDS:g} seconds")

    def check_size(self, size: int) -> None:
        """Refuse to go on with a value of this size."""
        if size > self._max_value:
            raise too_much(f"makes more than {self._max_value} characters")

    def size(self, value: Any) -> int:
        """Characters of a value, with what is in it each time that it is in it."""
        if not isinstance(value, _CONTAINERS):
            return self._measure(value)[0]
        if id(value) not in self._containers:
            self._containers[id(value)] = value, *self._measure(value)
        return self._containers[id(value)][1]

    def foresee(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Refuse an operator, filter or method, by its name, that may make too much of a value and other operands."""
        if name not in _AMPLIFY:
            return
        size, amounts = self.size(value), [abs(o) if isinstance(o, int) else self.size(o) for o in others]
        if name == "**":
            if isinstance(value, int) and isinstance(others[0], int) and value.bit_length() * amounts[0] > _MAX_BITS:
                raise too_much(f"makes a number of more than {_MAX_BITS} bits")
            return
        if name == "*":
            size = max((self.size(o) for o in (value, *others) if isinstance(o, _SIZED)), default=0)
            amounts = [abs(o) for o in (value, *others) if isinstance(o, int)]
        elif name in ("%", "format", "format_map"):  # each mark may stand for all the others, at the greatest width
            size, widths = _marks(str(value), name)
            amounts = [sum(map(self.size, others)) + sum(widths)]
        elif name == "replace" and len(amounts) > 1:
            size, amounts = 1 + size // max(1, amounts[0]), amounts[1:2]
        elif name == "sum":  # of lists: each sum is a copy of the one before
            amounts = [size for other in others if isinstance(other, _CONTAINERS)]
        self.check_size(size * max(amounts, default=0))

    def _measure(self, value: Any) -> tuple[int, int]:
        """Size and nesting. What a template puts into lists was measured before, so this goes only once through it."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, range):
            return _ITEM * len(value), 1
        if isinstance(value, LoopContext):
            return _ITEM * value.length, 1
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
