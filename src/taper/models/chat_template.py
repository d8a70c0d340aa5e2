"""Chat templates: programs that come with a model, run in a process with limits of memory and time.

Jinja's sandbox limits neither, and leaves that to the operating system. The process runs `template_worker.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .limited_process import LimitedProcess, LimitExceeded, Limits

MAX_SOURCE = 1 << 16  # characters of a template; the largest real ones have a third of that
MAX_OUTPUT, OUTPUT_PER_CHARACTER = 1 << 20, 4  # characters of the rendered text; more for each one of the messages
MAX_MEGABYTES = 512
MAX_SECONDS = 5.0  # of processor time


class ChatTemplate:
    """A template, given as its source."""

    def __init__(self, source: str) -> None:
        self.source = source
        if source:
            _PROCESS.start()  # it imports Jinja while this process reads the model

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the values that the template reads; none if it is damaged."""
        try:
            return frozenset(self._run(None)["variables"])
        except (RequestError, KeyError):
            return frozenset()

    def render(self, values: Mapping[str, Any]) -> str:
        """The text of the template with these values, which must be JSON.

        Raises:
            RequestError: the template rejects them, fails, or exceeds a limit.
        """
        reply = self._run(values)
        if "too_long" in reply:
            raise _too_much(f"writes more than {reply['too_long']} characters")
        if "refused" in reply:
            raise RequestError(f"the model's chat template refused these messages: {reply['refused']}")
        return str(reply["text"])

    def _run(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        if len(self.source) > MAX_SOURCE:
            raise _too_much(f"has {len(self.source)} characters; at most {MAX_SOURCE} are run")
        try:
            payload = json.dumps(values, ensure_ascii=False, default=dict)  # other mappings are objects too
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages must be JSON: {error}") from None
        max_characters = MAX_OUTPUT + OUTPUT_PER_CHARACTER * len(payload)
        try:
            reply: dict[str, Any] = _PROCESS.ask(f"[{json.dumps(self.source)}, {payload}, {max_characters}]")
        except LimitExceeded as error:
            raise _too_much(str(error)) from None
        except OSError as error:
            raise RequestError(f"cannot start the process that runs chat templates: {error.strerror}") from None
        return reply


_PROCESS = LimitedProcess(Path(__file__).with_name("template_worker.py"), Limits(MAX_SECONDS, MAX_MEGABYTES))


def _too_much(reason: str) -> RequestError:
    return RequestError(f"the model's chat template {reason}", "a template of a chat model does far less")
