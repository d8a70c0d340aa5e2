"""Chat templates: programs that come with a model, in jinja2's sandbox, which bounds neither their time nor memory.

Here what they handle is metered: an operation pays for the size of its operands and of what it makes, so that whatever
takes time and memory in proportion to these is paid for. The few operations that make much of little pay for what they
will make before they run, and those that may take longer than that are left out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import RequestError
from .template_meter import AMPLIFY, Meter, too_much

MAX_SOURCE = 1 << 16  # characters of a template; the largest real ones have a third of that
_MAX_DATE = 200  # characters of a pattern of strftime
# Filters that only look at how long their operand is, and tests that look at all of it.
_SHALLOW = frozenset(("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random")) | {
    *("reject", "rejectattr", "reverse", "select", "selectattr")
}
_COMPARE = frozenset(("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge")) | {
    *("<", "lt", "lessthan", "<=", "le")
}
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
_NO_METHODS = ("decode", "encode", "from_bytes", "striptags", "to_bytes", "translate", "unescape")

_ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
_MAKERS = (*_ARITHMETIC, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Call, nodes.Filter)
_SIZED = (str, list, tuple)
_READ, _MADE = "taper_read", "taper_made"  # filters through which operands and results go


class ChatTemplate:
    """A template, compiled when it is first rendered. Threads take turns."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._meter = Meter()
        self._compiled: jinja2.Template | None = None
        self._lock = threading.Lock()

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
    return environment.from_string(_metered(environment.parse(source)))


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, metered."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, meter: Meter) -> None:
        extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._meter = meter
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._paid("%" if name == "format" else name, function, name not in _SHALLOW)
        self.tests = {name: self._paid("", test, name in _COMPARE) for name, test in self.tests.items()}
        self.filters |= {_READ: meter.read, _MADE: meter.made}

    def concat(self, parts: Iterable[str]) -> str:
        """Join what was output."""
        texts, size = [], 0
        for text in parts:
            size += len(text)
            self._meter.check_size(size)
            texts.append(text)
        self._meter.spend(size)
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str | int) and attr in _NO_METHODS) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            self._meter.check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._meter.foresee("%", left, [right])
        elif operator == "*" and (isinstance(left, _SIZED) or isinstance(right, _SIZED)):
            self._meter.foresee("*", *((left, [right]) if isinstance(left, _SIZED) else (right, [left])))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(__obj, Macro):
            name = getattr(__obj, "__name__", "")
            # A method's object; str.format comes wrapped by the sandbox.
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", "")
            operands = [*args, *kwargs.values()]
            for value in (*operands, owner) if isinstance(owner, str | list | tuple) else operands:
                __self._meter.read(value)
            if name in AMPLIFY:
                __self._meter.foresee(name, owner, operands)
        return super().call(__context, __obj, *args, **kwargs)

    def _paid(self, name: str, function: Any, whole: bool) -> Callable[..., Any]:
        """A filter or test that pays for its operands, as a whole or by their length, and for its result."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the environment or context that some are given

        @wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            operands = [*args[first:], *kwargs.values()]
            for operand in operands:
                (self._meter.read if whole else self._meter.made)(operand)
            if name in AMPLIFY and operands:
                self._meter.foresee(name, operands[0], operands[1:])
            return self._meter.made(function(*args, **kwargs))

        return paid


class _Generation(Extension):
    """{% generation %} marks what a model is trained on; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Its attributes are metered as they are read; written out, they would not be."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _metered(node: Any) -> Any:
    """A template's syntax tree with the meter at operands, at results and in every round of a loop."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _metered(value))
        elif isinstance(value, list):
            setattr(node, name, [_metered(item) if isinstance(item, nodes.Node) else item for item in value])
    if isinstance(node, nodes.For):
        node.body.insert(0, nodes.ExprStmt(_through(_READ, nodes.Const(0)), lineno=node.lineno))
        node.test = node.test and _through(_READ, node.test)
    elif isinstance(node, nodes.Output | nodes.Concat):
        node.nodes = [item if isinstance(item, nodes.TemplateData) else _through(_READ, item) for item in node.nodes]
    elif isinstance(node, nodes.Compare | nodes.Operand):
        node.expr = _through(_READ, node.expr)
    elif isinstance(node, nodes.Pair):
        node.key = _through(_READ, node.key)
    elif isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _through(_MADE, node)
        node.arg = _through(_READ, node.arg)
    elif isinstance(node, _ARITHMETIC):
        node.left, node.right = _through(_MADE, node.left), _through(_MADE, node.right)
    elif isinstance(node, nodes.CallBlock):
        node.call = node.call.node  # type: ignore[assignment]  # a call itself, as the compiler asks
    return _through(_MADE, node) if isinstance(node, _MAKERS) and getattr(node, "ctx", "load") == "load" else node


def _through(meter: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, meter, [], [], None, None, lineno=node.lineno)


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
