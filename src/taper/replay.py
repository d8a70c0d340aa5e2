"""Scores policies on known answers: what decoding them token by token would compute, in one forward a window.

The tokens of an answer already stand deepest first, so each layer runs on a prefix of them. Policies that differ
from a base only from some layer on share its hidden states before that layer, and its keys and values below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from .backends import TokenBatch
from .engine import Engine, Request, Row
from .errors import RequestError
from .policy import DepthPolicy, active_prefixes
from .sampling import SamplingParams

WINDOW = 128  # tokens a forward; bounds the memory of their logits
TOP = 1024  # of full depth's likeliest tokens; all others share one bucket


@dataclass(frozen=True)
class Reference:
    """A prompt and a known answer, as token ids; the answer may end with a stop id."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    def window(self, first: int, length: int) -> Reference:
        """The steps from `first` on as an answer of their own: what precedes them counts as prompt."""
        return Reference(self.prompt_ids + self.answer_ids[:first], self.answer_ids[first : first + length])


@dataclass(frozen=True)
class Scores:
    """What a policy costs at each step of some answers; all arrays [steps].

    KL(full || policy) in nats is over full depth's `TOP` likeliest tokens and one bucket for the rest. Step 0 comes
    from the prefill at full depth, so it costs nothing.
    """

    reference: np.ndarray  # index of the answer
    step: np.ndarray
    depth: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray  # 1 where the likeliest token is that of full depth, else 0
    nll: np.ndarray  # of the answer's token under the policy, nats
    nll_full: np.ndarray  # the same at full depth

    def where(self, chosen: np.ndarray) -> Scores:
        """Only the steps that a mask or an index array chooses."""
        return Scores(*(getattr(self, each.name)[chosen] for each in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Several as one, in their order."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))


@dataclass(frozen=True)
class _Full:
    """Full depth on one answer, from step 0."""

    top: np.ndarray  # int32 [steps, TOP], unsorted; the likeliest token first
    logprobs: np.ndarray  # float32 [steps, TOP]
    nll: np.ndarray  # float64 [steps]


class Replay:
    """Known answers on an engine. It holds as many of their prompts as the engine has slots; close it to free them.

    Raises:
        RequestError: an answer is empty or does not fit into the context.
    """

    def __init__(self, engine: Engine, references: Sequence[Reference]) -> None:
        self.engine, self.references = engine, list(references)
        self._layers = engine.backend.config.num_hidden_layers
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._full: dict[int, _Full] = {}
        for reference in self.references:
            engine.check_prompt(reference.prompt_ids)
            length = len(reference.prompt_ids) + len(reference.answer_ids)
            if not reference.answer_ids or length > engine.backend.context_length:
                raise RequestError(
                    f"an answer of {len(reference.answer_ids)} tokens after a prompt of {len(reference.prompt_ids)} "
                    f"cannot be replayed in a context of {engine.backend.context_length}",
                    "raise --context",
                )

    def close(self) -> None:
        """Free the slots of its prompts."""
        while self._rows:
            self._release_oldest()

    def score(self, policy: DepthPolicy) -> Scores:
        """What one policy costs at each step of all answers."""
        return Scores.joined([self.at(index, [policy])[0] for index in range(len(self.references))])

    def at(self, index: int, policies: Sequence[DepthPolicy], base: DepthPolicy | None = None) -> list[Scores]:
        """What each of some policies costs on one answer.

        What they have in common with `base` (default: full depth) is computed once.
        """
        self._row(index)
        nll_full = self._full[index].nll
        steps = np.arange(len(nll_full))
        found = []
        for policy in policies:
            depths = np.array([policy.depth(step) for step in steps.tolist()])
            # As at full depth: so it stays for step 0, which the prefill predicts, and wherever no layer is skipped.
            same = (np.zeros(len(steps)), np.ones(len(steps)), nll_full.copy())
            found.append(Scores(np.full(len(steps), index), steps, depths, *same, nll_full))
        skipping = [which for which, scores in enumerate(found) if (scores.depth < self._layers).any()]
        for which, first, logits in self._forwards(index, [policies[which] for which in skipping], base):
            scores, part = found[skipping[which]], slice(first, first + len(logits))
            compared = _compare(logits, self._full[index], self.references[index], first)
            scores.kl[part], scores.agreement[part], scores.nll[part] = compared
        return found

    def block_influence(self) -> np.ndarray:
        """1 - mean cosine of what enters and what leaves each layer, full depth (ShortGPT, arXiv 2403.03853): [L]."""
        full = DepthPolicy.full(self._layers)
        keep, sums, count = tuple(range(self._layers + 1)), np.zeros(self._layers), 0
        for index in range(len(self.references)):
            for _, batch in self._batches(index, full, keep=keep):
                self.engine.backend.forward(batch)
                unit = [batch.hidden[i] / np.linalg.norm(batch.hidden[i], axis=-1, keepdims=True) for i in keep]
                sums += [(1 - (a * b).sum(-1)).sum() for a, b in pairwise(unit)]
                count += len(batch.tokens)
        return sums / max(1, count)

    def _forwards(
        self, index: int, policies: Sequence[DepthPolicy], base: DepthPolicy | None
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(policy, first step, logits [steps, V]) of each window of each policy."""
        if not policies:
            return
        base = base or DepthPolicy.full(self._layers)
        common = self._active(index, base)
        begins = []
        for policy in policies:
            active = self._active(index, policy)
            begins.append(
                next((layer for layer in range(self._layers) if active[layer] != common[layer]), self._layers)
            )
        hidden: dict[int, dict[int, np.ndarray]] = {}
        # The base runs as far as any policy shares it.
        if keep := tuple(sorted({*begins} - {0})):
            for first, batch in self._batches(index, base, keep=keep, layers=keep[-1]):
                self.engine.backend.forward(batch)
                hidden[first] = batch.hidden
        # From the last beginning to the first: what lies below still holds the base's keys and values.
        for which in sorted(range(len(policies)), key=lambda which: -begins[which]):
            for first, batch in self._batches(index, policies[which], begins[which], hidden=hidden, logits=True):
                yield which, first, self.engine.backend.forward(batch)

    def _batches(
        self,
        index: int,
        policy: DepthPolicy,
        first_layer: int = 0,
        *,
        layers: int | None = None,
        keep: tuple[int, ...] = (),
        hidden: dict[int, dict[int, np.ndarray]] | None = None,
        logits: bool = False,
    ) -> Iterator[tuple[int, TokenBatch]]:
        """The first step of each window of an answer and its forward, up to layer `layers`."""
        reference, row = self.references[index], self._row(index)
        layers = self._layers if layers is None else layers
        last = len(reference.answer_ids)
        for first in range(1, last, WINDOW):
            steps = range(first, min(first + WINDOW, last))
            active = active_prefixes(policy, [policy.depth(step) for step in steps])
            active = tuple(n if layer < layers else 0 for layer, n in enumerate(active))
            tokens = reference.answer_ids[first - 1 : steps[-1]]
            positions = len(reference.prompt_ids) + np.arange(first - 1, steps[-1])
            yield (
                first,
                TokenBatch(
                    tokens=np.asarray(tokens, np.int32),
                    positions=positions.astype(np.int32),
                    slots=np.full(len(tokens), row.slot, np.int32),
                    active=active,
                    logits_rows=tuple(range(len(tokens))) if logits else (),
                    first_layer=first_layer,
                    keep=keep,
                    hidden=hidden[first] if hidden else {},
                ),
            )

    def _active(self, index: int, policy: DepthPolicy) -> tuple[int, ...]:
        """How many of an answer's steps run each layer: equal counts, equal steps."""
        steps = range(1, len(self.references[index].answer_ids))
        return active_prefixes(policy, [policy.depth(step) for step in steps])

    def _row(self, index: int) -> Row:
        """The row that holds a prompt; the first time, full depth runs on its answer too."""
        if index in self._rows:
            self._rows.move_to_end(index)
            return self._rows[index]
        if self._rows and not self.engine.free_slots:
            self._release_oldest()
        reference, policy = self.references[index], DepthPolicy.full(self._layers)
        row = self._rows[index] = self.engine.admit(Request(reference.prompt_ids, SamplingParams(), policy))
        logits = self.engine.prefill(row)
        if index not in self._full:
            parts = [_likeliest(logits[None], reference, 0)]
            for _, first, later in self._forwards(index, [policy], None):
                parts.append(_likeliest(later, reference, first))
            self._full[index] = _Full(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        return row

    def _release_oldest(self) -> None:
        _, row = self._rows.popitem(last=False)
        row.finish_reason = "stop"
        self.engine.release([row])


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exp over the vocabulary: float64 [steps] from float32 [steps, V]."""
    top = logits.max(-1, keepdims=True)
    total: np.ndarray = np.log(np.exp(logits - top).sum(-1, dtype=np.float64)) + top[:, 0]
    return total


def _tokens(reference: Reference, first: int, count: int) -> np.ndarray:
    """The answer's tokens of `count` steps as a column: [count, 1]."""
    return np.array(reference.answer_ids[first : first + count])[:, None]


def _likeliest(logits: np.ndarray, reference: Reference, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of `_Full` for the steps from `first` on."""
    normaliser = _log_sum(logits)
    top = min(TOP, logits.shape[1])
    least = np.partition(logits, -top, axis=-1)[:, -top]  # many times faster than argpartition
    ids = np.stack([_at_least(row, value, top) for row, value in zip(logits, least, strict=True)])
    logprobs = np.take_along_axis(logits, ids, -1) - normaliser[:, None]
    nll = normaliser - np.take_along_axis(logits, _tokens(reference, first, len(logits)), -1)[:, 0]
    return ids, logprobs.astype(np.float32), nll


def _at_least(logits: np.ndarray, least: float, count: int) -> np.ndarray:
    """`count` tokens with logits of at least this much, the likeliest first: int32 [count]."""
    ids = np.flatnonzero(logits >= least)[:count].astype(np.int32)
    place = int(logits[ids].argmax())
    ids[0], ids[place] = ids[place], ids[0]
    return ids


def _compare(logits: np.ndarray, full: _Full, reference: Reference, first: int) -> np.ndarray:
    """KL, agreement and NLL of the steps from `first` on: float64 [3, steps]."""
    steps = slice(first, first + len(logits))
    ids, p = full.top[steps], full.logprobs[steps].astype(np.float64)
    normaliser = _log_sum(logits)
    q = np.take_along_axis(logits, ids, -1) - normaliser[:, None]
    tiny = 1e-12  # a bucket that rounding leaves empty
    p_rest, q_rest = (np.maximum(1 - np.exp(x).sum(-1), tiny) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(-1) + p_rest * np.log(p_rest / q_rest)
    agreement = logits.argmax(-1) == ids[:, 0]
    nll = normaliser - np.take_along_axis(logits, _tokens(reference, first, len(logits)), -1)[:, 0]
    return np.stack([kl, agreement, nll])
