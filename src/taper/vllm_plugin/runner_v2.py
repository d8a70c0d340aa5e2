"""vLLM's V2 model runner: its `ModelState` hook brings the step to the model."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from ..policy import DepthPolicy
from .attention import Rows, Step, the_attention_group
from .steps import Steps


class TaperModelState(DefaultModelState):
    """The default state, plus each request's policy and prompt length, and the step of the batch being prepared."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._steps = Steps(vllm_config, model.model)
        self._requests: dict[str, tuple[DepthPolicy, int]] = {}
        self._step: Step | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Remember a request; one resumed after preemption comes again, with the same prompt."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        policy = self._steps.policy(params and params.extra_args)
        self._requests[new_req_data.req_id] = (policy, len(new_req_data.prompt_token_ids))

    def remove_request(self, req_id: str) -> None:
        """Forget a request that ended or was preempted."""
        super().remove_request(req_id)
        self._requests.pop(req_id, None)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[Any, ...],
        slot_mappings: Any,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The whole batch's attention metadata, as ever; the step is planned on the way."""
        self._step = None
        # A dummy batch, for memory profiling, has requests that nobody added: it runs every layer.
        if all(request in self._requests for request in input_batch.req_ids):
            requests = [self._requests[request] for request in input_batch.req_ids]
            group = the_attention_group(attn_groups)
            rows = Rows(
                attention_group=group,
                first_positions=input_batch.num_computed_tokens_np[: len(requests)],
                prompt_lengths=np.array([length for _, length in requests]),
                block_table=block_tables[group.kv_cache_group_id],
                slot_mapping=slot_mappings[group.kv_cache_group_id],
                positions=input_batch.positions,
            )
            num_tokens = input_batch.num_scheduled_tokens[: len(requests)]
            self._step = self._steps.make([policy for policy, _ in requests], num_tokens, rows)
        whole: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )
        return whole

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """The model's arguments, as ever, and the step; vLLM asks for these after `prepare_attn`."""
        step, self._step = self._step, None
        return {**super().prepare_inputs(input_batch, req_states), "step": step}
