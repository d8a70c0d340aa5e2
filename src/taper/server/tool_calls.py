"""Tool calls: taken out of the growing text of an output, and streamed as OpenAI does."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from typing import Any

from ..errors import RequestError
from ..models.tokenizer import Tokenizer

Json = dict[str, Any]

_OPEN, CLOSE = "<tool_call>", "</tool_call>"
# A call up to the object of its arguments, with the keys in the order in which templates ask for them.
_HEAD = re.compile(_OPEN + r'\s*{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?={)')


def check_tools(tokenizer: Tokenizer) -> None:
    """Check that a model's chat template takes tools, and asks for calls in the form that `ToolCallParser` reads.

    Raises:
        RequestError: the template does not.
    """
    if not tokenizer.takes_tools:
        raise RequestError("this model's chat template takes no tools", "leave out tools, or serve another model")
    if _OPEN not in tokenizer.tool_template:
        raise RequestError(f"this model's chat template does not use {_OPEN} for tool calls", "leave out tools")


class ToolCallParser:
    """Separates the growing text of one output into content and tool calls.

    Once a call's name has come, its arguments follow piece by piece, as the model writes them: as with OpenAI, whoever
    executes the call checks them. Text that turns out not to be a call before its name has come is content.
    """

    def __init__(self) -> None:
        self._held = ""  # text that may belong to a call
        self._arguments: _Arguments | None = None  # of a call whose name has come
        self._after_call = False  # a call has ended, and no content has come since
        self.num_calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[Json]]:
        """The content that is certain to be no part of a call, and the entries of a `tool_calls` delta.

        With the `last` text, an incomplete call whose name has not come becomes content.
        """
        self._held += text
        content, deltas = "", list[Json]()
        while self._arguments is not None or _OPEN in self._held:
            if self._arguments is not None:
                if not self._continue(deltas, last):
                    break
                continue
            self._held = self._held.lstrip("\n") if self._after_call else self._held
            start = self._held.find(_OPEN)
            if head := _HEAD.match(self._held, start):
                content += self._held[:start].rstrip("\n")
                self._begin(head[1], "", deltas)
                self._arguments, self._held = _Arguments(), self._held[head.end() :]
            elif last or CLOSE in self._held[start:]:
                text, close, rest = self._held[start + len(_OPEN) :].partition(CLOSE)
                call = _read_call(text)
                if call is None:
                    content += f"{self._held[:start]}{_OPEN}{text}{close}"
                else:
                    content += self._held[:start].rstrip("\n")
                    self._begin(*call, deltas)
                self._held, self._after_call = rest, call is not None
            else:
                break
        if self._arguments is None:
            content += self._certain(last)
        return content, deltas

    def _begin(self, name: str, arguments: str, deltas: list[Json]) -> None:
        function = {"name": name, "arguments": arguments}
        identity = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        deltas.append(identity | {"function": function})
        self.num_calls += 1

    def _continue(self, deltas: list[Json], last: bool) -> bool:
        """Go on with the arguments of a call. Returns whether it has ended: then only text after it is held."""
        assert self._arguments is not None
        size = self._arguments.length(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        if piece and deltas:  # one entry for each call
            deltas[-1]["function"]["arguments"] += piece
        elif piece:
            deltas.append({"index": self.num_calls - 1, "function": {"arguments": piece}})
        if not self._arguments.have_ended:
            return False
        if (end := self._held.find(CLOSE)) >= 0:
            self._held = self._held[end + len(CLOSE) :]
        elif last:
            self._held = self._held.lstrip().removeprefix("}")
        else:
            return False
        self._arguments, self._after_call = None, True
        return True

    def _certain(self, last: bool) -> str:
        """Take the content that is certain to be no part of a call from the text that is held."""
        if self._after_call:
            self._held = self._held.lstrip("\n")
        text, start = self._held, self._held.find(_OPEN)
        if start < 0:
            sizes = range(len(_OPEN) - 1, 0, -1)
            start = len(text) - next((size for size in sizes if text.endswith(_OPEN[:size])), 0)
        size = len(text) if last else len(text[:start].rstrip("\n"))
        self._held = text[size:]
        self._after_call &= not size
        return text[:size]


class _Arguments:
    """Finds the end of a JSON object in pieces of text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False  # between quotes
        self._escaped = False  # after a backslash in a text
        self.have_ended = False

    def length(self, text: str) -> int:
        """How many characters of the next piece belong to the object."""
        if self.have_ended:
            return 0
        for index, character in enumerate(text):
            if self._in_text:
                self._in_text = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_text = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    self.have_ended = True
                    return index + 1
        return len(text)


def join_calls(deltas: Iterable[Json]) -> list[Json]:
    """Whole calls from the entries of `tool_calls` deltas."""
    calls: dict[int, Json] = {}
    for delta in deltas:
        if "id" in delta:
            calls[delta["index"]] = {"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])}
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())


def _read_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON text, of a function call in JSON; None if it is no call."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        arguments = json.dumps(arguments, ensure_ascii=False)
        (name + arguments).encode()  # fails for half of a surrogate pair, which no reply can hold
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return name, arguments
