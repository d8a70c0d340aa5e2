"""The page at /docs: the routes and their fields, from the OpenAPI document. It loads nothing from other servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Taper's API</title>
<link rel="icon" href="page/icon.svg">
<link rel="stylesheet" href="page/reference.css">
</head>
<body>
<h1>Taper's API</h1>
<p>As <a href="openapi.json">an OpenAPI document</a>, for programs. Clients of OpenAI's API work with the base URL of
this server and <code>/v1</code>, those of Anthropic's API without it.</p>
"""


def reference_page(document: Mapping[str, Any]) -> str:
    """The page, from an OpenAPI document."""
    return _HEAD + "".join(_routes(document)) + "</body>\n</html>\n"


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            about = escape(route.get("description", ""))
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n<p>{about}</p>\n"
            if "requestBody" in route:
                schema = _resolved(route["requestBody"]["content"]["application/json"]["schema"], document)
                yield from _fields(schema, document)


def _fields(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """A table of the fields of an object."""
    yield "<table>\n<tr><th>field</th><th>type</th><th></th></tr>\n"
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        cells = f"<code>{escape(name)}</code>", escape(_type(field, document)), "required" if name in required else ""
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    yield "</table>\n"


def _type(field: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The type of a field, in words."""
    if "$ref" in field:
        inner = _resolved(field, document)
        names = ", ".join(inner.get("properties", {}))
        return f"object with {names}" if names else _type(inner, document)
    for keyword in ("anyOf", "oneOf"):
        if keyword in field:
            kinds = [_type(schema, document) for schema in field[keyword] if schema.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds)) or "null"
    if "const" in field:
        return repr(field["const"])
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), document)}"
    return str(field.get("type", "anything"))


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or the one in the document that it refers to."""
    if "$ref" not in schema:
        return schema
    resolved: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return resolved
