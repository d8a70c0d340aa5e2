"""The script of the limited process in which `chat_template.py` runs templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REASON = 1000  # characters of an error that a template raises


def reply(request: tuple[str, dict[str, Any] | None, int]) -> dict[str, Any]:
    """What a template makes of values, within so many characters; without values the names of those that it reads."""
    source, values, max_characters = request
    try:
        if values is None:
            return {"variables": sorted(meta.find_undeclared_variables(_environment().parse(source)))}
        text = _compiled(source).render(values)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return {"refused": (str(error) or type(error).__name__)[:_MAX_REASON]}
    return {"text": text} if len(text) <= max_characters else {"too_long": max_characters}


@lru_cache(maxsize=1)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """transformers' environment of chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _Generation(Extension):
    """{% generation %} marks the text that a model is trained on; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


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
    return datetime.now().strftime(pattern)
