"""vLLM's V1 model runner: its documented override, `_model_forward`, hands the model each tapered forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from .models import Batch, only_attention_group
from .runner import ForwardBuilder

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class DepthDecayRunner:
    """Mixed into a V1 model runner."""

    taper_builder: ForwardBuilder | None = None

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        if self.taper_builder is None:
            self.taper_builder = ForwardBuilder(self.vllm_config, self.get_model().model)
        group = only_attention_group(self.attn_groups)
        state, num_requests = self.input_batch, self.input_batch.num_reqs
        batch = Batch(
            attention_group=group,
            first_positions=state.num_computed_tokens_cpu[:num_requests],
            prompt_lengths=state.num_prompt_tokens[:num_requests],
            block_table=state.block_table[group.kv_cache_group_id].get_device_tensor(num_requests),
            slot_mapping=context.slot_mapping[group.layer_names[0]],
            positions=kwargs["positions"],
        )
        num_tokens = np.diff(self.query_start_loc.np[: num_requests + 1])
        params = [self.requests[request].sampling_params for request in state.req_ids]
        policies = [self.taper_builder.policy(param and param.extra_args) for param in params]
        tapered = self.taper_builder.build(policies, num_tokens, batch)
        return super()._model_forward(*args, **kwargs, tapered=tapered)  # type: ignore[misc]


class Worker(PlatformWorker):
    """The platform's own worker, with `DepthDecayRunner` mixed into its model runner."""

    def init_device(self) -> None:
        """As usual; then change the class of the model runner, which vLLM does not let a worker choose."""
        super().init_device()
        runner_class = type(self.model_runner)
        self.model_runner.__class__ = type(f"Taper{runner_class.__name__}", (DepthDecayRunner, runner_class), {})

    def determine_available_memory(self) -> int:
        """As usual; on a CPU, first do the dummy run that makes the buffers of later pipeline stages."""
        # vLLM's CPU worker leaves that run out when layers run eagerly, and then fails at the first batch.
        if current_platform.is_cpu() and not get_pp_group().is_first_rank:
            self.model_runner.profile_run()
        memory: int = super().determine_available_memory()
        return memory
