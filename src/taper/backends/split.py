"""A model in two parts: its first layers on the CPU, the others and the head on a device that has no room for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError, whole_number
from ..models.config import ModelConfig
from . import Backend, ForwardOutput, TokenBatch

OpenPart = Callable[..., Backend]  # of a config and the weights of some layers, with `progress`


class SplitBackend(Backend):
    """Runs a forward on one part and then on the other; only the hidden states between them travel.

    A layer that every token skips costs nothing on either. The options are those of `LLM`.

    Args:
        config: of the whole model.
        weights: of all layers, by our names; what they are does not matter here.
        num_on_device: how many of the layers, the last ones, the device runs.
        on_cpu, on_device: build the parts.
        progress: called with the part of the weights that is loaded.

    Raises:
        RequestError: a layer on the device would need keys and values of one on the CPU.
    """

    has_preview = False

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        num_on_device: int,
        on_cpu: OpenPart,
        on_device: OpenPart,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        layers, count = len(config.layers), config.num_hidden_layers
        self.layers_on_cpu = first = count - whole_number("gpu_layers", num_on_device, 1, count - 1)
        if (least := least_on_device(config, first)) > num_on_device:
            rule = f"layers there attend to keys and values of earlier ones, so it must be {least} or more"
            raise RequestError(f"gpu_layers is {num_on_device}; {rule}", param="gpu_layers")
        advance = progress or (lambda _: None)
        of_layers = [range(first), range(first, layers)]
        held = [{name: weights[name] for name in weights if _belongs(name, config, part)} for part in of_layers]
        share = first / count
        self._cpu = on_cpu(config.holding(of_layers[0]), held[0], progress=lambda part: advance(part * share))
        try:
            self._device = on_device(
                config.holding(of_layers[1]), held[1], progress=lambda part: advance(share + part * (1 - share))
            )
        except BaseException:
            self._cpu.close()
            raise
        self.config = replace(config, quantization=self._device.config.quantization)
        self.num_slots, self.context_length = self._cpu.num_slots, self._cpu.context_length
        self.weight_bytes = self._cpu.weight_bytes | self._device.weight_bytes
        self.kernels = f"{self._device.kernels}; layers 0 to {first - 1}: {self._cpu.kernels}"
        self.layouts, self.head = self._cpu.layouts, self._device.head

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Run the batch and write its keys and values."""
        first, asked = self.layers_on_cpu, batch.output_hidden_states
        if batch.first_layer >= first:
            return self._device.forward(batch)
        below = replace(
            batch,
            num_active=batch.num_active[:first],
            logits_rows=(),
            greedy_rows=(),
            preview_rows=(),
            head_inputs=False,
            output_hidden_states=(*(layer for layer in asked if layer < first), first),
        )
        states = self._cpu.forward(below).hidden_states
        above = replace(
            batch,
            first_layer=first,
            hidden_states=states[first],
            output_hidden_states=tuple(layer for layer in asked if layer > first),
        )
        output = self._device.forward(above)
        states = {layer: states[layer] for layer in asked if layer in states} | output.hidden_states
        return replace(output, hidden_states=states)

    def resumable(self, slot: int, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a slot a forward can go on: where both parts can."""
        while (both := self._cpu.resumable(slot, self._device.resumable(slot, num_tokens))) < num_tokens:
            num_tokens = both
        return num_tokens

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy keys and values, and the state after them, from one slot to another."""
        for part in (self._cpu, self._device):
            part.copy(source, target, first, end)

    def clear(self, slot: int) -> None:
        """Write zeros over what a slot holds."""
        for part in (self._cpu, self._device):
            part.clear(slot)

    def close(self) -> None:
        """Free the memory of both parts."""
        for part in (self._cpu, self._device):
            part.close()


def least_on_device(config: ModelConfig, first: int) -> int:
    """How many of the last layers must be together for those from `first` on to have the cells that they attend to."""
    layers = range(first, config.num_hidden_layers)
    return config.num_hidden_layers - min((config.source(layer) for layer in layers), default=first)


def _belongs(name: str, config: ModelConfig, layers: range) -> bool:
    """Whether the part with these layers needs a tensor."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) in layers
    if not layers.start:
        return name not in ("lm_head", "norm")
    return name != "embed_tokens" or config.tie_word_embeddings or bool(config.layer_input_size) or config.has_mtp
