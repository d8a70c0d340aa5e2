"""Rejects a request for a policy that the server does not have, with HTTP 400; the engine goes on.

The only place where vLLM lets a plug-in look at a request before it is admitted is a logits processor. This one changes
no logits, and serves both of vLLM's model runners.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from ..errors import TaperError
from .options import Options


class RequestCheck(LogitsProcessor, LogitsProcessorV2):
    """Checks `extra_args` against the options of the engine that this process made last."""

    # vLLM gives `validate_params` nothing but the request, so the options have to be kept on the class.
    options: ClassVar[Options | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Both runners pass arguments; none is needed."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Reject a request whose policy is wrong; called once, before the request is admitted."""
        if cls.options is None:
            return
        try:
            cls.options.policy(sampling_params.extra_args)
        except TaperError as error:
            raise VLLMValidationError(str(error)) from None

    def is_argmax_invariant(self) -> bool:
        """True: greedy decoding may skip this processor."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is no state."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request needs this processor."""
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        """The logits, unchanged."""
        return logits
