"""What a user can get wrong. Shown as one line; anything else that is raised is a bug of ours."""

from __future__ import annotations


class TaperError(Exception):
    """A mistake the user can mend: what was wrong and the rule, then what to do about it.

    Args:
        message: the offending value and the rule it breaks, one line.
        hint: what to do next, one line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.message} ({self.hint})" if self.hint else self.message
        return " ".join(line.split())


class PolicyError(TaperError):
    """A depth policy that breaks a rule, or does not belong to the model."""


class ModelError(TaperError):
    """A model that is missing, damaged or not supported."""


class RequestError(TaperError):
    """A request that cannot be served: a sampling parameter out of range, a prompt that does not fit."""


class TaperWarning(UserWarning):
    """Something the user should know and need not act on: one line."""
