"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write.

Which tools there are is said by the model's own chat template; a template that wants calls in another form is
rejected, as they could not be told from text.
"""

from __future__ import annotations

import json

from ..errors import RequestError
from ..loading.tokenizer import Tokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def check_tools(tokenizer: Tokenizer) -> None:
    """Check that a model's chat template takes tools, and in the form that is read here.

    Raises:
        RequestError: it does not.
    """
    if not tokenizer.takes_tools:
        raise RequestError("this model's chat template takes no tools", "leave out tools, or serve another model")
    if _OPEN not in tokenizer.chat_template:
        raise RequestError(f"this model's chat template asks for tool calls in another form than {_OPEN}")


class ToolCalls:
    """Separates the text of one completion, as it comes, into what is said and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # nothing was said since
        self.count = 0

    def push(self, text: str, last: bool) -> tuple[str, list[tuple[str, str]]]:
        """The text that is certain to be no call, and the calls that have ended: name and arguments as JSON text.

        With the `last` text, what is left of a call that never ended is given out as the text that it is.
        """
        self._held += text
        if self._after_call:
            self._held = self._held.lstrip("\n")
        said, calls = "", []
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            if end < 0:
                break
            call = _read_call(self._held[begin + len(_OPEN) : end])
            end += len(_CLOSE)
            said += self._held[:begin].rstrip("\n") if call else self._held[:end]
            calls += [call] if call else []
            self._held = self._held[end:].lstrip("\n") if call else self._held[end:]
            self._after_call = call is not None
        if last:
            certain = len(self._held)
        elif begin >= 0:  # a call that has not ended, and the line breaks before it
            certain = len(self._held[:begin].rstrip("\n"))
        else:
            certain = len(self._held) - self._overlap()
        said, self._held = said + self._held[:certain], self._held[certain:]
        self._after_call &= not certain
        self.count += len(calls)
        return said, calls

    def _overlap(self) -> int:
        """How many last characters may be the beginning of a call, with the line breaks before it."""
        text = self._held
        size = next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)
        before = text[: len(text) - size]
        return size + len(before) - len(before.rstrip("\n"))


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is not one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
