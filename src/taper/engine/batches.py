"""From the scheduled tokens of sequences to the batches of forwards, and back to what was predicted for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..adapters import Adapters
from ..backends import Backend, ForwardOutput, PreviewedLogits, TokenBatch
from ..policy import DepthPolicy, active_prefixes
from .drafting import Draft
from .mtp import uses_mtp
from .sequence import Sequence

MAX_REACH = 16.0  # of a shortlist below the highest logit; where more matters, the whole head is computed at once

Prediction = np.ndarray | PreviewedLogits | int  # logits float32 [vocab_size], approximations, or the argmax
Layers = tuple[tuple[int, ...], Adapters | None]  # the skip order of a forward, and the adapters of skipped layers


class Scheduled(NamedTuple):
    """Tokens of one sequence in a forward."""

    sequence: Sequence
    token_ids: list[int]
    position: int  # of the first
    depths: list[int]  # of each token, never rising
    num_outputs: int  # how many trailing tokens need a prediction; of those, all but the first are proposed ones
    policy: DepthPolicy
    draft: Draft | None = None  # the proposed ones are the first tokens of it


class Forward(NamedTuple):
    """A forward over the tokens of some parts."""

    batch: TokenBatch
    parts: list[int]  # of each row, the index of its part
    verifies: bool  # whether a part has several tokens
    is_timed: bool  # whether plans for drafts learn from its time


class Predicted(NamedTuple):
    """What was computed of one part."""

    predictions: list[Prediction]
    head_inputs: np.ndarray | None  # of each token, float32 [n, hidden_size], where they are needed


class _Token(NamedTuple):
    """One row of a batch."""

    part: int
    token_id: int
    position: int
    depth: int
    needs_prediction: bool


def forwards(
    backend: Backend, scheduled: list[Scheduled], uses_shortlist: bool, proposes: bool = False
) -> Iterator[Forward]:
    """One forward for each skip order and its adapters, in which each part gets logits, or the argmax if that suffices.

    If it `proposes`, there are logits only, and keys and values are not for later use.
    """
    config = backend.config
    for (skip_order, adapters), members in _grouped(scheduled, config.num_hidden_layers).items():
        tokens = [
            _Token(index, token_id, part.position + offset, depth, offset >= len(part.token_ids) - part.num_outputs)
            for index, part in members
            for offset, (token_id, depth) in enumerate(zip(part.token_ids, part.depths, strict=True))
        ]
        # Stable: tokens of a slot stay in their order. Slots side by side attend together.
        tokens.sort(key=lambda token: (-token.depth, scheduled[token.part].sequence.slot))
        requests = {index: part.sequence.request for index, part in members}
        is_greedy = {index: not proposes and request.is_greedy for index, request in requests.items()}
        is_previewed = {
            index: uses_shortlist and (proposes or request.reach(config.vocab_size) < MAX_REACH)
            for index, request in requests.items()
        }
        predicted = [(row, token.part) for row, token in enumerate(tokens) if token.needs_prediction]
        others = [(row, index) for row, index in predicted if not is_greedy[index]]
        batch = TokenBatch(
            tokens=np.array([token.token_id for token in tokens], np.int32),
            positions=np.array([token.position for token in tokens], np.int32),
            slots=np.array([scheduled[token.part].sequence.slot for token in tokens], np.int32),
            num_active=active_prefixes(skip_order, config.num_hidden_layers, [token.depth for token in tokens]),
            logits_rows=tuple(row for row, index in others if not is_previewed[index]),
            greedy_rows=tuple(row for row, index in predicted if is_greedy[index]),
            preview_rows=tuple(row for row, index in others if is_previewed[index]),
            shortlist=uses_shortlist,
            head_inputs=not proposes and any(uses_mtp(request, backend) for request in requests.values()),
            adapters=adapters,
            fill=not proposes and any(request.takes_filled for request in requests.values()),
            tentative=proposes,
        )
        drafts = any(request.drafting for request in requests.values())
        is_timed = drafts and not proposes and all(part.sequence.step for _, part in members)
        yield Forward(batch, [token.part for token in tokens], len(tokens) > len(members), is_timed)


def _grouped(scheduled: list[Scheduled], num_hidden_layers: int) -> dict[Layers, list[tuple[int, Scheduled]]]:
    """The parts of each forward; those at full depth run every layer, so they go with any group."""
    groups: dict[Layers, list[tuple[int, Scheduled]]] = {}
    full_depth = []
    for index, part in enumerate(scheduled):
        if part.depths[-1] == num_hidden_layers:
            full_depth.append((index, part))
        else:
            groups.setdefault((part.policy.skip_order, part.policy.adapters), []).append((index, part))
    if full_depth:
        groups.setdefault(next(iter(groups), ((), None)), []).extend(full_depth)
    return groups


def collected(scheduled: list[Scheduled], ended: Iterable[tuple[Forward, ForwardOutput]]) -> list[Predicted]:
    """What forwards computed of each part, in the order of its tokens."""
    predictions: list[list[Prediction]] = [[] for _ in scheduled]
    head_inputs: list[np.ndarray | None] = [None for _ in scheduled]
    for forward, output in ended:
        batch, parts = forward.batch, forward.parts
        for row, logits in zip(batch.logits_rows, output.logits, strict=True):
            predictions[parts[row]].append(logits)
        for row, previewed in zip(batch.preview_rows, output.previews, strict=True):
            predictions[parts[row]].append(previewed)
        for row, token_id in zip(batch.greedy_rows, output.greedy_ids.tolist(), strict=True):
            predictions[parts[row]].append(token_id)
        if output.head_inputs is not None:
            for index in set(parts):
                head_inputs[index] = output.head_inputs[[row for row, part in enumerate(parts) if part == index]]
    return list(map(Predicted, predictions, head_inputs))
