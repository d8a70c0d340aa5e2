"""The chunks of some prompts' outputs, as the engine's steps bring them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from .engine import Engine
from .errors import ModelError, RequestError
from .loading.tokenizer import Tokenizer
from .output import Chunk, OutputBuilder
from .sequence import Request, StepOutput
from .sequence import Sequence as EngineSequence


class Stream(Iterator[Chunk]):
    """The chunks of some prompts' outputs as they come. Leave it early with `close`, or `abort` to keep what there is.

    An exception during a step, Ctrl-C among them, leaves the stream as it was: it can go on, be aborted or closed.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, requests: Sequence[Request], started: float | None = None
    ) -> None:
        """Add the requests; times are counted from `started`, by `time.perf_counter`, which is by default now."""
        self._engine, self._tokenizer = engine, tokenizer
        self._builders: list[OutputBuilder] = []
        self._ready: deque[Chunk] = deque()
        self._handed_over = time.perf_counter()
        self._started = self._handed_over if started is None else started
        self._sequences: dict[int, tuple[EngineSequence, OutputBuilder]] = {}  # those that have not finished, by id
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> int:
        """One more request; the index that its chunks will have. What the engine's `add` raises."""
        sequence = self._engine.add(request)
        self._builders.append(OutputBuilder(len(self._builders), sequence, self._tokenizer))
        self._sequences[sequence.id] = sequence, self._builders[-1]
        return len(self._builders) - 1

    def __next__(self) -> Chunk:
        self._started += time.perf_counter() - self._handed_over  # the caller's own time is not counted
        try:
            while not self._ready:
                if not self._sequences:
                    raise StopIteration
                self._step()
            return self._ready.popleft()
        finally:
            self._handed_over = time.perf_counter()

    def abort(self) -> list[Chunk]:
        """End every output that has not finished with what there is, as "abort"; the chunks that are left."""
        self.close()
        ended = [builder.abort() for builder in self._builders if builder.output is None]
        chunks = [*self._ready, *ended]
        self._ready.clear()
        return chunks

    def close(self) -> None:
        """Give up what has not finished."""
        for sequence, _ in self._sequences.values():
            self._engine.abort(sequence)
        self._sequences.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def sequence_ids(self) -> list[int]:
        """Those that have not finished."""
        return list(self._sequences)

    def take(self, step: StepOutput) -> Chunk:
        """The chunk that a step of one of these sequences makes, whoever ran it.

        Raises:
            ModelError: the model's output is not a number.
            RequestError: the request's filter lets no token pass.
        """
        sequence, builder = self._sequences[step.sequence_id]
        if step.finish_reason == "error":
            if sequence.token_filter is not None:
                raise RequestError(f"the grammar of the output lets no token pass at step {sequence.step}")
            raise ModelError(
                f"the model's output is not a number at step {sequence.step}",
                "try --dtype f32; if that does not help, its files are damaged",
            )
        chunk = builder.add(step, time.perf_counter() - self._started)
        if chunk.output is not None:  # the sequence itself goes on after a stop string
            self._engine.abort(sequence)
            del self._sequences[step.sequence_id]
        return chunk

    def _step(self) -> None:
        """Advance these sequences alone, and turn what came out into chunks."""
        for step in self._engine.step([sequence for sequence, _ in self._sequences.values()]):
            self._ready.append(self.take(step))
