"""Outputs as they grow: chunks of text from the tokens of sequences, stop strings, times, and what was written last."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .engine import Engine, Request, StepOutput
from .engine import Sequence as EngineSequence
from .errors import ModelError, RequestError
from .models.tokenizer import Tokenizer
from .policy import DepthPolicy
from .sampling import TokenLogprobs

MAX_OUTPUTS = 256  # whose tokens are remembered


@dataclass(frozen=True)
class Output:
    """A completion and what it took.

    `token_ids` leaves out the stop token; `depths` has one entry for each of them, the first of them L. `mean_depth`
    is over steps from 1 on. `ttft_s`: seconds from the call to the first token. `tokens_per_second`: (n - 1) over the
    time from first to last token. Time that the caller spends between chunks is not counted. `cached_tokens`: those of
    the prompt that an earlier one had in common with it, so that they were not computed again. `drafted_tokens`: those
    that were proposed and verified; `accepted_tokens`: those of the completion that had been proposed.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    depths: list[int]
    mean_depth: float
    ttft_s: float
    tokens_per_second: float
    policy: DepthPolicy
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprobs | None]] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one step added to the output of prompt `index`. The last chunk of an output carries it as `output`.

    `token_id` is -1 and `depth` 0 in the chunk that ends an aborted output. A stop token has no `logprobs`. `seconds`
    is when the token came, counted as the output's times are. `is_drafted`: whether it had been proposed.
    """

    index: int
    text: str
    token_id: int
    depth: int
    output: Output | None = None
    logprobs: TokenLogprobs | None = None
    seconds: float = 0.0
    is_drafted: bool = False


class Stream(Iterator[Chunk]):
    """The chunks of some prompts' outputs as they come. Leave it early with `close`, or `abort` to keep what there is.

    An exception during a step, Ctrl-C among them, leaves the stream as it was: it can go on, be aborted or closed. It
    may be read in another thread than the one that made it. An output that has ended is forgotten once it is delivered.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        latest: LatestOutputs,
        requests: Sequence[Request],
        started: float | None = None,
        first_index: int = 0,
    ) -> None:
        """Add the requests; times are counted from `started`, by `time.perf_counter`, which is by default now."""
        self._engine, self._tokenizer, self._latest = engine, tokenizer, latest
        self._next_index = first_index
        self._unfinished: dict[EngineSequence, None] = {}  # the oldest first
        self._waiting: deque[OutputBuilder] = deque()  # in the order in which the engine begins them
        self._begun: dict[OutputBuilder, None] = {}  # those from which more chunks will come
        self._turns: deque[OutputBuilder] = deque()  # those that had a chunk when tokens were last taken
        self._handed_over = time.perf_counter()
        self._started = self._handed_over if started is None else started
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> int:
        """Add one more request; returns the index that its chunks will have, and raises what `Engine.add` raises.

        A stop string that is the name of a control token, which texts leave out, ends the output at this token.
        """
        if (params := request.params).stop:
            control = [token_id for token_id, name in self._tokenizer.special_tokens.items() if name in params.stop]
            request = replace(request, params=replace(params, stop_token_ids=(*params.stop_token_ids, *control)))
        sequence = self._engine.add(request)
        self._unfinished[sequence] = None
        self._waiting.append(OutputBuilder(self._next_index, sequence, self._tokenizer, self._latest))
        self._next_index += 1
        return self._next_index - 1

    def __next__(self) -> Chunk:
        self._started += time.perf_counter() - self._handed_over  # the caller's own time is not counted
        try:
            output = self._next_output()
        finally:
            self._handed_over = time.perf_counter()
        return output.deliver()

    def _next_output(self) -> OutputBuilder:
        """The output whose turn it is, once it has a chunk; raises StopIteration if no more chunks will come."""
        while True:
            while self._turns:
                if (output := self._turns.popleft()).num_ready:
                    return output
            self._take_all()
            self._turns.extend(output for output in self._begun if output.num_ready)
            if not self._turns:
                if not self._unfinished:
                    raise StopIteration
                self._engine.step(self._unfinished)

    def received(self) -> list[Chunk]:
        """The chunks of all tokens that have come since the last call, whoever ran the steps.

        Raises:
            ModelError: the model's output is not a number.
            RequestError: the request's filter allows no token.
        """
        self._take_all()
        return [output.deliver() for output in self._begun for _ in range(output.num_ready)]

    @property
    def has_ended(self) -> bool:
        """Whether all outputs have finished; their last chunks may not be delivered yet."""
        return not self._unfinished

    @property
    def unfinished(self) -> tuple[EngineSequence, ...]:
        """The sequences of outputs that have not finished, the oldest first."""
        return tuple(self._unfinished)

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, in which other outputs advanced."""
        self._started += seconds

    def abort(self) -> list[Chunk]:
        """End every output that has not finished with what there is, as "abort"; the chunks that are left."""
        self.close()
        self._take_all()
        for output in self._begun:
            output.abort()
        return self.received()

    def close(self) -> None:
        """Give up what has not finished."""
        for sequence in list(self._unfinished):
            self._engine.abort(sequence)
            self._unfinished.pop(sequence, None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take_all(self) -> None:
        """Make chunks of all tokens that have come."""
        while self._waiting and self._waiting[0].has_begun:
            self._begun[self._waiting[0]] = None
            self._waiting.popleft()
        for output in list(self._begun):
            while output.num_taken < len(output.sequence.outputs) and not output.has_ended:
                output.take(time.perf_counter() - self._started)
            if output.has_ended and output.sequence.finish_reason is None:
                self._engine.abort(output.sequence)  # as at a stop string
            if output.sequence.finish_reason is not None:
                self._unfinished.pop(output.sequence, None)
            if output.has_ended and not output.num_ready:
                self._begun.pop(output, None)


class OutputBuilder:
    """The output of prompt `index` as it grows: a chunk for each token of its sequence.

    A chunk counts once it is in `_chunks`: if making one is interrupted, the state is built again from the tokens
    before it.
    """

    def __init__(self, index: int, sequence: EngineSequence, tokenizer: Tokenizer, latest: LatestOutputs) -> None:
        self.sequence, self._index, self._tokenizer, self._latest = sequence, index, tokenizer, latest
        self.num_delivered = 0  # chunks
        self._chunks: list[Chunk] = []  # made, and not delivered or just delivered
        self._first = 0  # how many were made before these
        self._has_failed = False
        self._texts: list[str] = []  # of all chunks
        self._begin_text()
        self._times: tuple[float, float] | None = None  # seconds from the call to the first and the last token
        self._is_whole = True  # False while a chunk is made

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun its sequence, or ended it."""
        return self.sequence.slot is not None or self.sequence.finish_reason is not None

    @property
    def num_taken(self) -> int:
        """Chunks that have been made."""
        return self._first + len(self._chunks)

    @property
    def num_ready(self) -> int:
        """Chunks that have been made and not delivered."""
        return self.num_taken - self.num_delivered

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more chunks than those that have been made."""
        return self._has_failed or (bool(self._chunks) and self._chunks[-1].output is not None)

    def deliver(self) -> Chunk:
        """The next chunk that has not been delivered."""
        self.num_delivered += 1
        return self._chunks[self.num_delivered - self._first - 1]

    def take(self, seconds: float) -> None:
        """Make the chunk of the next token, which came `seconds` after the call.

        A stop string may finish the output before its sequence.

        Raises:
            ModelError: the model's output is not a number.
            RequestError: the request's filter allows no token.
        """
        step = self.sequence.outputs[self.num_taken]
        if step.finish_reason == "error":
            self._has_failed = True
            if self.sequence.token_filter is not None:
                raise RequestError(f"the grammar of the output allows no token at step {self.num_taken}")
            raise ModelError(
                f"the model's output is not a number at step {self.num_taken}",
                "try --dtype f32; if that does not help, its files are damaged",
            )
        self._recover()
        self._chunks, self._first = self._chunks[self.num_delivered - self._first :], self.num_delivered
        self._is_whole = False
        is_stop = step.finish_reason == "stop"
        times = self._times if is_stop else (self._times[0] if self._times else seconds, seconds)
        self._texts.append(text := self._text_of(step))
        finish_reason = "stop" if self._stops.complete else step.finish_reason
        output = None if finish_reason is None else self._finished(finish_reason, self.num_taken + 1 - is_stop, times)
        logprobs = None if is_stop else step.logprobs
        chunk = Chunk(self._index, text, step.token_id, step.depth, output, logprobs, seconds, step.is_drafted)
        self._chunks.append(chunk)
        self._is_whole, self._times = True, times

    def abort(self) -> None:
        """End the output here, with what there is."""
        if not self.has_ended:
            self._recover()
            self._is_whole = False
            self._texts.append(text := self._stops.push(self._text.flush(is_cut=True)) + self._stops.flush())
            output = self._finished("abort", self.num_taken, self._times)
            seconds = self._times[1] if self._times else 0.0
            self._chunks.append(Chunk(self._index, text, -1, 0, output, seconds=seconds))

    def _recover(self) -> None:
        """Return to the last chunk, after an interrupt while one was being made."""
        if not self._is_whole:
            self._begin_text()
            self._texts = [self._text_of(step) for step in self.sequence.outputs[: self.num_taken]]
            self._is_whole = True

    def _begin_text(self) -> None:
        request = self.sequence.request
        self._text = self._tokenizer.text_stream(request.prompt_ids if request.text_goes_on else None)
        self._stops = _StopStrings(request.params.stop)

    def _text_of(self, step: StepOutput) -> str:
        """The text that became certain with a token; the stop token is no part of the completion."""
        text = "" if step.finish_reason == "stop" else self._text.push(step.token_id)
        if step.finish_reason is None:
            return self._stops.push(text)
        text += self._text.flush(is_cut=step.finish_reason == "length")
        return self._stops.push(text) + self._stops.flush()

    def _finished(self, finish_reason: str, num_tokens: int, times: tuple[float, float] | None) -> Output:
        """The output of the first tokens of the sequence, the first and last of which came at these times."""
        steps, request = self.sequence.outputs[:num_tokens], self.sequence.request
        depths = [step.depth for step in steps]
        tapered = depths[1:]
        first, last = times or (0.0, 0.0)
        logprobs = [step.logprobs for step in steps if step.logprobs is not None]
        text, token_ids = "".join(self._texts), [step.token_id for step in steps]
        if text and not request.text_goes_on:
            self._latest.note(text, token_ids)
        return Output(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt_ids),
            depths=depths,
            mean_depth=sum(tapered) / len(tapered) if tapered else float(request.policy.num_hidden_layers),
            ttft_s=first,
            tokens_per_second=(num_tokens - 1) / (last - first) if last > first else 0.0,
            policy=request.policy,
            cached_tokens=self.sequence.num_cached_tokens,
            drafted_tokens=self.sequence.num_drafted,
            accepted_tokens=sum(step.is_drafted for step in steps),
            logprobs=None if request.params.logprobs is None else logprobs,
            prompt_logprobs=None if request.prompt_logprobs is None else self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[tuple[int, TokenLogprobs | None]]:
        """The prompt's tokens, each with its log-probabilities; the first has none."""
        found = self.sequence.prompt_logprobs
        return [(token_id, found.get(place)) for place, token_id in enumerate(self.sequence.request.prompt_ids)]


class LatestOutputs:
    """The tokens of the latest outputs by their text.

    A text can be cut into tokens in several ways, and sampling may choose another one than the tokenizer does. The
    key-value cache holds an output only in the tokens that were generated.
    """

    def __init__(self) -> None:
        self.by_text: dict[str, tuple[int, ...]] = {}  # the oldest first
        self._lock = threading.Lock()

    def note(self, text: str, token_ids: list[int]) -> None:
        """Remember the tokens of an output, and forget the oldest output if there are many."""
        with self._lock:
            self.by_text.pop(text, None)
            self.by_text[text] = tuple(token_ids)
            if len(self.by_text) > MAX_OUTPUTS:
                del self.by_text[next(iter(self.by_text))]


class _StopStrings:
    """Finds stop strings in a growing text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.complete = False  # whether one has come

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; none after one has come."""
        if not self._stops:
            return text
        if self.complete:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.complete = True
            certain, self._held = self._held[: min(places)], ""
            return certain
        longest = max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        return certain

    def flush(self) -> str:
        """What is still held when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)
