"""Tools for chat templates that know none: what there is, calls and what they gave are texts of messages.

The form of calls is that of Qwen and Hermes, which the grammar of tool calls keeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .call_forms import CLOSE, OPEN

Json = dict[str, Any]
_RESPONSE = "<tool_response>\n{}\n</tool_response>"
_CALL = f"{OPEN}\n{{}}\n{CLOSE}"
_INTRODUCTION = """You can call functions. Each line describes one, its arguments by a JSON schema:
{}

To call one, write its name and arguments in this form, and nothing else:
{}
The next message then has what it gave, between <tool_response> and </tool_response>."""


def as_texts(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """A conversation in which tools are told of by its first message, and calls and their results are texts."""
    told = [*map(_as_text, messages)]
    if tools and told:
        functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(functions, _CALL.format('{"name": "...", "arguments": {...}}'))
        first, *others = told
        texts = [first["content"], introduction] if first["role"] == "system" else [introduction, first["content"]]
        told = [first | {"content": "\n\n".join(filter(None, texts))}, *others]
    merged: list[Json] = []
    for message, original in zip(told, messages, strict=True):
        if original["role"] == "tool" and merged and merged[-1]["role"] == "user":
            merged[-1] = merged[-1] | {"content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _as_text(message: Json) -> Json:
    if message["role"] == "tool":  # templates want user and assistant in turn
        return {"role": "user", "content": _RESPONSE.format(message["content"])}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    texts = [_CALL.format(json.dumps({"name": call["name"], "arguments": call["arguments"]})) for call in calls]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, [message["content"], *texts]))}
