"""vLLM's V2 model runner: its `ModelState` hook hands the model each tapered forward."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from ..policy import DepthPolicy
from .models import Batch, TaperedForward, only_attention_group
from .runner import ForwardBuilder


class TaperModelState(DefaultModelState):
    """The default state, plus the policy and prompt length of each request, and the forward of the next batch."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._builder = ForwardBuilder(vllm_config, model.model)
        self._requests: dict[str, tuple[DepthPolicy, int]] = {}
        self._tapered: TaperedForward | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Remember a request; one that resumes after preemption is added again, with the same prompt."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        policy = self._builder.policy(params and params.extra_args)
        self._requests[new_req_data.req_id] = (policy, len(new_req_data.prompt_token_ids))

    def remove_request(self, req_id: str) -> None:
        """Forget a request that has ended or was preempted."""
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
        """The attention metadata of the whole batch, as usual; the tapered forward is built here too."""
        self._tapered = None
        # The requests of a dummy batch, for memory profiling, were never added: it runs every layer.
        if all(request in self._requests for request in input_batch.req_ids):
            requests = [self._requests[request] for request in input_batch.req_ids]
            group = only_attention_group(attn_groups)
            batch = Batch(
                attention_group=group,
                first_positions=input_batch.num_computed_tokens_np[: len(requests)],
                prompt_lengths=np.array([length for _, length in requests]),
                block_table=block_tables[group.kv_cache_group_id],
                slot_mapping=slot_mappings[group.kv_cache_group_id],
                positions=input_batch.positions,
            )
            num_tokens = input_batch.num_scheduled_tokens[: len(requests)]
            self._tapered = self._builder.build([policy for policy, _ in requests], num_tokens, batch)
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )
        return metadata

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """The model's arguments, as usual, and the tapered forward; vLLM calls this after `prepare_attn`."""
        tapered, self._tapered = self._tapered, None
        return {**super().prepare_inputs(input_batch, req_states), "tapered": tapered}
