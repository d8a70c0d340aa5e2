"""The script of the limited process in which `grammars.py` tries a JSON schema before it compiles it itself.

llguidance rejects keywords that it does not know, whatever their values; `simplified` removes those without effect. It
also accepts patterns that match a property of their own object, but then cannot continue at that property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits

# JSON without spaces: a small model that may write spaces may write nothing else.
COMPACT: Any = {"whitespace_flexible": False}
# States take one or two kB each. Without large lexemes, compiling needs no vocabulary to be within limits.
LIMITS = LLParserLimits(max_lexer_states=20_000, precompute_large_lexemes=False, verbose_errors=False)

# The formats of texts that outputs keep. Others are notes for readers, as JSON Schema has it (draft 2020-12, 7.2.1).
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NOTES = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"),
}
_ANYTHING: tuple[Any, ...] = (True, {})
# Values with which a keyword has no effect.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("minItems", "minLength", "minProperties"), (0,)),
    **dict.fromkeys(("uniqueItems", "nullable", "exclusiveMinimum", "exclusiveMaximum", "not"), (False,)),
    **dict.fromkeys(("additionalItems", "unevaluatedItems", "unevaluatedProperties"), _ANYTHING),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas", "patternProperties"), ({},)),
    "propertyNames": (*_ANYTHING, {"type": "string"}),
    "required": ([],),
}
# Keywords whose values are schemas, lists of them, or objects of them by name.
_ONE = {
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_BY_NAME = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
# As models write calls of tools: with a space after each colon and comma.
_CALL_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def reply(request: dict[str, Any]) -> str:
    """What is wrong with the schemas of a request for `grammar`; "" if they can be compiled."""
    schemas = [request["schema"]] if "schema" in request else [call["arguments"] for call in request["calls"]]
    problems = (problem for schema in schemas for problem in _overlaps(schema))
    return next(problems, "") or LLMatcher.validate_grammar(grammar(request), limits=LIMITS)


def grammar(request: dict[str, Any]) -> str:
    """The grammar of outputs that keep a `schema`, or that are `calls` of tools, and `only_one` of them if so asked.

    JSON that keeps a schema has no spaces between its parts, or `any_spaces`. Calls have a name and the schema of their
    arguments. They stand between tags, or as a bare object if there are no `tags`: texts, or the ids of the tokens that
    models write for these. In `channels`, the ids of the tokens that begin and end the name of one, outputs are a
    message with a header.
    """
    if "channels" in request:
        return _in_channels(request, *request["channels"])
    if "schema" in request:
        overrides = None if request.get("any_spaces") else COMPACT
        return LLMatcher.grammar_from_json_schema(json.dumps(request["schema"]), overrides=overrides)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": call["name"]}, "arguments": call["arguments"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for call in request["calls"]
    ]
    if not request["tags"]:
        return LLMatcher.grammar_from_json_schema(json.dumps({"anyOf": calls}))
    schema = json.dumps({"x-guidance": _CALL_STYLE, "anyOf": calls})
    begin, end = (f"<[{tag}]>" if isinstance(tag, int) else json.dumps(tag) for tag in request["tags"])
    # A model that writes a line break after a call need not make another one.
    more = "" if request["only_one"] else ' ("\\n" call)* "\\n"?'
    return LLMatcher.grammar_from_lark(
        f'start: call{more}\ncall: {begin} "\\n" json "\\n" {end}\njson: %json {schema}\n'
    )


def _in_channels(request: dict[str, Any], begin: int, end: int) -> str:
    messages = [("", "final", request["schema"], COMPACT)] if "schema" in request else []
    for call in request.get("calls", []):
        messages.append((f" to=functions.{call['name']}", "commentary json", call["arguments"], _CALL_STYLE))
    rules = ["start: " + " | ".join(f"message{number}" for number in range(len(messages)))]
    for number, (recipient, channel, schema, style) in enumerate(messages):
        before = f"{json.dumps(recipient)} " if recipient else ""
        rules.append(f"message{number}: {before}<[{begin}]> {json.dumps(channel)} <[{end}]> json{number}")
        rules.append(f"json{number}: %json {json.dumps({'x-guidance': style, **schema})}")
    return LLMatcher.grammar_from_lark("\n".join(rules) + "\n")


def simplified(schema: Any) -> Any:
    """A schema without notes, and without keywords that have no effect."""
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: _inside(keyword, value) for keyword, value in schema.items() if not _has_no_effect(keyword, value)}
    if "then" not in kept and "else" not in kept:
        kept.pop("if", None)
    if "contains" not in kept:
        kept = {keyword: value for keyword, value in kept.items() if keyword not in ("minContains", "maxContains")}
    return kept


def _has_no_effect(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    values = _WITHOUT_EFFECT.get(keyword, ())
    return keyword in _NOTES or any(type(value) is type(nothing) and value == nothing for nothing in values)


def _inside(keyword: str, value: Any) -> Any:
    """The value of a keyword, the schemas in it simplified."""
    if keyword in _ONE and isinstance(value, dict):
        return simplified(value)
    if keyword in _LISTS and isinstance(value, list):
        return [simplified(item) for item in value]
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: simplified(item) for name, item in value.items()}
    return value


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that are inside it."""
    if isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            by_name = list(value.values()) if keyword in _BY_NAME and isinstance(value, dict) else []
            listed = value if keyword in _LISTS and isinstance(value, list) else []
            for inner in [*by_name, *listed, *([value] if keyword in _ONE else [])]:
                yield from _schemas(inner)


def _overlaps(schema: Any) -> Iterator[str]:
    """The problems of `patternProperties`: invalid patterns, and those that match a property named beside them."""
    for inner in _schemas(schema):
        patterns, properties, required = (inner.get(key) for key in ("patternProperties", "properties", "required"))
        if not isinstance(patterns, dict):
            continue
        named = [*properties] if isinstance(properties, dict) else []
        named += required if isinstance(required, list) else []
        for pattern in patterns:
            try:
                matching = re.compile(pattern).search
            except re.error as error:
                yield f"{pattern!r} of patternProperties is not a pattern: {error}"
                continue
            for name in named:
                if isinstance(name, str) and matching(name):
                    rule = "put all rules of a property under properties, and let patterns match only others"
                    yield f"{pattern!r} of patternProperties matches {name!r}, which is named beside it; {rule}"
