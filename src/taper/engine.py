"""The loop: token ids in, token ids out. Knows no text.

`add` queues a request, `step` runs one forward for each skip order at hand and returns what came out, `abort` ends a
sequence early. Every step gives each running sequence one token, and the rest of its budget of tokens to prompts, in
chunks, so a long prompt never stalls running sequences; they join and leave between steps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from .backends import Backend, ForwardOutput, TokenBatch
from .errors import RequestError, whole_number
from .policy import DepthPolicy, active_prefixes
from .sampling import NOT_A_NUMBER, SamplingParams, TokenLogprobs, check_token_ids, sample, token_logprobs

MAX_NUM_BATCHED_TOKENS = 512  # tokens of a step; bounds the memory of activations and the wait for the next token


class _Token(NamedTuple):
    """One row of a batch."""

    part: int
    token_id: int
    position: int
    depth: int
    wanted: bool  # its prediction


Prediction = np.ndarray | int  # logits float32 [vocab_size], or the likeliest token


class Engine:
    """Completes requests on a backend, many at a time, and reuses what its slots still hold.

    Calls from several threads take turns.

    Args:
        backend: what runs the forwards; used by this engine alone.
        max_num_batched_tokens: the budget of a step. A running sequence waits for no more than this many tokens
            between two of its own.
    """

    def __init__(self, backend: Backend, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS) -> None:
        self.backend = backend
        self.max_num_batched_tokens = whole_number("max_num_batched_tokens", max_num_batched_tokens, 1)
        self._num_hidden_layers = backend.config.num_hidden_layers
        self.slots = Slots(backend)
        self._waiting: deque[Sequence] = deque()
        self._ids = count()
        self._lock = threading.RLock()
        self._slot_freed = threading.Condition(self._lock)
        self._pid = os.getpid()

    def add(self, request: Request) -> Sequence:
        """Queue a request; the steps from now on run it.

        Raises:
            RequestError: the prompt cannot be completed (`check_prompt`), or there is a bias on an id that the model
                does not have.
            PolicyError: the policy was made for another model.
        """
        config = self.backend.config
        self.check_prompt(request.prompt_ids)
        check_token_ids(request.params.logit_bias or (), config.vocab_size)
        request.policy.check_model(config.num_hidden_layers, config.identity)
        with self._exclusive():
            sequence = Sequence(next(self._ids), request, list(request.prompt_ids), config.num_hidden_layers)
            self._waiting.append(sequence)
        return sequence

    def step(self, only: Collection[Sequence] | None = None) -> list[StepOutput]:
        """Run one forward for each skip order and return the tokens that came out; none while prompts are computed.

        Args:
            only: the sequences to advance; by default all. If the slots they wait for are held by sequences of other
                threads, this waits until one is free.

        Raises:
            RequestError: other sequences of this thread hold every slot, so that waiting would never end.
        """
        with self._exclusive():
            self._admit(only)
            scheduled = self._schedule(only)
            outputs = []
            for part, predictions in zip(scheduled, self._forward(scheduled), strict=True):
                if part.sequence.num_complete_tokens == part.position:  # every layer ran on all before
                    part.sequence.num_complete_tokens += part.depths.count(self._num_hidden_layers)
                outputs += [self._advance(part, prediction) for prediction in predictions]
            return outputs

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that has not finished, and free its slot."""
        if os.getpid() != self._pid:  # a forked copy, whose lock another thread may have held
            return
        with self._lock:
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")

    def complete(self, requests: Iterable[Request]) -> list[list[int]]:
        """The completions of some requests together, as token ids, a stop token included; what `add` raises."""
        sequences: list[Sequence] = []
        try:
            sequences += map(self.add, requests)
            while unfinished := [sequence for sequence in sequences if sequence.finish_reason is None]:
                self.step(unfinished)
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return [sequence.token_ids[len(sequence.request.prompt_ids) :] for sequence in sequences]

    def verify(self, drafts: Iterable[tuple[Sequence, list[int], list[int]]]) -> list[np.ndarray]:
        """Logits that decoding would give, in one forward for each skip order; sequences stay as they are.

        Args:
            drafts: running sequences, the tokens proposed for each, and the depths of the 1 + len(tokens) forwards
                whose input is the sequence's last token and then each proposed one.

        Returns:
            For each sequence float32 [1 + len(tokens), vocab_size]; its caller decides what to accept.
        """
        with self._exclusive():
            scheduled = [
                Scheduled(draft, [draft.token_ids[-1], *ids], len(draft.token_ids) - 1, depths, 1 + len(ids))
                for draft, ids, depths in drafts
            ]
            return [np.stack(predictions) for predictions in self._forward(scheduled, greedy=False)]

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """A forward of the caller's own making, between steps: on slots of sequences that it added itself."""
        with self._exclusive():
            return self.backend.forward(batch)

    def check_prompt(self, prompt_ids: Collection[int]) -> None:
        """Reject a prompt that cannot be completed.

        Raises:
            RequestError: it is empty, too long, or has an id that the model does not have.
        """
        config = self.backend.config
        if not prompt_ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if len(prompt_ids) >= self.backend.context_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, but the context holds {self.backend.context_length}, "
                "output included",
                f"shorten it, or raise --context (this model: up to {config.max_position_embeddings})",
            )
        check_token_ids(prompt_ids, config.vocab_size)

    @property
    def num_free_slots(self) -> int:
        """How many more sequences can run."""
        return self.slots.num_free

    @property
    def num_waiting(self) -> int:
        """How many sequences wait for a slot."""
        return len(self._waiting)

    def _exclusive(self) -> threading.RLock:
        """The lock by which threads take turns; a fork has it, but not the backend's threads, so it is refused."""
        if os.getpid() != self._pid:
            hint = 'load it in each process, or start processes with multiprocessing\'s "spawn" method'
            raise RequestError("the model was loaded before this process was forked, and cannot run in it", hint)
        return self._lock

    def _admit(self, only: Collection[Sequence] | None) -> None:
        """Give free slots to waiting sequences, first come, first served."""
        waiting = [sequence for sequence in self._waiting if only is None or sequence in only]
        while waiting and not self.num_free_slots and not self._running_of(only):
            if any(sequence.thread == threading.get_ident() for sequence in self.slots.sequences if sequence):
                reason = f"all {self.backend.num_slots} slots hold sequences that have not finished"
                raise RequestError(reason, "finish or close one first, or raise max_batch_size")
            self._slot_freed.wait()
        for sequence in waiting:
            if not self.num_free_slots:
                break
            self._waiting.remove(sequence)
            self.slots.take(sequence)

    def _running_of(self, only: Collection[Sequence] | None) -> list[Sequence]:
        """The running sequences among those to advance, oldest first."""
        running = (sequence for sequence in self.slots.sequences if sequence and (only is None or sequence in only))
        return sorted(running, key=lambda sequence: sequence.id)

    def _schedule(self, only: Collection[Sequence] | None) -> list[Scheduled]:
        """One token for each running sequence, then chunks of prompts, oldest first, as far as the budget goes.

        What other slots hold of a prompt is copied, and what other prompts compute of it in this step will be.
        """
        running = self._running_of(only)
        scheduled = [
            Scheduled(sequence, sequence.token_ids[-1:], len(sequence.token_ids) - 1, [sequence.depth], 1)
            for sequence in running
            if sequence.step
        ]
        left, num_decoding = self.max_num_batched_tokens - len(scheduled), len(scheduled)
        for sequence in running:
            if sequence.step or left <= 0:
                continue
            self.slots.share(sequence)
            if not can_wait(sequence, scheduled[num_decoding:]):
                first, prompt = sequence.num_complete_tokens, sequence.token_ids
                chunk = prompt[first : first + left]
                left -= len(chunk)
                ends = first + len(chunk) == len(prompt)
                scheduled.append(Scheduled(sequence, chunk, first, [sequence.depth] * len(chunk), int(ends)))
        return scheduled

    def _forward(self, scheduled: list[Scheduled], greedy: bool = True) -> list[list[Prediction]]:
        """The predictions wanted of each part; a likeliest token instead of logits where `greedy` and that suffices."""
        predictions: list[list[Prediction]] = [[] for _ in scheduled]
        for skip_order, members in self._group(scheduled).items():
            tokens = [
                _Token(index, token_id, part.position + offset, depth, offset >= len(part.token_ids) - part.num_outputs)
                for index, part in members
                for offset, (token_id, depth) in enumerate(zip(part.token_ids, part.depths, strict=True))
            ]
            tokens.sort(key=lambda token: -token.depth)  # stable: tokens of a slot stay in their order
            is_greedy = {index: greedy and part.sequence.request.is_greedy for index, part in members}
            wanted = [(row, token.part) for row, token in enumerate(tokens) if token.wanted]
            batch = TokenBatch(
                tokens=np.array([token.token_id for token in tokens], np.int32),
                positions=np.array([token.position for token in tokens], np.int32),
                slots=np.array([scheduled[token.part].sequence.slot for token in tokens], np.int32),
                num_active=active_prefixes(skip_order, self._num_hidden_layers, [token.depth for token in tokens]),
                logits_rows=tuple(row for row, index in wanted if not is_greedy[index]),
                greedy_rows=tuple(row for row, index in wanted if is_greedy[index]),
            )
            output = self.backend.forward(batch)
            for row, logits in zip(batch.logits_rows, output.logits, strict=True):
                predictions[tokens[row].part].append(logits)
            for row, token_id in zip(batch.greedy_rows, output.greedy_ids.tolist(), strict=True):
                predictions[tokens[row].part].append(token_id)
        return predictions

    def _group(self, scheduled: list[Scheduled]) -> dict[tuple[int, ...], list[tuple[int, Scheduled]]]:
        """The parts of each forward, by skip order; those at full depth run every layer, so they go with any."""
        groups: dict[tuple[int, ...], list[tuple[int, Scheduled]]] = {}
        full_depth = []
        for index, part in enumerate(scheduled):
            if part.depths[-1] == self._num_hidden_layers:
                full_depth.append((index, part))
            else:
                groups.setdefault(part.sequence.request.policy.skip_order, []).append((index, part))
        if full_depth:
            groups.setdefault(next(iter(groups), ()), []).extend(full_depth)
        return groups

    def _advance(self, part: Scheduled, prediction: Prediction) -> StepOutput:
        """Choose the next token of a sequence, set its next depth, and see whether it has finished."""
        sequence, params = part.sequence, part.sequence.request.params
        prompt_length, depth, logprobs = len(sequence.request.prompt_ids), sequence.depth, None
        if isinstance(prediction, int):
            token_id = prediction
        else:
            logits = sequence.token_filter.restrict(prediction) if sequence.token_filter else prediction
            completion_ids = sequence.token_ids[prompt_length:]
            token_id = sample(logits, params, sequence.request.prompt_ids, completion_ids, sequence.rng)
            if params.logprobs is not None and token_id != NOT_A_NUMBER:
                logprobs = token_logprobs(prediction, token_id, params.logprobs)
        if token_id == NOT_A_NUMBER:
            self._finish(sequence, "error")
            return StepOutput(sequence.id, token_id, depth, "error")
        if sequence.token_filter:
            sequence.token_filter.accept(token_id)
        sequence.token_ids.append(token_id)
        sequence.depth = sequence.request.policy.depth(sequence.step)
        is_eos = token_id in sequence.request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            self._finish(sequence, "stop")
        elif sequence.step >= params.max_tokens or len(sequence.token_ids) >= self.backend.context_length:
            self._finish(sequence, "length")
        return StepOutput(sequence.id, token_id, depth, sequence.finish_reason, logprobs)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and free its slot, which goes on holding its leading tokens that every layer has."""
        sequence.finish_reason = reason
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        self.slots.release(sequence)
        self._slot_freed.notify_all()


class TokenFilter(Protocol):
    """Says which tokens may come next in one completion, such as those that keep it valid JSON."""

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits float32 [vocab_size], with -inf for the tokens that may not come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Take note of the token that came."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and how to complete it.

    `eos_token_ids` are the model's own; `params` may add to them. `token_filter` makes the filter of its completion.
    """

    prompt_ids: tuple[int, ...] | list[int]
    params: SamplingParams
    policy: DepthPolicy
    eos_token_ids: frozenset[int] = frozenset()
    token_filter: Callable[[], TokenFilter] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token of the model's own logits is all that is asked for."""
        return self.params.is_greedy and self.token_filter is None


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine, which alone changes it."""

    id: int
    request: Request
    token_ids: list[int]  # the prompt, then the completion
    depth: int  # layers of the forward that predicts the next token: set by the schedule, after each token
    slot: int | None = None  # of the key-value cache; None while it waits and once it has finished
    num_complete_tokens: int = 0  # leading tokens whose keys and values every layer has
    num_cached_tokens: int = 0  # of the prompt, that were not computed for this sequence
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    thread: int = field(default_factory=threading.get_ident)
    rng: np.random.Generator = field(init=False)
    token_filter: TokenFilter | None = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.request.params.seed)
        self.token_filter = self.request.token_filter and self.request.token_filter()

    @property
    def step(self) -> int:
        """Index of the next token of the completion."""
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class StepOutput:
    """One token of a sequence, the stop token included.

    `token_id` is -1, with `finish_reason` "error", if the model's output was not a number or its filter let none pass.
    """

    sequence_id: int
    token_id: int
    depth: int
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None


class Scheduled(NamedTuple):
    """Tokens of one sequence in a forward."""

    sequence: Sequence
    token_ids: list[int]
    position: int  # of the first
    depths: list[int]  # of each, never rising
    num_outputs: int  # of how many last ones the prediction is wanted


MIN_SHARED = 16  # tokens; for fewer, copying or waiting takes as long as computing them


class Slots:
    """Gives slots to sequences and takes them back.

    Args:
        backend: the owner of the cache.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.sequences: list[Sequence | None] = [None] * backend.num_slots
        # What each free slot still holds: leading tokens whose keys and values every layer has.
        self.kept: list[list[int]] = [[] for _ in range(backend.num_slots)]
        self._released, self._times = [0] * backend.num_slots, count(1)

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.sequences.count(None)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; what it holds of the prompt is not run again.

        One of which the prompt continues all that it holds comes first, empty ones included; then the one that was
        released longest ago.
        """
        prompt = sequence.token_ids
        free = [slot for slot, running in enumerate(self.sequences) if running is None]
        shared = {slot: common_prefix(self.kept[slot], prompt) for slot in free}

        def cost(slot: int) -> tuple[int, int]:
            return (1, self._released[slot]) if shared[slot] < len(self.kept[slot]) else (0, -shared[slot])

        slot = min(free, key=cost)
        # The last token runs in any case: its logits are what comes next.
        sequence.num_complete_tokens = sequence.num_cached_tokens = min(shared[slot], len(prompt) - 1)
        sequence.slot, self.sequences[slot], self.kept[slot] = slot, sequence, []

    def share(self, sequence: Sequence) -> None:
        """Copy what another slot holds of a prompt, if that is more than its own slot does."""
        own, prompt = sequence.num_complete_tokens, sequence.token_ids[:-1]
        least = prompt[: own + MIN_SHARED]
        if len(least) < own + MIN_SHARED or sequence.slot is None:
            return
        holders = [slot for slot in range(len(self.kept)) if self._held(slot, len(least)) == least]
        shared = {slot: common_prefix(self._held(slot), prompt) for slot in holders}
        if shared:
            source = max(holders, key=lambda slot: shared[slot])
            self._backend.copy(source, sequence.slot, own, shared[source])
            sequence.num_complete_tokens = shared[source]
            sequence.num_cached_tokens += shared[source] - own

    def release(self, sequence: Sequence) -> None:
        """Take back a slot, which goes on holding the leading tokens that every layer has."""
        assert sequence.slot is not None
        self.kept[sequence.slot] = sequence.token_ids[: sequence.num_complete_tokens]
        self._released[sequence.slot] = next(self._times)
        self.sequences[sequence.slot] = None
        sequence.slot = None

    def _held(self, slot: int, length: int | None = None) -> list[int]:
        """The first `length` tokens that a slot has the keys and values of all layers of; by default all of them."""
        sequence = self.sequences[slot]
        if sequence is None:
            return self.kept[slot][:length]
        complete = sequence.num_complete_tokens
        return sequence.token_ids[: complete if length is None else min(length, complete)]


def can_wait(sequence: Sequence, prompts: list[Scheduled]) -> bool:
    """Whether chunks that a step runs anyway compute what this prompt needs next, so that it can be copied then."""
    for other, token_ids, position, _, _ in prompts:
        computed = other.token_ids[: position + len(token_ids)]
        if common_prefix(computed, sequence.token_ids[:-1]) >= sequence.num_complete_tokens + MIN_SHARED:
            return True
    return False


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
