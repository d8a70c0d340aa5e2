"""Refuses a request that asks for a policy the server does not have: HTTP 400, and the engine lives on.

vLLM has one place where a plug-in may look at a request before it is admitted, and it belongs to logits processors.
This one changes no logits; it serves both of vLLM's model runners.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from ..errors import TaperError
from .options import Options


class RequestCheck(LogitsProcessor, LogitsProcessorV2):
    """Checks `extra_args` against the options of this process's engine (of the last one made, if there are more)."""

    # vLLM hands `validate_params` nothing but the request, so what to check it against has to stand here.
    options: ClassVar[Options | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing to keep: neither runner's arguments matter."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise for a request whose policy is wrong; called once, before it is admitted."""
        if cls.options is None:
            return
        try:
            cls.options.policy(sampling_params.extra_args)
        except TaperError as error:
            raise VLLMValidationError(str(error)) from None

    def is_argmax_invariant(self) -> bool:
        """True: greedy decoding may leave this out."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing to keep."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request needs this."""
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        """The logits as they are."""
        return logits
