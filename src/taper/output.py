"""Token ids to text: stop strings, streaming without half characters, counts and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .loading.tokenizer import TextStream, Tokenizer
from .policy import DepthPolicy
from .sampling import TokenLogprobs
from .sequence import Sequence as EngineSequence
from .sequence import StepOutput


@dataclass(frozen=True)
class Output:
    """A completion and what it took.

    `token_ids` leaves out the stop token; `depths` has one entry for each of them, the first of them L. `mean_depth`
    is over steps from 1 on. `ttft_s`: seconds from the call to the first token. `tokens_per_second`: (n - 1) over the
    time from first to last token. Time that the caller spends between chunks is not counted. `cached_tokens`: those of
    the prompt that an earlier one had in common with it, so that they were not computed again.
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
    logprobs: list[TokenLogprobs] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one step added to the output of prompt `index`. The last chunk of an output carries it as `output`.

    `token_id` is -1 and `depth` 0 in the chunk that ends an aborted output. A stop token has no `logprobs`.
    """

    index: int
    text: str
    token_id: int
    depth: int
    output: Output | None = None
    logprobs: TokenLogprobs | None = None


class OutputBuilder:
    """The output of prompt `index` as it grows. `output` is None until it has finished."""

    def __init__(self, index: int, sequence: EngineSequence, tokenizer: Tokenizer) -> None:
        self.output: Output | None = None
        self._index, self._sequence, request = index, sequence, sequence.request
        self._text, self._stops = TextStream(tokenizer), _StopStrings(request.params.stop)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._depths: list[int] = []
        self._times: list[float] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, step: StepOutput, seconds: float) -> Chunk:
        """Take a token that came `seconds` after the call. A stop string may finish the output before its sequence."""
        if step.finish_reason == "stop":  # the stop token is no part of the completion
            piece = self._text.flush()
        else:
            self._token_ids.append(step.token_id)
            self._depths.append(step.depth)
            self._times.append(seconds)
            if step.logprobs is not None:
                self._logprobs.append(step.logprobs)
            piece = self._text.push(step.token_id)
            if step.finish_reason is not None:
                piece += self._text.flush()
        piece = self._stops.push(piece)
        if self._stops.complete:
            self._finish("stop", piece)
        elif step.finish_reason is not None:
            piece += self._stops.flush()
            self._finish(step.finish_reason, piece)
        else:
            self._pieces.append(piece)
        logprobs = None if step.finish_reason == "stop" else step.logprobs
        return Chunk(self._index, piece, step.token_id, step.depth, self.output, logprobs)

    def abort(self) -> Chunk:
        """End the output here, with what there is."""
        piece = self._stops.push(self._text.flush()) + self._stops.flush()
        self._finish("abort", piece)
        return Chunk(self._index, piece, -1, 0, self.output)

    def _finish(self, finish_reason: str, last_piece: str) -> None:
        tapered, times, request = self._depths[1:], self._times, self._sequence.request
        elapsed = times[-1] - times[0] if times else 0.0
        self.output = Output(
            text="".join([*self._pieces, last_piece]),
            token_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt_ids),
            depths=self._depths,
            mean_depth=sum(tapered) / len(tapered) if tapered else float(request.policy.num_hidden_layers),
            ttft_s=times[0] if times else 0.0,
            tokens_per_second=(len(times) - 1) / elapsed if elapsed else 0.0,
            policy=request.policy,
            cached_tokens=self._sequence.num_cached_tokens,
            logprobs=None if request.params.logprobs is None else self._logprobs,
        )


class _StopStrings:
    """Finds stop strings in a growing text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.complete = False  # whether one has come

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; none after one has come."""
        if self.complete:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.complete = True
            return self._held[: min(places)]
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
