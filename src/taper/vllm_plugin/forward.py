"""A tapered forward as the models run it: its plan, and attention metadata for each set of tokens that runs a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..adapters import Adapters
from ..errors import ModelError
from .options import RequestOptions
from .plan import ActiveTokens, PassingTokens, Plan

# In these backends, building metadata leaves metadata built earlier valid, as their source shows.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


class Batch(NamedTuple):
    """The requests of a forward, and where vLLM's runner has their tokens, keys and values."""

    requests: Sequence[RequestOptions]  # in the order of their tokens
    first_positions: np.ndarray  # [requests]; this and the next two on the host
    num_tokens: np.ndarray  # [requests]
    prompt_lengths: np.ndarray  # [requests]
    attention_group: Any
    block_table: torch.Tensor  # [requests, blocks]; this and the next two on the device
    slot_mapping: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]


class TaperedForward:
    """The plan of one forward, and the attention metadata of each of its sets of active tokens.

    `weights`: those of adapters on the device; forwards share it.
    """

    def __init__(self, plan: Plan, batch: Batch, weights: WeakKeyDictionary[Adapters, Any]) -> None:
        self.plan = plan
        self._batch, self._weights = batch, weights
        self._built: dict[int, tuple[torch.Tensor, CommonAttentionMetadata, Any]] = {}
        self._placed: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def place(self, tokens: PassingTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of these tokens in the batch, their positions and their slots in the cache, each [tokens]."""
        if id(tokens) not in self._placed:
            batch = self._batch
            rows = torch.from_numpy(tokens.rows).to(batch.positions.device, non_blocking=True)
            self._placed[id(tokens)] = rows, batch.positions[rows], batch.slot_mapping[rows]
        return self._placed[id(tokens)]

    def adapter_weights(
        self, adapters: Adapters | None, like: torch.Tensor
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Adapters by layer, of the type and on the device of hidden states; put there when they are first needed."""
        if adapters is None:
            return {}
        weights = self._weights.get(adapters)
        if weights is None:
            pairs = adapters.layers.items()
            weights = {layer: tuple(torch.from_numpy(matrix).to(like) for matrix in pair) for layer, pair in pairs}
            self._weights[adapters] = weights
        return weights

    def prepare_attention(self, active: ActiveTokens, layer_names: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the named layers attend with the active tokens only.

        Returns:
            The rows of these tokens in the batch and their positions, both [active tokens].
        """
        if id(active) not in self._built:
            self._built[id(active)] = self._build(active)
        rows, common, metadata = self._built[id(active)]
        context = get_forward_context()
        for name in layer_names:
            context.attn_metadata[name] = metadata
            context.slot_mapping[name] = common.slot_mapping
        return rows, common.positions

    def _build(self, active: ActiveTokens) -> tuple[torch.Tensor, CommonAttentionMetadata, Any]:
        batch, device = self._batch, self._batch.positions.device
        counts, first_positions = active.counts[active.requests], batch.first_positions[active.requests]
        seq_lens = torch.from_numpy((first_positions + counts).astype(np.int32))
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        rows = torch.from_numpy(active.rows).to(device, non_blocking=True)
        requests = torch.from_numpy(active.requests).to(device, non_blocking=True)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device, non_blocking=True),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(active.requests),
            num_actual_tokens=len(active.rows),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=batch.block_table.index_select(0, requests),
            slot_mapping=batch.slot_mapping.index_select(0, rows),
            causal=True,
            positions=batch.positions.index_select(0, rows),
            is_prefilling=torch.from_numpy(first_positions < batch.prompt_lengths[active.requests]),
        )
        return rows, common, batch.attention_group.build_metadata(common)


def only_attention_group(attention_groups: Any) -> Any:
    """The attention group of a model whose layers are all alike.

    Raises:
        ModelError: there is more than one, or its backend is not in BACKENDS.
    """
    groups = [group for cache_groups in attention_groups for group in cache_groups]
    if len(groups) != 1:
        raise ModelError(f"the layers form {len(groups)} attention groups", "Taper needs layers that are all alike")
    if (name := groups[0].backend.get_name()) not in BACKENDS:
        raise ModelError(f"attention backend {name} is not supported", f"--attention-backend: {', '.join(BACKENDS)}")
    return groups[0]
