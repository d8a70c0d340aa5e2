"""vLLM's models with another loop over their layers; all else is vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from ..adapters import EPS
from . import check_vllm_version
from .forward import TaperedForward
from .plan import PassingTokens

check_vllm_version()


class DepthDecay:
    """Mixed into a vLLM decoder (`LlamaModel` and the like): each layer runs the tokens that retain it.

    The others pass by, through an adapter if there is one, and may leave their keys and values.
    """

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
        for layers, active, passing in tapered.plan.layer_ranges:
            # First, as the tokens that run a layer may read what was written for others of the same batch.
            for tokens in passing:
                _pass_by(self.layers, layers, tokens, tapered, hidden_states, residual)
            if not len(active.rows):
                continue
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


def _pass_by(
    modules: Any,
    layers: range,
    tokens: PassingTokens,
    tapered: TaperedForward,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """Fill and adapt for tokens that skip some layers; changes `hidden_states` [tokens, hidden_size] in place."""
    rows, positions, slots = tapered.place(tokens)
    weights = tapered.adapter_weights(tokens.adapters, residual)
    x, delta = residual[rows] + hidden_states[rows], None
    for layer in layers:
        state = x if delta is None else x + delta
        if tokens.fills:
            _fill(modules[layer], positions, state, slots)
        if layer in weights:
            change = _adapt(state, *weights[layer])
            delta = change if delta is None else delta + change
    if delta is not None:
        hidden_states.index_add_(0, rows, delta)


def _adapt(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What an adapter adds to hidden states [rows, hidden_size] (`policy.Adapters`)."""
    return F.linear(F.silu(F.linear(F.rms_norm(x, (x.shape[-1],), eps=EPS), down)), up)


def _fill(layer: Any, positions: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the keys and values of hidden states that pass a layer by, as the layer itself would.

    Args:
        layer: one of vLLM's decoder layers.
        positions: [rows]
        x: [rows, hidden_size]
        slots: [rows] where each token is in the key-value cache.
    """
    attention, cache = layer.self_attn, layer.self_attn.attn
    q_size, kv_size = attention.q_size, attention.kv_size
    projection, h = attention.qkv_proj, layer.input_layernorm(x)
    if len(projection.weight) == q_size + 2 * kv_size:
        bias = None if projection.bias is None else projection.bias[q_size:]
        kv = F.linear(h, projection.weight[q_size:], bias)
    elif (packed := getattr(attention, "taper_kv_proj", None)) is not None:
        kv = packed(h)
    else:
        kv = projection(h)[0][:, q_size:]
    keys, values = kv.view(len(x), 2, -1, attention.head_dim).unbind(1)  # [rows, num_kv_heads, head_dim] each
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    no_queries = h.new_zeros(len(x), attention.head_dim)  # of one head, as some kinds of rotary embedding need any
    keys = attention.rotary_emb(positions, no_queries, keys.reshape(len(x), kv_size))[1].view_as(values)
    cache.impl.do_kv_cache_update(cache, keys, values, cache.kv_cache, slots)


class PackedKeysAndValues:
    """The projection to keys and values, for CPUs: vLLM packs `qkv_proj` there, so no part of it can be computed."""

    def __init__(self, qkv_proj: Any, q_size: int) -> None:
        self.weight = torch.nn.Parameter(qkv_proj.weight[q_size:].clone(), requires_grad=False)
        self.bias = None if qkv_proj.bias is None else qkv_proj.bias[q_size:].clone()
        self.cpu_linear: Any = None  # vLLM sets it
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Keys and values side by side, [rows, 2 * kv_size]."""
        kv: torch.Tensor = self.cpu_linear(h, self.weight, self.bias)
        return kv


class DepthDecayForCausalLM:
    """Mixed into a vLLM causal language model: gives its decoder `DepthDecay`, and passes it each tapered forward."""

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # Not every model lets a subclass choose its decoder's class, so vLLM builds the decoder and its class changes.
        decoder_class = type(self.model)
        self.model.__class__ = type(f"Taper{decoder_class.__name__}", (DepthDecay, decoder_class), {})
        self._packs = current_platform.is_cpu() and vllm_config.cache_config.enable_prefix_caching

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """As usual; on a CPU, weights of keys and values are packed on their own too, for `_fill`."""
        loaded = super().load_weights(weights)  # type: ignore[misc]
        if self._packs:
            for layer in self.model.layers[self.model.start_layer : self.model.end_layer]:
                attention = layer.self_attn
                attention.taper_kv_proj = PackedKeysAndValues(attention.qkv_proj, attention.q_size)
        return loaded

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tapered: TaperedForward | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As `DepthDecay.forward`; `tapered` comes from runner.py."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds, tapered=tapered)

    @staticmethod
    def get_model_state_cls() -> type:
        """The model state that vLLM's V2 model runner keeps for this model."""
        from .runner import TaperModelState

        return TaperModelState


class TaperLlamaForCausalLM(DepthDecayForCausalLM, LlamaForCausalLM):
    """Llama, and models that share its layers."""


class TaperMistralForCausalLM(DepthDecayForCausalLM, MistralForCausalLM):
    """Mistral without sliding windows."""


class TaperQwen2ForCausalLM(DepthDecayForCausalLM, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class TaperQwen3ForCausalLM(DepthDecayForCausalLM, Qwen3ForCausalLM):
    """Qwen3."""
