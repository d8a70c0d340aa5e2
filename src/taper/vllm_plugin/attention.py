"""What attention reads when only some rows of a batch run a layer: built once per active set, shared by its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..errors import ModelError
from .plan import ActiveSet, Plan

# Backends whose metadata of one set stays valid when that of another is built: read in their source.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


class Rows(NamedTuple):
    """Where a batch's tokens and keys and values lie, as vLLM's runner has it before the forward.

    first_positions, prompt_lengths: [requests] on the host.
    block_table: [requests, blocks], slot_mapping and positions: [tokens], on the device.
    """

    attention_group: Any
    first_positions: np.ndarray
    prompt_lengths: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor


class Step:
    """One forward's plan, and the attention metadata of each of its active sets."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        self.plan = plan
        self._rows = rows
        self._built: dict[int, tuple[torch.Tensor, CommonAttentionMetadata, Any]] = {}

    def enter(self, active: ActiveSet, layer_names: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Have the layers of these names attend with the active rows; their indices and positions, [active tokens]."""
        if id(active) not in self._built:
            self._built[id(active)] = self._build(active)
        tokens, common, metadata = self._built[id(active)]
        context = get_forward_context()
        for name in layer_names:
            context.attn_metadata[name] = metadata
            context.slot_mapping[name] = common.slot_mapping
        return tokens, common.positions

    def _build(self, active: ActiveSet) -> tuple[torch.Tensor, CommonAttentionMetadata, Any]:
        rows, device = self._rows, self._rows.positions.device
        chosen, counts = active.chunks, active.counts[active.chunks]
        seq_lens = torch.from_numpy((rows.first_positions[chosen] + counts).astype(np.int32))
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        tokens = torch.from_numpy(active.tokens).to(device, non_blocking=True)
        requests = torch.from_numpy(chosen).to(device, non_blocking=True)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device, non_blocking=True),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(chosen),
            num_actual_tokens=len(active.tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=rows.block_table.index_select(0, requests),
            slot_mapping=rows.slot_mapping.index_select(0, tokens),
            causal=True,
            positions=rows.positions.index_select(0, tokens),
            is_prefilling=torch.from_numpy(rows.first_positions[chosen] < rows.prompt_lengths[chosen]),
        )
        return tokens, common, rows.attention_group.build_metadata(common)


def the_attention_group(attention_groups: Any) -> Any:
    """The one attention group of a model whose layers are all alike.

    Raises:
        ModelError: there are more, or its backend is one that this was not written for.
    """
    groups = [group for of_cache in attention_groups for group in of_cache]
    if len(groups) != 1:
        raise ModelError(f"the layers fall into {len(groups)} attention groups", "Taper needs layers that are alike")
    if (name := groups[0].backend.get_name()) not in BACKENDS:
        raise ModelError(f"attention backend {name} is not tested", f"--attention-backend: {', '.join(BACKENDS)}")
    return groups[0]
