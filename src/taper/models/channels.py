"""Channels: the form of gpt-oss's and Gemma 4's outputs, and how it becomes the one that everything else reads.

An output of gpt-oss is several messages. Each has a header, which names its channel and may name the tool that it is
for, up to `<|message|>`. Thoughts are in the channel "analysis". As text they stand between the tags of thoughts, and
calls between those of calls. Of Gemma 4's outputs only thoughts are in a channel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from .call_forms import CLOSE, OPEN

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
MESSAGE_END = "<|end|>"  # another message may follow
OUTPUT_ENDS = ("<|return|>", "<|call|>")
THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"  # of Gemma 4; a line with the channel's name comes first
THINK, THINK_END = "<think>", "</think>"

_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_THOUGHT = re.compile(rf"\s*{THINK}(.*?)(?:{THINK_END}|\Z)(.*)", re.DOTALL)
_ENDS = {"thought": f"\n{THINK_END}\n\n", "call": f"}}\n{CLOSE}", "text": "", "": ""}


class ChannelText:
    """The text of an output from its parts: control tokens by their names, and what is between them."""

    def __init__(self) -> None:
        self._header: str | None = ""  # of the next message, as far as it has come; None within a message
        self._open = ""  # the kind of a message whose end has no text yet
        self._has_text = False

    def push(self, text: str) -> str:
        """The text that plain text adds. Where a header is due, text that can be none is a message without one."""
        if self._header is None:
            return text
        self._header += text
        begun = self._header.lstrip()
        if "<|" in begun or begun.startswith("to=") or "to=".startswith(begun):
            return ""
        text, self._header = self._header, None
        return self._begun("text") + text

    def push_control(self, name: str) -> str:
        """The text that a control token adds."""
        if name == MESSAGE and self._header is not None:
            header, self._header = self._header, None
            channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
            if recipient:
                return f"{self._begun('call')}{OPEN}\n" + f'{{"name": {json.dumps(recipient[1])}, "arguments": '
            return self._begun("thought" if channel and channel[1] == "analysis" else "text")
        if name in (START, MESSAGE_END, *OUTPUT_ENDS):
            self._header = name if name == START else ""
        elif self._header is not None:
            self._header += name
        return ""

    def flush(self, is_cut: bool) -> str:
        """What is missing at the end of an output: nothing that its model did not come to if it `is_cut`."""
        held = "" if self._header is None or "<|" in self._header else self._header
        return held if is_cut else held + _ENDS[self._open].rstrip("\n" if self._open == "thought" else "")

    def _begun(self, kind: str) -> str:
        """What ends the last message and begins one of this kind. Thoughts in sequence are one thought."""
        if kind == self._open == "thought":
            return "\n\n"
        between = _ENDS[self._open] or ("\n\n" if self._has_text else "")
        self._open, self._has_text = kind, self._has_text or kind == "text"
        return between + (f"{THINK}\n" if kind == "thought" else "")


class ThoughtText:
    """The same for outputs that are a text, of which thoughts are between control tokens."""

    def __init__(self) -> None:
        self._in_name = self._in_thought = False

    def push(self, text: str) -> str:
        """The text that plain text adds; the name of a channel is none."""
        if self._in_name:
            _, line_break, text = text.partition("\n")
            self._in_name = not line_break
        return text

    def push_control(self, name: str) -> str:
        """The text that a control token adds."""
        if self._in_thought == (name == THOUGHT):
            return ""
        self._in_name = self._in_thought = name == THOUGHT
        return f"{THINK}\n" if self._in_thought else f"\n{THINK_END}\n\n"

    def flush(self, is_cut: bool) -> str:
        """What is missing at the end of an output."""
        return f"\n{THINK_END}" if self._in_thought and not is_cut else ""


def without_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tags of thoughts, and wants none of earlier answers."""

    def content(message: Mapping[str, Any]) -> Any:
        match = _THOUGHT.match(message["content"]) if message["role"] == "assistant" else None
        return match[2].lstrip() if match else message["content"]

    return [{**message, "content": content(message)} for message in messages]


def with_channels(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that has channels: thoughts are a field of their own.

    Raises:
        RequestError: a message has several calls.
    """
    return [_with_thought(message) if message["role"] == "assistant" else dict(message) for message in messages]


def _with_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    thought, content = message.get("reasoning_content") or message.get("thinking") or "", message["content"]
    if match := _THOUGHT.match(content):
        thought, content = f"{thought}{match[1].strip()}", match[2].lstrip()
    if calls := message.get("tool_calls"):
        if len(calls) > 1:
            raise RequestError("a message has several tool calls; this model makes one at a time", "split it")
        thought, content = "\n\n".join(filter(None, (thought, content))), ""  # the template takes one of the two
        others["tool_calls"] = calls
    return others | ({"thinking": thought} if thought else {}) | {"content": content}
