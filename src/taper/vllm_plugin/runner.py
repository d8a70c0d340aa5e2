"""From a batch of vLLM's to the forward that the model runs, in either of vLLM's two model runners.

vLLM chooses V1 on a CPU and V2 on a GPU; importing its workers loads both.

- V1: `Worker` mixes `DepthDecayRunner` into the runner, whose `_model_forward` is made to be overridden.
- V2: the models give the runner `TaperModelState` as their own state.

Both pass the model a `TaperedForward` from `ForwardBuilder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..adapters import Adapters
from .forward import Batch, TaperedForward, only_attention_group
from .metrics import counters
from .options import PluginOptions, RequestOptions
from .plan import Planner, RequestTokens

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

# After the CPU's worker, which has to patch torch before other modules of the runners are imported.
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

logger = init_logger("vllm.taper")


class ForwardBuilder:
    """Builds each forward of one worker; `decoder` has the layers of its pipeline stage."""

    def __init__(self, vllm_config: Any, decoder: Any) -> None:
        model, config = vllm_config.model_config.hf_text_config, vllm_config.additional_config
        self._options = PluginOptions.read(config["taper"], model)
        # Without prefix caching no later prompt reads what skipped layers would write.
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._adapter_weights: WeakKeyDictionary[Adapters, Any] = WeakKeyDictionary()
        self._planner = Planner(model.num_hidden_layers, range(decoder.start_layer, decoder.end_layer))
        self._counters: np.ndarray | None = None
        # Every rank of an engine makes the same plan, so the first one counts for the whole model.
        if get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0:
            try:
                self._counters = counters(config["taper_metrics"], vllm_config.parallel_config.data_parallel_index)
            except OSError as error:
                logger.warning("The depths of this engine will be missing at /metrics: %s", error)

    def request(self, sampling_params: Any) -> RequestOptions:
        """The options of a request that was admitted."""
        return self._options.admitted(sampling_params and sampling_params.extra_args)

    def build(self, batch: Batch) -> TaperedForward:
        """The forward of a batch."""
        numbers = (batch.first_positions.tolist(), batch.num_tokens.tolist(), batch.prompt_lengths.tolist())
        policies = [request.policy for request in batch.requests]
        fills = [self._caches_prefixes and request.fills for request in batch.requests]
        plan = self._planner.plan(list(map(RequestTokens, policies, *numbers, fills)))
        if self._counters is not None and plan.completion_tokens:
            self._counters += (plan.completion_tokens, plan.layers_run)
        return TaperedForward(plan, batch, self._adapter_weights)


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
            requests=[self.taper_builder.request(self.requests[name].sampling_params) for name in state.req_ids],
            first_positions=state.num_computed_tokens_cpu[:num_requests],
            num_tokens=np.diff(self.query_start_loc.np[: num_requests + 1]),
            prompt_lengths=state.num_prompt_tokens[:num_requests],
            attention_group=group,
            block_table=state.block_table[group.kv_cache_group_id].get_device_tensor(num_requests),
            slot_mapping=context.slot_mapping[group.layer_names[0]],
            positions=kwargs["positions"],
        )
        return super()._model_forward(*args, **kwargs, tapered=self.taper_builder.build(batch))  # type: ignore[misc]


class Worker(PlatformWorker):
    """The platform's own worker, with `DepthDecayRunner` mixed into its V1 model runner."""

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


class TaperModelState(DefaultModelState):
    """V2's default state, plus the options and prompt length of each request, and the forward of the next batch."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._builder = ForwardBuilder(vllm_config, model.model)
        self._requests: dict[str, tuple[RequestOptions, int]] = {}
        self._tapered: TaperedForward | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Remember a request; one that resumes after preemption is added again, with the same prompt."""
        super().add_request(req_index, new_req_data)
        options = self._builder.request(new_req_data.sampling_params)
        self._requests[new_req_data.req_id] = (options, len(new_req_data.prompt_token_ids))

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
                requests=[options for options, _ in requests],
                first_positions=input_batch.num_computed_tokens_np[: len(requests)],
                num_tokens=input_batch.num_scheduled_tokens[: len(requests)],
                prompt_lengths=np.array([length for _, length in requests]),
                attention_group=group,
                block_table=block_tables[group.kv_cache_group_id],
                slot_mapping=slot_mappings[group.kv_cache_group_id],
                positions=input_batch.positions,
            )
            self._tapered = self._builder.build(batch)
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )
        return metadata

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """The model's arguments, as usual, and the tapered forward; vLLM calls this after `prepare_attn`."""
        tapered, self._tapered = self._tapered, None
        return {**super().prepare_inputs(input_batch, req_states), "tapered": tapered}
