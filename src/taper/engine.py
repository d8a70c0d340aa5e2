"""The loop: prefill, decode, verify; token ids in, token ids out. Knows no text.

One `Engine` serves one backend. Every token's forward runs the layers its policy retains at its step; rows that
share a skip order share a forward, deepest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .backends import Backend, TokenBatch
from .errors import RequestError
from .policy import DepthPolicy, active_prefixes
from .sampling import SamplingParams, TokenLogprobs, sample, token_logprobs

PREFILL_CHUNK = 512  # tokens a forward; bounds the memory of activations


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it. `stop_ids` are the model's own; `params` may add to them."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    policy: DepthPolicy
    stop_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Row:
    """A request under way in one slot of the key-value cache.

    `complete`: leading tokens of `ids` whose keys and values every layer has; only these may be used again.
    `finish_reason` is None while it runs; a caller that sets it ends the row before its next forward.
    """

    request: Request
    index: int
    slot: int
    ids: list[int]
    rng: np.random.Generator
    complete: int = 0
    finish_reason: str | None = None

    @property
    def step(self) -> int:
        """Index of the next token of the answer."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def depth(self) -> int:
        """Layers of the forward that predicts the next token."""
        return self.request.policy.depth(self.step)


@dataclass(frozen=True)
class Step:
    """One token of a row's answer, the stop token included. `row.finish_reason` tells whether it was the last."""

    row: Row
    token_id: int
    depth: int
    logprobs: TokenLogprobs | None


class Engine:
    """Answers requests on a backend, several at a time, reusing what its slots still hold."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # Free slots and the ids whose keys and values they hold complete.
        self._kept: dict[int, list[int]] = {slot: [] for slot in range(backend.num_slots)}

    def generate_step(self, requests: Sequence[Request]) -> Generator[Step, None, None]:
        """Answer requests together; a row leaves as it finishes, and a waiting request takes its slot.

        Raises:
            RequestError: a prompt cannot be answered (`check_prompt`), or others hold every slot.
            PolicyError: a policy was made for another model.
        """
        for request in requests:
            self.check_prompt(request.prompt_ids)
            request.policy.check_model(self.backend.config.num_hidden_layers, self.backend.config.identity)
        waiting = deque(enumerate(requests))
        rows: list[Row] = []
        try:
            while waiting or rows:
                while waiting and (self._kept or not rows):
                    index, request = waiting.popleft()
                    rows.append(row := self.admit(request, index))
                    yield self._take(row, self.prefill(row))
                rows = self.release(rows)
                for row, logits in zip(rows, self.decode(rows), strict=True):
                    yield self._take(row, logits)
                rows = self.release(rows)
        finally:
            for row in rows:
                row.finish_reason = row.finish_reason or "abort"
            self.release(rows)

    def prefill(self, row: Row) -> np.ndarray:
        """Run the prompt at full depth, in chunks, from where the slot's cache ends; logits of its last token [V]."""
        prompt = row.request.prompt_ids
        logits = np.empty((0, 0), np.float32)
        while row.complete < len(prompt):
            end = min(row.complete + PREFILL_CHUNK, len(prompt))
            tokens = prompt[row.complete : end]
            depths = [self.backend.config.num_hidden_layers] * len(tokens)
            last = (len(tokens) - 1,) if end == len(prompt) else ()
            logits = self._forward(row.request.policy, [row.slot] * len(tokens), row.complete, tokens, depths, last)
            row.complete = end
        first: np.ndarray = logits[0]
        return first

    def decode(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """One forward for the last token of each row: logits [V] of each, in the order of `rows`."""
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(row.request.policy.skip_order, []).append(row)
        logits: dict[int, np.ndarray] = {}
        for group in groups.values():
            group.sort(key=lambda row: -row.depth)
            slots, depths = [row.slot for row in group], [row.depth for row in group]
            positions = [len(row.ids) - 1 for row in group]
            tokens = [row.ids[-1] for row in group]
            out = self._forward(group[0].request.policy, slots, positions, tokens, depths, tuple(range(len(group))))
            for row, row_logits in zip(group, out, strict=True):
                if row.complete == len(row.ids) - 1 and row.depth == self.backend.config.num_hidden_layers:
                    row.complete += 1
                logits[row.slot] = row_logits
        return [logits[row.slot] for row in rows]

    def verify(self, row: Row, draft_ids: Sequence[int]) -> np.ndarray:
        """Logits [1 + len(draft_ids), V] that decoding the last token and then these would give, in one forward.

        Each token runs at the depth of its own step. `row` is left as it is: its caller decides what to accept.
        """
        tokens = [row.ids[-1], *draft_ids]
        depths = [row.request.policy.depth(row.step + i) for i in range(len(tokens))]
        slots, every = [row.slot] * len(tokens), tuple(range(len(tokens)))
        return self._forward(row.request.policy, slots, len(row.ids) - 1, tokens, depths, every)

    def _forward(
        self,
        policy: DepthPolicy,
        slots: Sequence[int],
        positions: int | Sequence[int],
        tokens: Sequence[int],
        depths: Sequence[int],
        logits_rows: tuple[int, ...],
    ) -> np.ndarray:
        """`positions` is one for each token, or that of the first of consecutive ones."""
        if isinstance(positions, int):
            positions = range(positions, positions + len(tokens))
        batch = TokenBatch(
            tokens=np.asarray(tokens, np.int32),
            positions=np.asarray(positions, np.int32),
            slots=np.asarray(slots, np.int32),
            active=active_prefixes(policy, depths),
            logits_rows=logits_rows,
        )
        return self.backend.forward(batch)

    def _take(self, row: Row, logits: np.ndarray) -> Step:
        """Sample the next token of a row, and find whether the row ends with it."""
        request, params, depth = row.request, row.request.params, row.depth
        prompt_length = len(request.prompt_ids)
        token_id = sample(logits, params, request.prompt_ids, row.ids[prompt_length:], row.rng)
        logprobs = None if params.logprobs is None else token_logprobs(logits, token_id, params.logprobs)
        row.ids.append(token_id)
        if (token_id in request.stop_ids and not params.ignore_eos) or token_id in params.stop_token_ids:
            row.finish_reason = "stop"
        elif row.step >= params.max_tokens or len(row.ids) >= self.backend.context_length:
            row.finish_reason = "length"
        return Step(row, token_id, depth, logprobs)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that cannot be answered.

        Raises:
            RequestError: it is empty, too long, or holds an id that the model has not.
        """
        config = self.backend.config
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if len(ids) >= self.backend.context_length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context holds {self.backend.context_length} with the answer",
                f"shorten it, or raise --context (this model: up to {config.max_position_embeddings})",
            )
        if bad := next((i for i in ids if not 0 <= i < config.vocab_size), None):
            raise RequestError(f"token id {bad} is outside the vocabulary of {config.vocab_size}")

    @property
    def free_slots(self) -> int:
        """How many more requests can be admitted."""
        return len(self._kept)

    def admit(self, request: Request, index: int = 0) -> Row:
        """Take the free slot that holds most of the prompt and least besides, and keep what it holds of it.

        Raises:
            RequestError: no slot is free.
        """
        if not self._kept:
            count = self.backend.num_slots
            raise RequestError(f"all {count} slots answer other requests", "finish one, or raise max_batch_size")
        prompt = list(request.prompt_ids)
        shared = {slot: _common_prefix(kept, prompt) for slot, kept in self._kept.items()}
        slot = max(shared, key=lambda slot: 2 * shared[slot] - len(self._kept[slot]))
        del self._kept[slot]
        # The last token runs in any case: its logits are what comes next.
        complete = min(shared[slot], len(prompt) - 1)
        return Row(request, index, slot, prompt, np.random.default_rng(request.params.seed), complete)

    def release(self, rows: Iterable[Row]) -> list[Row]:
        """Free the slots of finished rows; the rows that go on."""
        going_on = []
        for row in rows:
            if row.finish_reason is None:
                going_on.append(row)
            else:
                self._kept[row.slot] = row.ids[: row.complete]
        return going_on


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
