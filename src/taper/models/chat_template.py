"""Chat templates: programs that come with a model, in jinja2's sandbox, which bounds neither their time nor memory.

Here a meter sees every value when it is made, and every round of a loop. The few operations that make much of little
are checked before they run, and those that may take longer than their operands are long are left out.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from itertools import chain
from string import Formatter
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import RequestError

MAX_SOURCE = 1 << 16  # characters of a template; the largest real ones have a third of that
_MAX_DATE = 200  # characters of a pattern of strftime
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
_NO_METHODS = ("decode", "encode", "from_bytes", "striptags", "to_bytes", "translate", "unescape")
_MADE, _JOINED, _ROUND = "taper_made", "taper_joined", "taper_round"  # filters that `_Metered` puts in


class ChatTemplate:
    """A template, compiled when it is first rendered. Threads take turns."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._meter = Meter()
        self._compiled: jinja2.Template | None = None
        self._lock = threading.Lock()

    def uses(self, name: str) -> bool:
        """Whether the template asks for a value of this name."""
        if len(self.source) > MAX_SOURCE:
            return False
        try:
            return name in meta.find_undeclared_variables(_Environment(self._meter).parse(self.source))
        except (jinja2.TemplateError, RecursionError):
            return False

    def render(self, values: dict[str, Any]) -> str:
        """The text that the template makes of values.

        Raises:
            RequestError: the template refuses them, fails, or does too much.
        """
        try:
            with self._lock, self._meter.on(values):
                if self._compiled is None:
                    self._compiled = _compile(self.source, self._meter)
                return self._compiled.render(values)
        except RequestError:
            raise
        except Exception as error:  # it may raise anything
            reason = str(error) or type(error).__name__
            raise RequestError(f"the model's chat template refused these messages: {reason}") from None


def _compile(source: str, meter: Meter) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise too_much(f"has {len(source)} characters; at most {MAX_SOURCE} are run")
    environment = _Environment(meter)
    return environment.from_string(_Metered().visit(environment.parse(source)))


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, metered."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, meter: Meter) -> None:
        # Nothing is computed while compiling: the meter is to see it each time.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,
            finalize=jinja2.pass_context(lambda context, value: self._written([value])),
        )
        self._meter = meter
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._metered("", test) for name, test in self.tests.items()}
        self.filters |= {_MADE: meter.made, _JOINED: self._written, _ROUND: self._round}

    def concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        self._meter.check_size(sum(map(len, texts)))
        text: str = self._meter.made("".join(texts))
        return text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str | int) and attr in _NO_METHODS) and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._meter.spend()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._meter.spend()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "%" or isinstance(left, str):
            self._meter.foresee(operator, left, [right])
        return self._meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        operands = __self._meter.made([*args, *kwargs.values()])  # a macro has them as a list
        # A method's object; str.format comes wrapped by the sandbox.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", "")
        __self._meter.foresee(getattr(__obj, "__name__", ""), owner, operands)
        return __self._meter.made(super().call(__context, __obj, *args, **kwargs))

    def _metered(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter or test whose result is measured: all of it, as nothing is left to be made later."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the environment or context that some are given

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if operands := [*args[first:], *kwargs.values()]:
                self._meter.foresee("%" if name == "format" else name, operands[0], operands[1:])
            result = function(*args, **kwargs)
            lazy = isinstance(result, Iterator) and not isinstance(result, LoopContext)
            return self._meter.made(list(result) if lazy else result)

        return metered

    def _written(self, values: list[Any]) -> str:
        """Values as one text."""
        return self.concat(map(str, self._meter.made(values)))

    def _round(self, cost: int) -> bool:
        self._meter.spend(cost)
        return True


class _Generation(Extension):
    """{% generation %} marks what a model is trained on; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Its attributes were measured each by itself, so they are not written out together."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Metered(NodeTransformer):
    """Lets the meter see what reaches no method of the environment: literals, slices, comparisons, rounds of loops."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = 8 * sum(1 for _ in node.find_all(nodes.Node))  # of what a round may append to the output
        self.generic_visit(node)
        round_ = _through(_ROUND, nodes.Const(cost), node)
        node.body.insert(0, nodes.ExprStmt(round_, lineno=node.lineno))
        node.test = node.test and nodes.And(round_, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_JOINED, nodes.List(node.nodes, lineno=node.lineno), node)

    def visit_Compare(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node, node) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = visit_Compare

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node, node) if isinstance(node.arg, nodes.Slice) else node


def _through(name: str, operand: nodes.Expr, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(operand, name, [], [], None, None, lineno=node.lineno)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Callable[..., Any]:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE:
        raise too_much(f"asks for a date in more than {_MAX_DATE} characters")
    return datetime.now().strftime(pattern)


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
