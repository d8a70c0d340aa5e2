"""The script of the limited process in which `chat_template.py` runs templates."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REASON = 1000  # characters of an error that a template raises


def reply(request: tuple[str, dict[str, Any] | None, int]) -> dict[str, Any]:
    """The text of a template with values, up to `max_characters`; without values, the names of its variables."""
    source, values, max_characters = request
    try:
        if values is None:
            return {"variables": sorted(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))}
        text = _compiled(source).render(values)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return {"refused": (str(error) or type(error).__name__)[:_MAX_REASON]}
    return {"text": text} if len(text) <= max_characters else {"too_long": max_characters}


@lru_cache(maxsize=1)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


class _Generation(Extension):
    """{% generation %} marks the text that a model is trained on; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# A signature of its own: templates must not reach the rest of `json.dumps`, which calls what it is given.
def _tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# transformers' environment of chat templates.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
