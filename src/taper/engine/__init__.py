"""The loop: token ids in, token ids out. Knows no text.

`add` queues a request as a `Sequence`, `step` runs one forward for each skip order and its adapters, `abort` ends a
sequence early. Each step gives every running sequence one token and spends the rest of its budget of tokens on prompts,
in chunks, so that a long prompt never stalls running sequences; sequences join and leave between steps. A request with
`drafting` gets several tokens in a step, as many as were proposed and came true.

A step may be interrupted anywhere, by Ctrl-C for instance. The next one continues from what was committed: a sequence
has a slot once `Slots.sequences` says so, and a token once it is in the sequence's `outputs`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from ..backends import Backend, ForwardOutput, PreviewedLogits, Shortlist, TokenBatch, likeliest
from ..errors import REUSE, PolicyError, RequestError, one_of, whole_number
from ..sampling import NOT_A_NUMBER, check_token_ids, sample, token_logprobs
from .batches import Forward, Predicted, Prediction, Scheduled, collected, forwards
from .drafting import PROBE_STEPS, Draft, Planner
from .mtp import MtpDrafter, uses_mtp
from .sequence import Request, Sequence, StepOutput, TokenFilter, takes_filled
from .slots import MIN_SHARED, Slots, common_prefix

__all__ = ["Engine", "Request", "Sequence", "Slots", "StepOutput", "TokenFilter", "takes_filled"]

MAX_NUM_BATCHED_TOKENS = 512  # tokens of a step; bounds the memory of activations and the wait for the next token
MAX_ALLOWED = 1024  # tokens that a filter allows, of which the exact logits are computed at once
MAX_PROMPT_LOGITS = 64  # tokens of a prompt whose logits are kept at a time
MAX_WIDTH, TRIED_POSITIONS = 17, (0, 600)  # of forwards in which the rounding of several tokens is tried


class _Step(NamedTuple):
    """A step that has begun on a device."""

    scheduled: list[Scheduled]
    begun: list[tuple[Forward, Callable[[], ForwardOutput]]]


class Engine:
    """Completes many requests at a time on a backend, and reuses keys and values of prompts that begin alike.

    Threads take turns on it.

    Args:
        backend: runs the forwards; used by this engine alone.
        max_num_batched_tokens: the budget of a step. A running sequence waits for no more than this many tokens
            between two of its own.
    """

    def __init__(self, backend: Backend, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS) -> None:
        self.backend = backend
        self.max_num_batched_tokens = whole_number("max_num_batched_tokens", max_num_batched_tokens, 1)
        self._num_hidden_layers, self._vocab_size = backend.config.num_hidden_layers, backend.config.vocab_size
        self._has_idle_layers = backend.config.last_writer < self._num_hidden_layers - 1
        self.slots = Slots(backend)
        self.planner = Planner()
        self._mtp = MtpDrafter(backend) if backend.config.has_mtp else None
        self.uses_shortlist = backend.has_preview
        self._unfinished: dict[int, Sequence] = {}  # by id, first come, first served
        self._next: _Step | None = None  # has begun; its tokens are not known yet
        self._committing: Sequence | None = None  # whose state an interrupt may have left half changed
        self._ids = count()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False

    def close(self) -> None:
        """Give back the backend's memory; every later call raises a RequestError."""
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._next = True, None
                self.backend.close()

    def add(self, request: Request) -> Sequence:
        """Queue a request; the steps from now on run it.

        Raises:
            RequestError: the prompt cannot be completed (`check_prompt`), there is a bias on an id that the model does
                not have, no such kind of reuse, or no MTP layer to draft with.
            PolicyError: the policy was made for another model, or has adapters, and a token several hidden states.
        """
        config = self.backend.config
        self.check_prompt(request.prompt_ids)
        one_of("reuse", request.reuse, REUSE)
        check_token_ids(request.params.logit_bias or (), config.vocab_size)
        request.policy.check_model(config.num_hidden_layers, config.identity)
        if request.drafting is not None and request.drafting.kind == "mtp" and self._mtp is None:
            message = "the model's files have no MTP layer, which would predict further tokens"
            raise RequestError(message, "draft with ngram or policy, or get files that have one", param="draft")
        if request.policy.adapters is not None and config.num_streams > 1:
            message = f"policy {request.policy.label} has adapters, which are for models with one hidden state a token"
            raise PolicyError(message, "use the policy without adapters")
        with self._exclusive():
            sequence = Sequence(next(self._ids), request, config.num_hidden_layers)
            self._unfinished[sequence.id] = sequence
        return sequence

    def step(self, only: Collection[Sequence] | None = None) -> list[StepOutput]:
        """Run one forward for each skip order and return the tokens that came out; none while prompts are computed.

        Args:
            only: the sequences to advance, the oldest first; by default all. While they all wait for a slot, the others
                advance instead, whoever added them: their tokens are in their `outputs` too.

        Raises:
            RequestError: every slot is held, so that waiting would never end.
        """
        with self._exclusive():
            self._recover()
            step, self._next = self._next, None
            if step is None:
                self._admit(only)
                scheduled = self._schedule(self._running(only) or self._blocking(only))
                predictions = self._forward(scheduled)
            else:
                scheduled = step.scheduled
                predictions = collected(scheduled, [(forward, wait()) for forward, wait in step.begun])
            outputs = []
            for part, predicted in zip(scheduled, predictions, strict=True):
                if part.sequence.finish_reason is None:
                    outputs += self._accept(part, predicted)
            if self._mtp is not None:
                self._mtp.catch_up([part.sequence for part in scheduled if part.sequence.slot is not None])
            self._begin_next(only)
            return outputs

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that has not finished, and free its slot."""
        if os.getpid() != self._pid:  # a forked copy, whose lock another thread may have held
            return
        with self._lock:
            self._recover()
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")

    def complete(self, requests: Iterable[Request]) -> list[list[int]]:
        """The completions of some requests together, as token ids, stop tokens included; raises what `add` raises."""
        sequences: list[Sequence] = []
        try:
            sequences += map(self.add, requests)
            while unfinished := [sequence for sequence in sequences if sequence.finish_reason is None]:
                self.step(unfinished)
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return [sequence.completion_ids for sequence in sequences]

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """A forward of the caller's own making, between steps, on slots of sequences that the caller added."""
        with self._exclusive():
            return self.backend.forward(batch)

    def check_prompt(self, prompt_ids: Collection[int]) -> None:
        """Raise a RequestError if a prompt is empty, too long, or has an id that the model does not have."""
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

    @cached_property
    def bitwise_width(self) -> int:
        """How many tokens of a sequence a forward may have so that their logits have the bits of single tokens.

        It is found by trial: kernels for several tokens may round otherwise. 1 if two tokens differ already.

        Raises:
            RequestError: no slot is free.
        """
        with self._exclusive():
            if not self.num_free_slots:
                raise RequestError("no slot is free to try how kernels round", "ask before requests run")
            self.uses_shortlist = False
            slot = self.slots.sequences.index(None)
            self.slots.kept[slot], self.slots.num_exact[slot] = [], 0
            starts = [start for start in TRIED_POSITIONS if start + MAX_WIDTH <= self.backend.context_length]
            return min(self._bitwise_width(slot, start) for start in starts or [0])

    def _bitwise_width(self, slot: int, start: int) -> int:
        """The same for tokens at one place of a slot, behind others."""
        room = min(MAX_WIDTH, self.backend.context_length)
        ids = np.random.default_rng(0).integers(0, self.backend.config.vocab_size, start + room).astype(np.int32)

        def logits(first: int, end: int) -> np.ndarray:
            tentative = first >= start  # they begin at the same place again and again
            positions, rows = np.arange(first, end, dtype=np.int32), tuple(range(end - first)) if first >= start else ()
            slots, active = np.full(end - first, slot, np.int32), (end - first,) * self._num_hidden_layers
            batch = TokenBatch(ids[first:end], positions, slots, active, rows, tentative=tentative)
            return self.backend.forward(batch).logits

        for first in range(0, start, self.max_num_batched_tokens):
            logits(first, min(start, first + self.max_num_batched_tokens))
        single = [logits(start + place, start + place + 1)[0].tobytes() for place in range(room)]
        for width in range(2, room + 1):
            if [row.tobytes() for row in logits(start, start + width)] != single[:width]:
                return width - 1
        return room

    @property
    def num_free_slots(self) -> int:
        """How many more sequences can run."""
        return self.slots.num_free

    @property
    def num_waiting(self) -> int:
        """How many sequences wait for a slot."""
        unfinished = sum(sequence.finish_reason is None for sequence in list(self._unfinished.values()))
        return unfinished - (len(self.slots.sequences) - self.slots.num_free)

    def _exclusive(self) -> threading.RLock:
        """The lock by which threads take turns. A fork would have the lock, but not the backend's threads."""
        if os.getpid() != self._pid:
            hint = 'load it in each process, or start processes with multiprocessing\'s "spawn" method'
            raise RequestError("the model was loaded before this process was forked, and cannot run in it", hint)
        if self._is_closed:
            raise RequestError("the model is closed", "load it again")
        return self._lock

    def _recover(self) -> None:
        """Complete what an interrupted call left half done."""
        if (sequence := self._committing) is not None:
            sequence.recover()
            if sequence.outputs and (reason := sequence.outputs[-1].finish_reason):
                self._finish(sequence, reason)
            self._committing = None
        for owner in self.slots.sequences:
            if owner is not None and owner.finish_reason is not None:
                self._finish(owner, owner.finish_reason)

    def _admit(self, only: Collection[Sequence] | None) -> None:
        """Give free slots to waiting sequences, first come, first served."""
        for sequence in self._unfinished.values() if only is None else only:
            if not self.num_free_slots:
                break
            if sequence.finish_reason is None and sequence not in self.slots.sequences:
                self.slots.take(sequence)

    def _running(self, only: Collection[Sequence] | None) -> list[Sequence]:
        """The running sequences, or those of them in `only`; the oldest first."""
        running = (sequence for sequence in self.slots.sequences if sequence and (only is None or sequence in only))
        return sorted(running, key=lambda sequence: sequence.id)

    def _blocking(self, only: Collection[Sequence] | None) -> list[Sequence]:
        """The running sequences whose slots those in `only` wait for; none if they do not wait."""
        if only is None or all(sequence.finish_reason is not None for sequence in only):
            return []
        others = [sequence for sequence in self._running(None) if not sequence.is_held]
        if not others:
            reason = f"all {self.backend.num_slots} slots hold sequences that have not finished"
            raise RequestError(reason, "finish or close one first, or raise max_batch_size")
        return others

    def _schedule(self, running: list[Sequence]) -> list[Scheduled]:
        """One token for each decoding sequence, then chunks of prompts, oldest first, as far as the budget goes.

        A prompt copies the prefixes that other slots hold, and waits if this step will compute one that it may take.
        """
        scheduled = self._decoding([sequence for sequence in running if sequence.step])
        left, num_decoding = self.max_num_batched_tokens - sum(part.num_outputs for part in scheduled), len(scheduled)
        for sequence in running:
            if sequence.step or left <= 0:
                continue
            self.slots.share(sequence)
            if not _can_wait(sequence, scheduled[num_decoding:]):
                prompt, scores = sequence.request.prompt_ids, sequence.request.scores_prompt
                first = min(sequence.num_computed_tokens, len(prompt) - 1)  # all, if the last step was interrupted
                first = self._resumable(sequence, first)
                chunk = list(prompt[first : first + (min(left, MAX_PROMPT_LOGITS) if scores else left)])
                if self._has_idle_layers and not scores and 1 < len(chunk) == len(prompt) - first:
                    del chunk[-1]  # the others need fewer layers than the one that predicts
                left -= len(chunk)
                num_outputs = len(chunk) if scores else int(first + len(chunk) == len(prompt))
                depths = [sequence.depth] * len(chunk)
                scheduled.append(Scheduled(sequence, chunk, first, depths, num_outputs, sequence.request.policy))
        return scheduled

    def _decoding(self, sequences: list[Sequence]) -> list[Scheduled]:
        """The last token of each sequence, and after it the proposed tokens that are worth verifying.

        Before it come those after which no state of recurrent layers was kept, because proposed ones were rejected.
        """
        drafts: dict[Sequence, Draft] = {}
        counts: dict[Sequence, int] = {}
        first = {sequence: self._resumable(sequence, sequence.num_tokens - 1) for sequence in sequences}
        if drafting := {sequence: most for sequence in sequences if (most := self._most_drafted(sequence))}:
            num_tokens = sum(sequence.num_tokens - first[sequence] for sequence in sequences)
            room = self._room(sequences, num_tokens)
            drafts = {s: draft for s, most in drafting.items() if (draft := s.propose(most)) is not None}
            counts = self._planned(drafts, num_tokens, room)
            others = {sequence: most for sequence, most in drafting.items() if sequence not in drafts}
            drafts |= self._predicted(others, first, room - sum(counts.values()))
        parts = []
        for sequence in sequences:
            draft, policy, start = drafts.get(sequence), sequence.request.policy, first[sequence]
            proposed = [] if draft is None else draft.token_ids[: counts.get(sequence)]
            token_ids = [*sequence.tokens_from(start), *proposed]
            depths = sequence.depths_from(start, len(token_ids))
            parts.append(Scheduled(sequence, token_ids, start, depths, 1 + len(proposed), policy, draft))
        return parts

    def _resumable(self, sequence: Sequence, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a running sequence its next forward begins."""
        assert sequence.slot is not None
        return self.backend.resumable(sequence.slot, num_tokens)

    def _most_drafted(self, sequence: Sequence) -> int:
        """How many tokens may be proposed: none at the end of the output or of the context."""
        drafting = sequence.request.drafting
        if drafting is None:
            return 0
        ends = sequence.request.params.max_tokens - sequence.step, self.backend.context_length - sequence.num_tokens
        return max(0, min(drafting.max_tokens, min(ends) - 1))

    def _room(self, sequences: list[Sequence], num_tokens: int) -> int:
        """How many proposed tokens fit in a forward that has `num_tokens` tokens of the sequences without them."""
        widths = [s.request.drafting.max_width for s in sequences if s.request.drafting is not None]
        limit = min([self.max_num_batched_tokens, *(width for width in widths if width is not None)])
        return max(0, limit - num_tokens)

    def _planned(self, drafts: dict[Sequence, Draft], num_tokens: int, room: int) -> dict[Sequence, int]:
        """How many tokens of each draft to verify in a forward that has `num_tokens` tokens without them."""
        planned = self.planner.plan([(draft, s.drafts) for s, draft in drafts.items()], num_tokens)
        counts = {}
        for (sequence, draft), wanted in zip(drafts.items(), planned, strict=True):
            is_always = sequence.request.drafting is not None and sequence.request.drafting.always
            counts[sequence] = min(len(draft.token_ids) if is_always else wanted, room)
            room -= counts[sequence]
        return counts

    def _predicted(self, most: dict[Sequence, int], first: dict[Sequence, int], room: int) -> dict[Sequence, Draft]:
        """What the MTP layer or policies predict, a forward for each token: as many tokens as are worth verifying.

        The keys and values that they write are overwritten by the verification. `first` is where the next forward of
        each running sequence begins.
        """
        counts: dict[Sequence, int] = {}
        for sequence, limit in most.items():
            drafting = sequence.request.drafting
            if drafting is not None and self._can_predict(sequence, first[sequence]):
                is_probe = sequence.step % PROBE_STEPS == 1
                planned = self.planner.plan_predictions(sequence.predictions, len(first), limit, is_probe)
                if wanted := min(limit if drafting.always else planned, room):
                    counts[sequence] = wanted
                    room -= wanted
        proposed: dict[Sequence, list[int]] = {sequence: [] for sequence in counts}
        active = list(counts)
        while active:
            started = time.perf_counter()
            predictions: dict[Sequence, Prediction] = {}
            if by_policy := [sequence for sequence in active if not self._uses_mtp(sequence)]:
                predicted = self._forward([_predicting(s, first[s], proposed[s]) for s in by_policy], proposes=True)
                predictions |= {s: each.predictions[0] for s, each in zip(by_policy, predicted, strict=True)}
            if self._mtp is not None and len(by_policy) < len(active):
                further = {sequence: proposed[sequence] for sequence in active if self._uses_mtp(sequence)}
                predictions |= self._mtp.predict(further, self.uses_shortlist)
            self.planner.note_draft(time.perf_counter() - started)
            going_on = []
            for sequence, prediction in predictions.items():
                assert not isinstance(prediction, int)
                if isinstance(prediction, np.ndarray):
                    token_id, probability = likeliest(prediction)
                else:
                    token_id, probability = prediction.likeliest()
                if sequence.is_proposed(proposed[sequence], token_id, probability):
                    proposed[sequence].append(token_id)
                    if len(proposed[sequence]) < counts[sequence]:
                        going_on.append(sequence)
            active = going_on
        return {sequence: Draft(token_ids, 0) for sequence, token_ids in proposed.items() if token_ids}

    def _uses_mtp(self, sequence: Sequence) -> bool:
        """Whether predictions are those of the MTP layer."""
        return uses_mtp(sequence.request, self.backend)

    def _can_predict(self, sequence: Sequence, first: int) -> bool:
        """Whether the MTP layer or a policy can predict tokens of a sequence, whose next forward begins at `first`."""
        drafting, last = sequence.request.drafting, sequence.num_tokens - 1
        if self._mtp is not None and self._uses_mtp(sequence):
            return self._mtp.can_predict(sequence)
        if drafting is None or drafting.policy is None or drafting.kind == "ngram":
            return False
        # The policy for drafting may not skip the layers that the tokens before the last skip.
        return sequence.depths_from(first, last - first) == [self._num_hidden_layers] * (last - first)

    def _forward(self, scheduled: list[Scheduled], proposes: bool = False) -> list[Predicted]:
        """What each part needs, from forwards one after the other. If it `proposes`, these are for drafts."""
        ended = []
        for forward in self._forwards(scheduled, proposes):
            started = time.perf_counter() if forward.is_timed else 0.0
            output = self.backend.forward(forward.batch)
            if forward.is_timed and not output.prepared:
                self.planner.note_forward(len(forward.parts), time.perf_counter() - started, forward.verifies)
            ended.append((forward, output))
        return collected(scheduled, ended)

    def _forwards(self, scheduled: list[Scheduled], proposes: bool = False) -> Iterator[Forward]:
        return forwards(self.backend, scheduled, self.uses_shortlist, proposes)

    def _begin_next(self, only: Collection[Sequence] | None) -> None:
        """Begin the next step if all decode, so that a device computes while the tokens of this one are made use of.

        What joins or leaves meanwhile does so a step later.
        """
        if not self.backend.overlaps:
            return
        if only is not None and any(one not in only and not one.is_held for one in self._running(None)):
            return  # whoever calls next may want to advance others
        self._admit(only)
        running = self._running(only)
        if running and all(one.step and not one.is_held and not one.request.drafting for one in running):
            scheduled = self._schedule(running)
            begun = [(forward, self.backend.begin(forward.batch)) for forward in self._forwards(scheduled)]
            self._next = _Step(scheduled, begun)

    def _accept(self, part: Scheduled, predicted: Predicted) -> list[StepOutput]:
        """Advance a sequence by each prediction, as long as the tokens proposed for the steps before came true."""
        sequence, outputs = part.sequence, list[StepOutput]()
        if not sequence.step and sequence.request.scores_prompt:
            return self._accept_prompt(part, predicted.predictions)
        first = len(part.token_ids) - max(1, part.num_outputs)  # the last token that is not a proposed one
        proposed = part.token_ids[first + 1 :]
        if proposed:
            sequence.num_drafted += len(proposed)
            self.planner.num_verified.update(range(len(proposed)))
        sequence.count_computed(part.position, part.depths[: first + 1], self._num_hidden_layers)
        for place, prediction in enumerate(predicted.predictions):
            if place:
                depth = part.depths[first + place]
                sequence.count_computed(part.position + first + place, [depth], self._num_hidden_layers)
            expected = proposed[place] if place < len(proposed) else None
            outputs.append(self._advance(sequence, prediction, expected))
            token_id = outputs[-1].token_id
            if expected is not None:
                self.planner.num_accepted[place] += token_id == expected
            if part.draft is not None and place < len(part.draft.token_ids):
                self._note_proposed(sequence, part.draft, place, token_id)
            if token_id != expected or sequence.finish_reason is not None:
                break
        if self._mtp is not None and predicted.head_inputs is not None:
            self._mtp.note(sequence, part.position, predicted.head_inputs[: first + max(1, len(outputs))])
        return outputs

    def _accept_prompt(self, part: Scheduled, predictions: list[Prediction]) -> list[StepOutput]:
        """Note the log-probabilities of a prompt's tokens after a chunk of it, and advance at its end."""
        sequence, request = part.sequence, part.sequence.request
        sequence.count_computed(part.position, part.depths, self._num_hidden_layers)
        for position, logits in enumerate(predictions, part.position + 1):
            if position == len(request.prompt_ids):
                return [self._advance(sequence, logits, None)]
            assert isinstance(logits, np.ndarray)
            scores = token_logprobs(logits, request.prompt_ids[position], request.prompt_logprobs or 0)
            sequence.prompt_logprobs[position] = scores
        return []

    def _note_proposed(self, sequence: Sequence, draft: Draft, place: int, token_id: int) -> None:
        """Count whether a proposed token came true, for the plans to come."""
        is_right = draft.token_ids[place] == token_id
        if draft.match:
            self.planner.note_token(draft.match + place, sequence.drafts, is_right)
        else:
            sequence.predictions.note(is_right)

    def _advance(self, sequence: Sequence, prediction: Prediction, expected: int | None) -> StepOutput:
        """Choose the next token of a sequence, set its next depth, and see whether it has finished."""
        request, params = sequence.request, sequence.request.params
        depth, step, logprobs = sequence.depth, sequence.step, None
        self._committing = sequence
        if isinstance(prediction, int):
            token_id = prediction
        else:
            shortlist = None if isinstance(prediction, np.ndarray) else self._shortlist(sequence, prediction)
            if shortlist is not None:
                ids, logits = shortlist
            else:
                whole = prediction if isinstance(prediction, np.ndarray) else prediction.whole()
                ids, logits = None, whole if params.logprobs is None else whole.copy()
                if sequence.token_filter is not None:
                    logits = sequence.token_filter.restrict(logits)
                sequence.adjust(logits)
            token_id = sample(logits, params, sequence.rng, ids)
            if params.logprobs is not None and token_id != NOT_A_NUMBER:
                logprobs = token_logprobs(whole, token_id, params.logprobs)
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        reason = None
        if token_id == NOT_A_NUMBER:
            reason = "error"
        elif is_eos or token_id in params.stop_token_ids:
            reason = "stop"
        elif step + 1 >= params.max_tokens or sequence.num_tokens + 1 >= self.backend.context_length:
            reason = "length"
        output = StepOutput(sequence.id, token_id, depth, reason, logprobs, token_id == expected)
        if token_id != NOT_A_NUMBER:
            sequence.accept(token_id)
            sequence.depth = request.policy.depth(step + 1)
        sequence.outputs.append(output)
        if reason is not None:
            self._finish(sequence, reason)
        self._committing = None
        return output

    def _shortlist(self, sequence: Sequence, previewed: PreviewedLogits) -> Shortlist | None:
        """The tokens that matter and their logits, ready to be sampled; None if only the whole head can tell.

        What changes the logits comes before the choice: a token that is banned must not hide one that is allowed.
        """
        params, token_filter = sequence.request.params, sequence.token_filter
        allowed = None if token_filter is None else token_filter.restrict(previewed.approximate)
        if allowed is not None and allowed is not previewed.approximate:
            ids = np.flatnonzero(allowed > -np.inf)
            if not 0 < len(ids) <= MAX_ALLOWED:
                return None
            logits = previewed.exact(ids)
            sequence.adjust(logits, ids)
            return ids, logits
        return previewed.shortlist(params.reach(self._vocab_size), sequence.adjust if sequence.adjusts else None)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and free its slot, which goes on holding the tokens that can be used again."""
        sequence.finish_reason = reason
        self._unfinished.pop(sequence.id, None)
        self.slots.release(sequence)


def _predicting(sequence: Sequence, first: int, proposed: list[int]) -> Scheduled:
    """The next token of a draft, under the policy for drafting; the first one after the tokens from `first` on."""
    drafting = sequence.request.drafting
    assert drafting is not None
    assert drafting.policy is not None
    start = sequence.num_tokens - 1 + len(proposed) if proposed else first
    token_ids = proposed[-1:] or sequence.tokens_from(first)
    depths = sequence.depths_from(start, len(token_ids) - 1)
    depths.append(drafting.policy.depth(sequence.step + len(proposed)))
    return Scheduled(sequence, token_ids, start, depths, 1, drafting.policy)


def _can_wait(sequence: Sequence, prompts: list[Scheduled]) -> bool:
    """Whether this step computes what the prompt needs next anyway, so that it can be copied in the next step."""
    request = sequence.request
    for part in () if request.scores_prompt else prompts:
        other = part.sequence
        is_usable = request.takes_filled or other.num_exact_tokens == part.position
        computed = other.request.prompt_ids[: part.position + len(part.token_ids)]
        shared = common_prefix(computed, request.prompt_ids[:-1]) if is_usable else 0
        if shared >= sequence.num_computed_tokens + MIN_SHARED:
            return True
    return False
