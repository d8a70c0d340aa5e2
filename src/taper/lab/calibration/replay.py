"""Replay: scores policies on known completions, exactly as decoding them would, in one forward for each window.

The tokens of a completion are already sorted by depth, deepest first, so each layer runs on a prefix of them. Policies
that differ from a base only from some layer on share its hidden states before that layer, and its keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from ...adapters import Adapters
from ...backends import TokenBatch
from ...engine import Engine, Request
from ...engine import Sequence as EngineSequence
from ...errors import RequestError
from ...policy import DepthPolicy, active_prefixes
from ...sampling import SamplingParams

WINDOW = 128  # tokens of a forward; bounds the memory of their logits
TOP = 1024  # most probable tokens at full depth that are compared one by one; all others share one bucket


@dataclass(frozen=True)
class Reference:
    """A prompt and a known completion, as token ids; the completion may end with a stop id."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    """What a policy costs at each step of some completions; all arrays [steps].

    KL(full || policy) in nats is over the `TOP` most probable tokens at full depth and one bucket for the rest. Step 0
    comes from the prefill at full depth, so it costs nothing.
    """

    reference: np.ndarray  # index of the completion
    step: np.ndarray
    depth: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray  # 1 where the argmax is that of full depth, else 0
    nll: np.ndarray  # of the completion's token under the policy, nats
    nll_full: np.ndarray  # the same at full depth

    def where(self, chosen: np.ndarray) -> Scores:
        """Only the steps that a mask or an index array chooses."""
        return Scores(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Several scores as one, in the given order."""
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))


@dataclass(frozen=True)
class _Full:
    """Full depth on one completion, from step 0."""

    top: np.ndarray  # int32 [steps, TOP], the argmax first, the others unsorted
    logprobs: np.ndarray  # float32 [steps, TOP]
    nll: np.ndarray  # float64 [steps]


class Replay:
    """Known completions on an engine. Their prompts hold slots of the engine; `close` frees them.

    Raises:
        RequestError: a completion is empty or does not fit into the context.
    """

    def __init__(self, engine: Engine, references: Sequence[Reference]) -> None:
        self.engine, self.references = engine, list(references)
        self._num_hidden_layers = engine.backend.config.num_hidden_layers
        self._full_depth = DepthPolicy.full(self._num_hidden_layers)
        self._held: OrderedDict[int, EngineSequence] = OrderedDict()  # by completion, the most recently used one last
        self._full: dict[int, _Full] = {}
        for reference in self.references:
            engine.check_prompt(reference.prompt_ids)
            prompt, output = len(reference.prompt_ids), len(reference.completion_ids)
            if not output or prompt + output > engine.backend.context_length:
                raise RequestError(
                    f"an output of {output} tokens after a prompt of {prompt} "
                    f"cannot be replayed in a context of {engine.backend.context_length}",
                    "raise --context",
                )

    def close(self) -> None:
        """Free the slots."""
        while self._held:
            self._free_oldest()

    def score(self, policy: DepthPolicy) -> Scores:
        """What a policy costs at each step of all completions."""
        return Scores.joined([self.at(index, [policy])[0] for index in range(len(self.references))])

    def at(self, index: int, policies: Sequence[DepthPolicy], base: DepthPolicy | None = None) -> list[Scores]:
        """The scores of several policies on one completion.

        Layers in which they equal `base` (default: full depth) are computed once.
        """
        self._prepare(index)
        full, base = self._full[index], base or self._full_depth
        scores = [_as_at_full_depth(index, policy, full) for policy in policies]
        steps = range(1, len(full.nll))
        common = self._paths(base, steps)
        begins = [_first_difference(self._paths(policy, steps), common) for policy in policies]
        tapered = [i for i, own in enumerate(scores) if (own.depth < self._num_hidden_layers).any()]
        # The base runs as far as any policy shares it, and returns the hidden states from which each policy goes on.
        hidden_states = {}
        if shared := tuple(sorted({begins[i] for i in tapered} - {0})):
            for window in self._windows(index):
                batch = self._batch(index, base, window, output_hidden_states=shared)
                hidden_states[window] = self.engine.forward(batch).hidden_states
        # The policy that begins last goes first: the layers below still hold the keys and values of the base.
        for i in sorted(tapered, key=lambda i: -begins[i]):
            own = scores[i]
            for window in self._windows(index):
                states = hidden_states[window][begins[i]] if begins[i] else None
                batch = self._batch(index, policies[i], window, begins[i], hidden_states=states, logits=True)
                compared = _compare(self.engine.forward(batch).logits, full, self.references[index], window.start)
                place = slice(window.start, window.stop)
                skips = own.depth[place] < self._num_hidden_layers
                for values, new in zip((own.kl, own.agreement, own.nll), compared, strict=True):
                    values[place] = np.where(skips, new, values[place])
        return scores

    def after_tapered(self, index: int, policy: DepthPolicy, first: Reference) -> Scores:
        """The loss of a completion at full depth whose prompt includes an earlier output, which was tapered.

        The keys and values of layers that the earlier output skipped are filled, as in a conversation.

        Args:
            index: of the completion.
            policy: the one that the earlier output ran under.
            first: the earlier prompt and output, with which the prompt of the completion begins.
        """
        self._prepare(index)
        reference, full, layers = self.references[index], self._full[index], self._num_hidden_layers
        begin, count = len(first.prompt_ids), len(first.completion_ids) - 1  # its last token is part of the next prompt
        tapered = [policy.depth(step) for step in range(1, count + 1)]
        rest = [layers] * (len(reference.prompt_ids) - 1 - begin - count)
        sequence, parts = self._held[index], []
        assert sequence.slot is not None
        resumed = self.engine.backend.resumable(sequence.slot, begin)
        # Cells from here on are overwritten, so no other request may reuse them.
        sequence.num_computed_tokens = sequence.num_exact_tokens = begin
        try:
            before = [layers] * (begin - resumed)
            for start, depths in ((resumed, before), (begin, tapered), (begin + count, rest)):
                for place in range(0, len(depths), WINDOW):
                    part = depths[place : place + WINDOW]
                    positions = np.arange(start + place, start + place + len(part), dtype=np.int32)
                    self.engine.forward(
                        TokenBatch(
                            tokens=np.array(reference.prompt_ids, np.int32)[positions],
                            positions=positions,
                            slots=np.full(len(part), sequence.slot, np.int32),
                            num_active=active_prefixes(policy.skip_order, layers, part),
                            adapters=policy.adapters,
                            fill=True,
                        )
                    )
            for window in self._windows(index, first_step=0):
                logits = self.engine.forward(self._batch(index, self._full_depth, window, logits=True)).logits
                parts.append(_compare(logits, full, reference, window.start))
        finally:
            self.engine.abort(self._held.pop(index))
        steps = np.arange(len(full.nll))
        kl, agreement, nll = np.concatenate(parts, axis=1)
        return Scores(np.full(len(steps), index), steps, np.full(len(steps), layers), kl, agreement, nll, full.nll)

    def block_influence(self) -> np.ndarray:
        """1 - mean cosine of the input and output of each layer at full depth (ShortGPT, arXiv 2403.03853): [L]."""
        every, sums, count = tuple(range(self._num_hidden_layers + 1)), np.zeros(self._num_hidden_layers), 0
        for index in range(len(self.references)):
            self._prepare(index)
            for window in self._windows(index):
                batch = self._batch(index, self._full_depth, window, output_hidden_states=every)
                states = self.engine.forward(batch).hidden_states
                unit = [states[layer] / np.linalg.norm(states[layer], axis=-1, keepdims=True) for layer in every]
                sums += [(1 - (a * b).sum(-1)).sum() for a, b in pairwise(unit)]
                count += len(window)
        return sums / max(1, count)

    def _prepare(self, index: int) -> None:
        """Put the keys and values of a completion's prompt into a slot, and compute full depth on the completion."""
        if index in self._held:
            self._held.move_to_end(index)
            return
        while self._held and not self.engine.num_free_slots:
            self._free_oldest()
        reference = self.references[index]
        self._held[index] = self._hold(reference)
        if index in self._full:  # only the last token of the prompt is missing, the input of step 0
            self.engine.forward(self._batch(index, self._full_depth, range(1), tentative=False))
            return
        parts = []
        for window in self._windows(index, first_step=0):
            output = self.engine.forward(self._batch(index, self._full_depth, window, logits=True))
            parts.append(_top_tokens(output.logits, reference, window.start))
        if self.engine.backend.config.mixer is not None:  # every policy goes on from the state after step 0
            self.engine.forward(self._batch(index, self._full_depth, range(1), tentative=False))
        self._full[index] = _Full(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _hold(self, reference: Reference) -> EngineSequence:
        """A sequence whose slot holds the prompt's keys and values, except for the last token."""
        prompt_ids = reference.prompt_ids[:-1] or reference.prompt_ids
        params = SamplingParams(max_tokens=self.engine.backend.context_length, ignore_eos=True)
        sequence = self.engine.add(Request(prompt_ids, params, self._full_depth))
        sequence.is_held = True
        try:
            while sequence.step == 0:
                self.engine.step([sequence])
        except BaseException:
            self.engine.abort(sequence)
            raise
        return sequence

    def _free_oldest(self) -> None:
        _, sequence = self._held.popitem(last=False)
        self.engine.abort(sequence)

    def _windows(self, index: int, first_step: int = 1) -> list[range]:
        """The steps of a completion, one window for each forward. Every policy runs step 0 at full depth."""
        steps = range(first_step, len(self.references[index].completion_ids))
        return [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]

    def _batch(
        self,
        index: int,
        policy: DepthPolicy,
        window: range,
        first_layer: int = 0,
        *,
        output_hidden_states: tuple[int, ...] = (),
        hidden_states: np.ndarray | None = None,
        logits: bool = False,
        tentative: bool = True,
    ) -> TokenBatch:
        """The forward that predicts the steps of a window, as far as the last hidden states that are asked for."""
        reference, count = self.references[index], len(window)
        # The input of a step is the token before it; for step 0, the last token of the prompt.
        token_ids = (reference.prompt_ids[-1], *reference.completion_ids)[window.start : window.stop]
        positions = len(reference.prompt_ids) - 1 + np.arange(window.start, window.stop)
        num_active = self._num_active(policy, window)
        if output_hidden_states:
            num_active = tuple(n if layer < output_hidden_states[-1] else 0 for layer, n in enumerate(num_active))
        return TokenBatch(
            tokens=np.array(token_ids, np.int32),
            positions=positions.astype(np.int32),
            slots=np.full(count, self._held[index].slot, np.int32),
            num_active=num_active,
            logits_rows=tuple(range(count)) if logits else (),
            output_hidden_states=output_hidden_states,
            first_layer=first_layer,
            hidden_states=hidden_states,
            adapters=policy.adapters,
            tentative=tentative,
        )

    def _paths(self, policy: DepthPolicy, steps: range) -> list[tuple[int, Adapters | None]]:
        """What each layer computes: how many of these steps run it, and the adapters that the others pass through."""
        return [(n, policy.adapters if n < len(steps) else None) for n in self._num_active(policy, steps)]

    def _num_active(self, policy: DepthPolicy, steps: range) -> tuple[int, ...]:
        """How many of these steps run each layer; they are always the first ones."""
        return active_prefixes(policy.skip_order, self._num_hidden_layers, [policy.depth(step) for step in steps])


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _as_at_full_depth(index: int, policy: DepthPolicy, full: _Full) -> Scores:
    """The scores of a policy at steps that skip no layer; the others are filled in later."""
    steps = np.arange(len(full.nll))
    depths = np.array([policy.depth(step) for step in steps.tolist()])
    same = (np.zeros(len(steps)), np.ones(len(steps)), full.nll.copy())
    return Scores(np.full(len(steps), index), steps, depths, *same, full.nll)


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exp over the vocabulary: float64 [steps] from float32 [steps, V]."""
    top = logits.max(-1, keepdims=True)
    total: np.ndarray = np.log(np.exp(logits - top).sum(-1, dtype=np.float64)) + top[:, 0]
    return total


def _nll(logits: np.ndarray, log_sum: np.ndarray, reference: Reference, first: int) -> np.ndarray:
    """NLL of the completion's tokens at the steps from `first` on: float64 [steps]."""
    tokens = np.array(reference.completion_ids[first : first + len(logits)])[:, None]
    nll: np.ndarray = log_sum - np.take_along_axis(logits, tokens, -1)[:, 0]
    return nll


def _top_tokens(logits: np.ndarray, reference: Reference, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of `_Full` for the steps from `first` on."""
    log_sum = _log_sum(logits)
    top = min(TOP, logits.shape[1])
    least = np.partition(logits, -top, axis=-1)[:, -top]  # many times faster than argpartition
    ids = np.stack([_at_least(row, value, top) for row, value in zip(logits, least, strict=True)])
    logprobs = np.take_along_axis(logits, ids, -1) - log_sum[:, None]
    return ids, logprobs.astype(np.float32), _nll(logits, log_sum, reference, first)


def _at_least(logits: np.ndarray, least: float, count: int) -> np.ndarray:
    """`count` tokens whose logits are at least `least`, the argmax first: int32 [count]."""
    ids = np.flatnonzero(logits >= least)[:count].astype(np.int32)
    place = int(logits[ids].argmax())
    ids[0], ids[place] = ids[place], ids[0]
    return ids


def _compare(logits: np.ndarray, full: _Full, reference: Reference, first: int) -> np.ndarray:
    """KL, agreement and NLL of the steps from `first` on: float64 [3, steps]."""
    steps = slice(first, first + len(logits))
    ids, p = full.top[steps], full.logprobs[steps].astype(np.float64)
    log_sum = _log_sum(logits)
    q = np.take_along_axis(logits, ids, -1) - log_sum[:, None]
    tiny = 1e-12  # rounding may leave a bucket empty
    p_rest, q_rest = (np.maximum(1 - np.exp(x).sum(-1), tiny) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(-1) + p_rest * np.log(p_rest / q_rest)
    agreement = logits.argmax(-1) == ids[:, 0]
    return np.stack([kl, agreement, _nll(logits, log_sum, reference, first)])
