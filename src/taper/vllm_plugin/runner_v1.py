"""vLLM's V1 model runner: its documented override, `_model_forward`, brings the step to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from .attention import Rows, the_attention_group
from .steps import Steps

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class DepthDecayRunner:
    """In front of a V1 model runner."""

    taper_steps: Steps | None = None

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        if self.taper_steps is None:
            self.taper_steps = Steps(self.vllm_config, self.get_model().model)
        group = the_attention_group(self.attn_groups)
        batch, count = self.input_batch, self.input_batch.num_reqs
        rows = Rows(
            attention_group=group,
            first_positions=batch.num_computed_tokens_cpu[:count],
            prompt_lengths=batch.num_prompt_tokens[:count],
            block_table=batch.block_table[group.kv_cache_group_id].get_device_tensor(count),
            slot_mapping=context.slot_mapping[group.layer_names[0]],
            positions=kwargs["positions"],
        )
        num_tokens = np.diff(self.query_start_loc.np[: count + 1])
        params = [self.requests[request].sampling_params for request in batch.req_ids]
        policies = [self.taper_steps.policy(param and param.extra_args) for param in params]
        step = self.taper_steps.make(policies, num_tokens, rows)
        return super()._model_forward(*args, **kwargs, step=step)  # type: ignore[misc]


class Worker(PlatformWorker):
    """The platform's own worker, its model runner with `DepthDecayRunner` in front."""

    def init_device(self) -> None:
        """As ever, and then the runner's class: vLLM names that outright, so it cannot be chosen before."""
        super().init_device()
        kind = type(self.model_runner)
        self.model_runner.__class__ = type(f"Taper{kind.__name__}", (DepthDecayRunner, kind), {})

    def determine_available_memory(self) -> int:
        """As ever; before it, on a CPU, the dummy run that makes a later pipeline stage's buffers."""
        # vLLM's CPU worker leaves it out when layers run eagerly, and then fails at the first batch.
        if current_platform.is_cpu() and not get_pp_group().is_first_rank:
            self.model_runner.profile_run()
        memory: int = super().determine_available_memory()
        return memory
