"""The engine's thread: it alone uses the engine, and runs commands between two steps.

asyncio sends it commands through a queue and receives chunks through `call_soon_threadsafe`, which costs a small model
a thirtieth of a step: those of steps shorter than `HAND_OVER_SECONDS` are handed over together. The chunks of a client
that reads slowly wait in its job, at most `max_tokens` for each output; the engine does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

from ..engine import Request
from ..errors import TaperError
from ..llm import LLM, Chunk, Stream
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from .metrics import Metrics
from .protocol import ApiError, queue_full

HAND_OVER_SECONDS = 0.01  # less than a screen shows
log = logging.getLogger(__name__)
_Result = Chunk | Exception


class Job:
    """The outputs of one HTTP request: an asynchronous iterator over their chunks, those together that are there.

    Raises:
        TaperError: the engine cannot complete the request.
        RuntimeError: the engine failed.
    """

    def __init__(self, requests: Sequence[Request], arrived: float) -> None:
        self.requests, self.arrived = requests, arrived
        self.cancelled = False  # set by asyncio, read by the engine thread
        self.results: asyncio.Queue[_Result] = asyncio.Queue()  # filled and read in asyncio's thread
        self._unfinished = len(requests)

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        while self._unfinished:
            results = [await self.results.get()]
            while not self.results.empty():
                results.append(self.results.get_nowait())
            chunks = [result for result in results if isinstance(result, Chunk)]
            if chunks:
                yield chunks
            for result in results:
                if isinstance(result, Exception):
                    raise result
            self._unfinished -= sum(chunk.output is not None for chunk in chunks)


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        llm: its engine is used by this thread alone from `start` on.
        metrics: counts what the engine does.
        max_waiting: sequences that may wait for a slot; more are rejected.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_waiting: int) -> None:
        self._llm, self._engine, self._metrics = llm, llm.engine, metrics
        self._max_in_flight = llm.engine.backend.num_slots + max_waiting
        self._in_flight = 0  # sequences; used by asyncio's thread alone
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: dict[Job, Stream] = {}  # those that have not ended
        self._unsent: list[tuple[Job, _Result]] = []
        self._sent_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="taper-engine", daemon=True)
        metrics.watch(self._engine)

    async def start(self) -> None:
        """Start the thread, and wait until it has run a few tokens. Chunks go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._warm)

    def stop(self) -> None:
        """End the thread after its current step; jobs that still run end with an error."""
        self._commands.put(None)
        self._thread.join()

    def check_alive(self) -> None:
        """Check that the thread runs.

        Raises:
            ApiError: it does not.
        """
        if not self._thread.is_alive():
            raise ApiError(503, "the engine has ended; restart the server", code="engine_ended")

    def check_room(self, count: int) -> None:
        """Check that so many more sequences may run or wait.

        Raises:
            ApiError: that would be too many, or the engine has ended.
        """
        self.check_alive()
        if self._in_flight + count > self._max_in_flight:
            raise queue_full()

    @contextmanager
    def submit(self, requests: Sequence[Request], arrived: float) -> Iterator[Job]:
        """Let the engine complete requests. On leaving, those that have not finished end before the next step.

        Args:
            requests: of one client.
            arrived: when they arrived, by `time.perf_counter`.

        Raises:
            ApiError: too many are waiting already.
        """
        self.check_room(len(requests))
        job = Job(requests, arrived)
        self._in_flight += len(requests)
        self._commands.put(lambda: self._begin(job))
        try:
            yield job
        finally:
            job.cancelled = True
            self._in_flight -= len(requests)
            self._commands.put(lambda: self._abort(job))

    # All that follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        while self._run_commands():
            try:
                self._step()
            except Exception as error:  # a bug: what ran is lost, later requests are served
                log.exception("a step of the engine failed")
                self._end_all(RuntimeError(f"the engine failed: {type(error).__name__}"))
        self._end_all(RuntimeError("the server stopped"))

    def _warm_up(self) -> None:
        """Run a few tokens, so that the first client does not wait for what is set up once."""
        policy = DepthPolicy.full(self._llm.config.num_hidden_layers)
        self._engine.complete([Request([0], SamplingParams(max_tokens=2, ignore_eos=True), policy)])

    def _run_commands(self) -> bool:
        """Run the commands that are queued, and wait for one if there are no jobs; False to stop."""
        while not self._jobs or not self._commands.empty():
            self._send()  # a command may begin a long prompt
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _begin(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            self._jobs[job] = Stream(self._engine, self._llm.tokenizer, job.requests, job.arrived)
        except TaperError as error:
            self._end(job, error)

    def _abort(self, job: Job) -> None:
        if (stream := self._jobs.pop(job, None)) is not None:
            stream.close()

    def _end(self, job: Job, error: Exception) -> None:
        self._abort(job)
        self._unsent.append((job, error))
        self._send()

    def _end_all(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._end(job, error)

    def _step(self) -> None:
        """Run one step of the engine, and send the chunks to their jobs unless the next step will soon be over too."""
        started = time.perf_counter()
        self._engine.step()
        chunks = []
        for job, stream in list(self._jobs.items()):
            try:
                received = stream.received()
            except TaperError as error:
                self._end(job, error)
                continue
            if stream.has_ended:
                del self._jobs[job]
            chunks += received
            self._unsent += [(job, chunk) for chunk in received]
        # Counted before they are sent, so that a client with a reply finds it in the metrics.
        now = time.perf_counter()
        self._metrics.count_step(chunks, now - started)
        all_decode = len(chunks) == sum(stream.num_unfinished for stream in self._jobs.values())
        if not all_decode or now - self._sent_at >= HAND_OVER_SECONDS:
            self._send()

    def _send(self) -> None:
        """Send results to their jobs in asyncio's thread, unless its loop has ended."""
        assert self._loop is not None
        if not self._unsent:
            return
        results, self._unsent, self._sent_at = self._unsent, [], time.perf_counter()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, results)


def _deliver(results: Sequence[tuple[Job, _Result]]) -> None:
    for job, result in results:
        job.results.put_nowait(result)
