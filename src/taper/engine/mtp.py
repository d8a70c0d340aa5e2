"""Drafting with a model's MTP layer, which predicts the token after the next one (multi-token prediction).

It reads a token together with what the head read at the position before it: in the model's own forward where the token
is certain, in its own where it is a proposed one (arXiv 2412.19437, section 2.2, with one layer for all depths).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..backends import Backend, ForwardOutput, PreviewedLogits, TokenBatch
from .sequence import Request, Sequence

MAX_UNSEEN = 64  # tokens of a sequence that wait until its next ones are predicted


class _HeadInputs(NamedTuple):
    """What the head read at some positions of a sequence."""

    first: int
    states: np.ndarray  # float32 [n, hidden_size]

    @property
    def end(self) -> int:
        return self.first + len(self.states)

    def without(self, count: int) -> _HeadInputs:
        """Those after the first `count`."""
        return _HeadInputs(self.first + count, self.states[count:])


def uses_mtp(request: Request, backend: Backend) -> bool:
    """Whether the model's MTP layer predicts further tokens of a request."""
    return backend.config.has_mtp and request.drafting is not None and request.drafting.kind in ("auto", "mtp")


class MtpDrafter:
    """Predicts further tokens of sequences.

    An interrupt may lose what the head read: then the layer does not see these tokens, and predicts worse.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._unseen: WeakKeyDictionary[Sequence, _HeadInputs] = WeakKeyDictionary()  # by the layer
        self._own: WeakKeyDictionary[Sequence, _HeadInputs] = WeakKeyDictionary()  # after its last prediction

    def note(self, sequence: Sequence, first: int, states: np.ndarray) -> None:
        """Keep what the head read from a position of a sequence on; it may have been read before, or skip some."""
        known = self._unseen.get(sequence)
        if known is None or first > known.end:
            self._unseen[sequence] = _HeadInputs(first, states)
        else:
            self._unseen[sequence] = known._replace(states=np.concatenate((known.states, states[known.end - first :])))

    def can_predict(self, sequence: Sequence) -> bool:
        """Whether it can predict what follows the last token of a sequence."""
        unseen = self._unseen.get(sequence)
        return unseen is not None and len(unseen.states) > 0 and unseen.end == sequence.num_tokens - 1

    def predict(
        self, proposed: Mapping[Sequence, list[int]], shortlist: bool
    ) -> dict[Sequence, np.ndarray | PreviewedLogits]:
        """The logits after the last token of each sequence, or after those that are proposed for it.

        Args:
            proposed: by sequence, those that were proposed after it by the calls before.
            shortlist: previewed logits come back.
        """
        parts = {}
        for sequence, token_ids in proposed.items():
            read = self._own[sequence] if token_ids else self._unseen[sequence]
            parts[sequence] = read, token_ids[-1:] or sequence.tokens_from(read.first + 1)
        parts = dict(sorted(parts.items(), key=lambda item: item[0].slot or 0))  # slots side by side attend together
        output = self._forward(parts, predicts=True, shortlist=shortlist)
        assert output.head_inputs is not None
        ends = np.cumsum([len(token_ids) for _, token_ids in parts.values()])
        for (sequence, (read, _)), end in zip(parts.items(), ends.tolist(), strict=True):
            self._own[sequence] = _HeadInputs(read.end, output.head_inputs[end - 1 : end])
            if not proposed[sequence]:
                self._unseen[sequence] = read.without(len(read.states))
        return dict(zip(parts, output.previews if shortlist else output.logits, strict=True))

    def catch_up(self, sequences: list[Sequence]) -> None:
        """Let the layer see the tokens that wait, but for the last one, where they are many."""
        parts = {}
        for sequence in sequences:
            if (unseen := self._unseen.get(sequence)) is not None and len(unseen.states) > MAX_UNSEEN:
                seen = unseen._replace(states=unseen.states[:-1])
                parts[sequence] = seen, sequence.tokens_from(seen.first + 1)[: len(seen.states)]
        if parts:
            self._forward(parts)
            for sequence, (seen, _) in parts.items():
                self._unseen[sequence] = self._unseen[sequence].without(len(seen.states))

    def _forward(
        self, parts: Mapping[Sequence, tuple[_HeadInputs, list[int]]], predicts: bool = False, shortlist: bool = False
    ) -> ForwardOutput:
        """A forward of the layer on tokens of sequences, each with what the head read at the position before it."""
        layers, counts = self._backend.config.num_hidden_layers, [len(token_ids) for _, token_ids in parts.values()]
        last = tuple((np.cumsum(counts) - 1).tolist()) if predicts else ()
        positions = [np.arange(read.first, read.end, dtype=np.int32) for read, _ in parts.values()]
        return self._backend.forward(
            TokenBatch(
                tokens=np.concatenate([np.array(token_ids, np.int32) for _, token_ids in parts.values()]),
                positions=np.concatenate(positions),
                slots=np.repeat(np.array([sequence.slot for sequence in parts], np.int32), counts),
                num_active=(0,) * layers + (sum(counts),),
                logits_rows=() if shortlist else last,
                preview_rows=last if shortlist else (),
                shortlist=shortlist,
                head_inputs=predicts,
                first_layer=layers,
                hidden_states=np.concatenate([read.states for read, _ in parts.values()]),
                tentative=True,
            )
        )
