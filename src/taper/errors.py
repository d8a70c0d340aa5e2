"""What a user can get wrong. Shown as one line; anything else that is raised is a bug of ours."""

from __future__ import annotations

import re

MAX_CHARACTERS = 1000  # of a message and of a hint; names that come from files have no limit of their own

# Colours, cursor movements and the like; titles and links. What is not whole loses its control characters only.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)")


class TaperError(Exception):
    """A mistake the user can mend: the offending value and the rule it breaks; then a hint what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        message, hint = printable(self.message), printable(self.hint)
        return f"{message} ({hint})" if hint else message


class PolicyError(TaperError):
    """A depth policy that breaks a rule, or does not belong to the model."""


class ModelError(TaperError):
    """A model that is missing, damaged or not supported."""


class RequestError(TaperError):
    """A request that cannot be served: a sampling parameter out of range, a prompt that does not fit."""


class TaperWarning(UserWarning):
    """Something the user should know and need not act on: one line."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Text as one line that a terminal only shows: no escape sequences, control characters or bidi overrides."""
    line = " ".join(_ESCAPES.sub("", text).split())
    if len(line) > MAX_CHARACTERS:
        line = f"{line[: MAX_CHARACTERS - 3]}..."
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
