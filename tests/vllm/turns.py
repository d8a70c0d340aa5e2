"""Conversations in transformers, whose later turns reuse filled keys and values: what the plug-in has to equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from taper import DepthPolicy
from taper.adapters import EPS


class Conversation:
    """One conversation with a model of transformers', written to be obviously right: greedy, one row, f32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = _Cache(model.config.num_hidden_layers)
        self.ids: list[int] = []  # the tokens whose keys and values are in the cache

    def answer(self, prompt: list[int], policy: DepthPolicy, max_tokens: int, reused: int = 0) -> list[int]:
        """A completion, of which the first `reused` tokens of the prompt keep their keys and values."""
        assert prompt[:reused] == self.ids[:reused]
        self.cache.keep(reused)
        self.ids = self.ids[:reused]
        completion = [self._run(prompt[reused:], policy, step=0)]
        for step in range(1, max_tokens):
            completion.append(self._run(completion[-1:], policy, step))
        return completion

    @torch.no_grad()
    def _run(self, ids: list[int], policy: DepthPolicy, step: int) -> int:
        decoder, retained = self.model.model, policy.retained_layers(step)
        positions = torch.arange(len(self.ids), len(self.ids) + len(ids))[None]
        self.ids += ids
        x = decoder.embed_tokens(torch.tensor([ids]))  # [1, tokens, hidden_size]
        future = torch.arange(len(self.ids))[None] > positions[0, :, None]
        options = {
            "attention_mask": torch.zeros(future.shape).masked_fill(future, float("-inf"))[None, None],
            "position_ids": positions,
            "position_embeddings": decoder.rotary_emb(x, positions),
            "past_key_values": self.cache,
        }
        for index, layer in enumerate(decoder.layers):
            self.cache.only_write = index not in retained
            try:
                x = layer(x, **options)
            except _Written:
                x = _pass(x, policy, index)
        return int(self.model.lm_head(decoder.norm(x[:, -1])).argmax())


class _Written(Exception):
    """Keys and values are written, and nothing after is wanted of the layer."""


class _Cache:
    """Keys and values of each layer, [1, num_key_value_heads, tokens, head_dim]."""

    def __init__(self, num_hidden_layers: int) -> None:
        self.only_write = False
        self._layers: list[tuple[torch.Tensor, ...] | None] = [None] * num_hidden_layers

    def keep(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self._layers = [layer and tuple(each[:, :, :tokens] for each in layer) for layer in self._layers]

    def update(self, keys: Any, values: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """As transformers' caches, but a layer that only writes gets no further than this."""
        before = self._layers[layer_idx] or (keys[:, :, :0], values[:, :, :0])
        both = tuple(torch.cat([old, new], dim=2) for old, new in zip(before, (keys, values), strict=True))
        self._layers[layer_idx] = both
        if self.only_write:
            raise _Written
        return both


def _pass(x: torch.Tensor, policy: DepthPolicy, index: int) -> torch.Tensor:
    if policy.adapters is None or index not in policy.adapters.layers:
        return x
    down, up = (torch.from_numpy(matrix).to(x) for matrix in policy.adapters.layers[index])
    return x + F.silu(F.rms_norm(x, x.shape[-1:], eps=EPS) @ down.T) @ up.T
