"""The forms in which models write tool calls: between tags, or as a JSON object on lines of its own, bare or fenced.

Models that learned tags write the other two where they are unsure. Such an object is a call only if it names a tool
that was given.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"

# An object up to its arguments, with the keys in the order in which templates ask for them.
_FENCE, _SPACE, _NAME = "```", r"\s*", r'[^"\\]*'
_OBJECT = ["{", _SPACE, *'"name"', _SPACE, ":", _SPACE, '"', _NAME, '"', _SPACE, ",", _SPACE, *'"arguments"']
_OBJECT += [_SPACE, ":", _SPACE, "{"]
_FORMS = (_OBJECT, [*_FENCE, _SPACE, *_OBJECT], [*_FENCE, *"json", _SPACE, *_OBJECT])


def _beginning(atoms: list[str]) -> str:
    """A pattern of all texts that may go on as these atoms do; each is a character, or may match nothing."""
    pattern = ""
    for atom in reversed(atoms):
        pattern = f"{atom}{pattern}" if atom.endswith("*") else rf"(?:\Z|{re.escape(atom)}{pattern})"
    return pattern


_HEAD = r'{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?={)'
_UNTAGGED = re.compile(rf"\n[ \t]*(?P<fence>```(?:json)?\s*)?(?P<object>{_HEAD})")
_MAY_BE_UNTAGGED = re.compile(rf"\n[ \t]*(?:{'|'.join(map(_beginning, _FORMS))})\Z")
TAGGED_HEAD = re.compile(OPEN + r"\s*" + _HEAD)
CUT_HEAD = re.compile(f"{OPEN}{_beginning([_SPACE, *_OBJECT])}\\Z")  # of a call that ends before its arguments


class Beginning(NamedTuple):
    """Where a call begins in a text; `name` and `arguments`, where these begin, are known for objects without tags."""

    form: str  # "tagged", "fenced" or "bare"
    start: int  # of its first line, with the line break before it, or of its tag
    object: int
    name: str = ""
    arguments: int = 0


def find_call(text: str, names: Collection[str]) -> Beginning | None:
    """The first call in a text, of which a line break stands for the beginning of the output; None if there is none."""
    tag = text.find(OPEN)
    for match in _UNTAGGED.finditer(text):
        if match[3] in names and (tag < 0 or match.start() < tag):
            form = "bare" if match["fence"] is None else "fenced"
            return Beginning(form, match.start(), match.start("object"), match[3], match.end())
    return Beginning("tagged", tag, tag + len(OPEN)) if tag >= 0 else None


def undecided(text: str) -> int:
    """From where on the end of a text may belong to a call whose beginning is not whole yet; its length if nowhere."""
    sizes = range(len(OPEN) - 1, 0, -1)
    tag = len(text) - next((size for size in sizes if text.endswith(OPEN[:size])), 0)
    match = _MAY_BE_UNTAGGED.search(text)
    return min(tag, match.start()) if match else tag
