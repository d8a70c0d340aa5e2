"""What the adapters of both model runners share: from a batch to the forward that the model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger

from ..errors import TaperError
from ..policy import DepthPolicy
from .config import read_options
from .metrics import Counters
from .models import Batch, TaperedForward
from .plan import Planner, RequestTokens

logger = init_logger("vllm.taper")


class ForwardBuilder:
    """Builds each forward of one worker; `decoder` has the layers of its pipeline stage."""

    def __init__(self, vllm_config: Any, decoder: Any) -> None:
        self._options = read_options(vllm_config)
        num_hidden_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._planner = Planner(num_hidden_layers, range(decoder.start_layer, decoder.end_layer))
        self._full = self._options.named["full"]
        path = vllm_config.additional_config["taper"]["metrics"]
        # Every rank of an engine makes the same plan, so the first one counts for the whole model.
        counts = get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0
        self._counters = _counters(path, vllm_config.parallel_config.data_parallel_index) if counts else None

    def policy(self, extra_args: Mapping[str, Any] | None) -> DepthPolicy:
        """The policy of a request; a request that got past the check at admission with a wrong one runs every layer."""
        try:
            return self._options.policy(extra_args)
        except TaperError as error:
            logger.error("A request runs at full depth: %s", error)
            return self._full

    def build(self, policies: Sequence[DepthPolicy], num_tokens: np.ndarray, batch: Batch) -> TaperedForward:
        """The forward of a batch; `policies` and `num_tokens` have one entry for each request, in the batch's order."""
        numbers = (batch.first_positions.tolist(), num_tokens.tolist(), batch.prompt_lengths.tolist())
        plan = self._planner.plan(list(map(RequestTokens, policies, *numbers)))
        if self._counters is not None and plan.completion_tokens:
            self._counters.add(plan.completion_tokens, plan.layers_run)
        return TaperedForward(plan, batch)


def _counters(path: str, slot: int) -> Counters | None:
    try:
        return Counters(path, slot)
    except OSError as error:
        logger.warning("The depths of this engine will be missing at /metrics: %s", error)
        return None
