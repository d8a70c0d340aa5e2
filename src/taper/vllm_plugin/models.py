"""vLLM's models with another loop over their layers; everything else is vLLM's own."""

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
    from .attention import TaperedForward

check_vllm_version()


class DepthDecay:
    """Mixed into a vLLM decoder (`LlamaModel` and the like): each layer runs the tokens that retain it."""

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,  # [tokens]
        positions: torch.Tensor,  # [tokens]
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tapered: TaperedForward | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states: [tokens, hidden_size]; between pipeline stages, with their residual."""
        if tapered is None or tapered.plan.full:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]
        if intermediate_tensors is None:
            residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            hidden_states = torch.zeros_like(residual)
        else:
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        for layers, active in tapered.plan.layer_ranges:
            modules = self.layers[layers.start : layers.stop]
            if active.whole_batch:
                hidden_states, residual = _run(modules, positions, hidden_states, residual)
                continue
            names = [layer.self_attn.attn.layer_name for layer in modules]
            rows, active_positions = tapered.prepare_attention(active, names)
            states = _run(
                modules, active_positions, hidden_states.index_select(0, rows), residual.index_select(0, rows)
            )
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
    """Mixed into a vLLM causal language model: gives its decoder `DepthDecay`, and hands it each tapered forward."""

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # Not every model lets a subclass choose its decoder's class, so vLLM builds the decoder and its class changes.
        decoder_class = type(self.model)
        self.model.__class__ = type(f"Taper{decoder_class.__name__}", (DepthDecay, decoder_class), {})

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tapered: TaperedForward | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As `DepthDecay.forward`; `tapered` comes from the runner's adapter."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds, tapered=tapered)

    @staticmethod
    def get_model_state_cls() -> type:
        """The model state that vLLM's V2 model runner keeps for this model."""
        from .runner_v2 import TaperModelState

        return TaperModelState


class TaperLlamaForCausalLM(DepthDecayForCausalLM, LlamaForCausalLM):
    """Llama, and models that share its layers."""


class TaperMistralForCausalLM(DepthDecayForCausalLM, MistralForCausalLM):
    """Mistral without sliding windows."""


class TaperQwen2ForCausalLM(DepthDecayForCausalLM, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class TaperQwen3ForCausalLM(DepthDecayForCausalLM, Qwen3ForCausalLM):
    """Qwen3."""
