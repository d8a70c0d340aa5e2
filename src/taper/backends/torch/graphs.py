"""Decode steps captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from . import TorchBackend

# Tokens, positions and slots, int64 [N] each.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CapturedStep:
    """A CUDA graph of one decode step, with the memory it reads and writes."""

    graph: Any
    inputs: Inputs
    logits: torch.Tensor

    @classmethod
    def capture(cls, backend: TorchBackend, key: tuple[Any, ...], inputs: Inputs) -> CapturedStep:
        """Capture the step of `key`: (num_active, count, kv_length)."""
        num_active, _, kv_length = key
        tokens, positions, slots = inputs
        static = (tokens.clone(), positions.clone(), slots.clone())

        def step() -> torch.Tensor:
            x = backend._embed(static[0])
            backend._decode(x, static, num_active, None, kv_length)
            return backend._logits(x)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside the capture
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        return cls(graph, static, logits)

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """Run it on new inputs; the logits are overwritten by the next replay."""
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.logits
