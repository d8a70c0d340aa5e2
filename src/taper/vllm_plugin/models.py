"""vLLM's models with their loop over layers replaced; everything else of them is as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors

from . import check_vllm_version

if TYPE_CHECKING:
    from .attention import Step

check_vllm_version()


class DepthDecay:
    """In front of a vLLM decoder (`LlamaModel` and its like): each layer runs the rows that retain it."""

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,  # [tokens]
        positions: torch.Tensor,  # [tokens]
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        step: Step | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states: [tokens, hidden_size]; between pipeline stages, with their residual."""
        if step is None or step.plan.full:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]
        if intermediate_tensors is None:
            residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            hidden_states = torch.zeros_like(residual)
        else:
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        for layers, active in step.plan.runs:
            modules = self.layers[layers.start : layers.stop]
            if active.everyone:
                hidden_states, residual = _run(modules, positions, hidden_states, residual)
                continue
            rows, at = step.enter(active, [layer.self_attn.attn.layer_name for layer in modules])
            states = _run(modules, at, hidden_states.index_select(0, rows), residual.index_select(0, rows))
            hidden_states.index_copy_(0, rows, states[0])
            residual.index_copy_(0, rows, states[1])
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        return self.norm(hidden_states, residual)[0]


def _run(
    layers: Any, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    for layer in layers:
        hidden_states, residual = layer(positions, hidden_states, residual)
    return hidden_states, residual


class DepthDecayForCausalLM:
    """In front of a vLLM causal language model: puts `DepthDecay` before its decoder, and brings it the step."""

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # Not every model lets a subclass choose the decoder's class, and its construction is to stay vLLM's own.
        kind = type(self.model)
        self.model.__class__ = type(f"Taper{kind.__name__}", (DepthDecay, kind), {})

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        step: Step | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As `DepthDecay.forward`; `step` comes from the runner's adapter."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds, step=step)

    @staticmethod
    def get_model_state_cls() -> type:
        """What vLLM's V2 model runner keeps for this model."""
        from .runner_v2 import TaperModelState

        return TaperModelState


class TaperLlamaForCausalLM(DepthDecayForCausalLM, LlamaForCausalLM):
    """Llama and what shares its layers."""


class TaperMistralForCausalLM(DepthDecayForCausalLM, MistralForCausalLM):
    """Mistral without sliding windows."""


class TaperQwen2ForCausalLM(DepthDecayForCausalLM, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class TaperQwen3ForCausalLM(DepthDecayForCausalLM, Qwen3ForCausalLM):
    """Qwen3."""
