"""From what a model runner knows of a batch to the step that the model runs: shared by both runners' adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger

from ..errors import TaperError
from ..policy import DepthPolicy
from .attention import Rows, Step
from .config import read_options
from .metrics import Counters
from .plan import Chunk, Planner

logger = init_logger("vllm.taper")


class Steps:
    """Plans each forward of one worker: `decoder` has this pipeline stage's layers."""

    def __init__(self, vllm_config: Any, decoder: Any) -> None:
        self._options = read_options(vllm_config)
        num_hidden_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._planner = Planner(num_hidden_layers, range(decoder.start_layer, decoder.end_layer))
        self._full = self._options.named["full"]
        path = vllm_config.additional_config["taper"]["metrics"]
        # All ranks of an engine plan alike: the first one counts for the whole model.
        counts = get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0
        self._counters = _counters(path, vllm_config.parallel_config.data_parallel_index) if counts else None

    def policy(self, extra_args: Mapping[str, Any] | None) -> DepthPolicy:
        """A request's policy; one that slipped past the check at admission runs every layer."""
        try:
            return self._options.policy(extra_args)
        except TaperError as error:
            logger.error("A request runs at full depth: %s", error)
            return self._full

    def make(self, policies: Sequence[DepthPolicy], num_tokens: np.ndarray, rows: Rows) -> Step:
        """The step of a batch with these requests, in its order; `num_tokens`: [requests]."""
        chunks = map(Chunk, policies, rows.first_positions.tolist(), num_tokens.tolist(), rows.prompt_lengths.tolist())
        plan = self._planner.plan(list(chunks))
        if self._counters is not None and plan.answer_tokens:
            self._counters.add(plan.answer_tokens, plan.layers_run)
        return Step(plan, rows)


def _counters(path: str, slot: int) -> Counters | None:
    try:
        return Counters(path, slot)
    except OSError as error:
        logger.warning("This engine's depths are not at /metrics: %s", error)
        return None
