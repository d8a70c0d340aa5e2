"""The values that a model's file gives, by transformers' names, each of the kind that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import shown
from ..errors import ModelError


class Settings:
    """Values of config.json or of a GGUF header; None counts as missing.

    Args:
        values: by transformers' names.
        source: the file's name, for messages.
        names: the file's own names of keys, where they are others.
    """

    def __init__(self, values: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None) -> None:
        self.values, self.source, self._names = values, source, names or {}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of a kind.

        Raises:
            ModelError: it is missing without a default, or of another type.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source} lacks {self._named(key)}", "the file is damaged or incomplete")
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if type(value) is not kind:
            raise self.error(key, f"it must be of type {kind.__name__}")
        return value

    def error(self, key: str, rule: str) -> ModelError:
        """The error for a value that breaks a rule."""
        return ModelError(f"{self.source}: {self._named(key)} is {shown(self.values.get(key))}; {rule}")

    def _named(self, key: str) -> str:
        return self._names.get(key, key)


def head_size(settings: Settings) -> int:
    """Values of a head: as the file says, or those of the hidden states shared out."""
    heads: int = settings.get("num_attention_heads", int)
    head_dim: int = settings.get("head_dim", int, settings.get("hidden_size", int) // max(heads, 1))
    return head_dim
