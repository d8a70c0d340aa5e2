"""What several commands need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..llm import LLM

INTERRUPTED = 130


def load(options: dict[str, Any]) -> LLM:
    from ..llm import LLM
    from ..loading import DEFAULT_MODEL
    from ..terminal import waiting

    model = DEFAULT_MODEL if options["model"] is None else options["model"]
    with waiting(f"loading {model}"):
        return LLM(model, **{name: options[name] for name in ("device", "dtype", "context", "threads")})


def say(line: str) -> None:
    print(line, file=sys.stderr)
