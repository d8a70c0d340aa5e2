"""Tool calls: taken out of the growing text of an output, and streamed as OpenAI does."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable
from typing import Any

from ..models.call_forms import CLOSE, CUT_HEAD, OPEN, TAGGED_HEAD, find_call, undecided

Json = dict[str, Any]

# What follows the arguments of a call, and what of it may be there where the output ends.
_RESTS = {
    "tagged": (re.compile(f".*?{CLOSE}", re.DOTALL), re.compile(r"\s*}?")),
    "fenced": (re.compile(r"[^}]*}\s*```"), re.compile(r"[^}]*}?\s*`{0,2}")),
    "bare": (re.compile(r"[^}]*}"), re.compile(r"[^}]*")),
}


class ToolCallParser:
    """Separates the growing text of one output into content and tool calls.

    Once a call's name has come, its arguments follow piece by piece, as the model writes them: as with OpenAI, whoever
    executes the call checks them. Text that turns out not to be a call is content.

    Args:
        names: of the tools that were given. Between tags, a call may have another name too.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._held = ""  # text that may belong to a call
        self._begins_line = True  # no content has come yet, or none since the last call
        self._form = ""  # of the last call
        self._arguments: _Arguments | None = None  # of a call whose name has come, and whose end has not
        self.num_calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[Json]]:
        """The content that is certain to be no part of a call, and the entries of a `tool_calls` delta.

        With the `last` text, tags and name of a call whose arguments have not come are dropped.
        """
        self._held += text
        content, deltas = "", list[Json]()
        while self._arguments is None or self._continue(deltas, last):
            if self._begins_line and self.num_calls:
                self._held = self._held.lstrip("\n")
            before = "\n" if self._begins_line else ""
            call = find_call(before + self._held, self._names)
            if call is None:
                return content + self._certain(last), deltas
            start = max(0, call.start - len(before))
            if call.form != "tagged":
                head = call.name, call.arguments - len(before)
            elif match := TAGGED_HEAD.match(self._held, start):
                head = match[1], match.end()
            elif last or CLOSE in self._held[start:]:
                content += self._whole_call(start, deltas)
                continue
            else:
                break
            content += self._take(start).rstrip("\n")
            self._begin(head[0], "", deltas)
            self._form, self._arguments, self._held = call.form, _Arguments(), self._held[head[1] - start :]
        return content, deltas

    def _whole_call(self, start: int, deltas: list[Json]) -> str:
        """Take a tagged call that has come as a whole, in an unusual form; returns the content with it."""
        text, close, _ = self._held[start + len(OPEN) :].partition(CLOSE)
        call, size = _read_call(text), start + len(OPEN + text + close)
        if call is None and CUT_HEAD.match(self._held, start):
            content, self._held = self._take(start).rstrip("\n"), ""
            return content
        if call is None:
            return self._take(size)
        content = self._take(start).rstrip("\n")
        self._begin(*call, deltas)
        self._held, self._begins_line = self._held[size - start :], True
        return content

    @property
    def is_cut(self) -> bool:
        """Whether the last call lacks the end of its arguments."""
        return self._arguments is not None and not self._arguments.have_ended

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
        whole, cut = _RESTS[self._form]
        rest = whole.match(self._held) or (cut.match(self._held) if last else None)
        if rest is None:
            return False
        self._held, self._arguments, self._begins_line = self._held[rest.end() :], None, True
        return True

    def _certain(self, last: bool) -> str:
        """Take the content that is certain to be no part of a call from the text that is held."""
        before = "\n" if self._begins_line else ""
        start = max(0, undecided(before + self._held) - len(before))
        return self._take(len(self._held) if last else len(self._held[:start].rstrip("\n")))

    def _take(self, size: int) -> str:
        """Take the first characters of the text that is held."""
        taken, self._held = self._held[:size], self._held[size:]
        self._begins_line &= not taken
        return taken


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
