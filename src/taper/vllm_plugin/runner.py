"""From a batch of vLLM's model runners to the forward that the model runs.

vLLM has two model runners. The V1 runner's documented override, `_model_forward`, hands the model each tapered forward
(`DepthDecayRunner`); the V2 runner's hook is the model's state (`TaperModelState`). Both use a `ForwardBuilder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from ..errors import TaperError
from ..policy import DepthPolicy
from .config import read_options
from .metrics import Counters
from .models import Batch, TaperedForward, only_attention_group
from .plan import Planner, RequestTokens

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

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
