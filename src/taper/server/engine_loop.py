"""The engine's thread: it alone uses the engine, and runs commands between two steps.

asyncio sends it commands through a queue and receives chunks through `call_soon_threadsafe`. As a call of that takes a
thirtieth of a small model's step, the chunks of steps shorter than `HAND_OVER_SECONDS` are handed over together. The
chunks of a client that reads slowly wait in its job, at most `max_tokens` of an output; the engine does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

from ..backends import end_process
from ..engine import Request
from ..errors import DeviceLostError, TaperError
from ..llm import LLM
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from ..stream import Chunk, Stream
from .metrics import Metrics
from .protocols.errors import ApiError, device_lost, queue_full

HAND_OVER_SECONDS = 1 / 60  # as often as a screen shows something new
log = logging.getLogger(__name__)
_Result = Chunk | Exception


class Job:
    """The outputs of one HTTP request: an asynchronous iterator over lists of the chunks that have come meanwhile.

    If it is `whole`, they come together once all outputs have finished: asyncio's work for each would take the time of
    a compute thread.

    Raises:
        TaperError: the engine cannot complete the request.
        RuntimeError: the engine failed.
    """

    def __init__(self, requests: Sequence[Request], arrived: float, in_turn: bool, whole: bool) -> None:
        self.requests, self.arrived, self.in_turn, self.whole = requests, arrived, in_turn, whole
        self.kept: list[Chunk] = []  # chunks of a whole reply, in the engine's thread
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
        metrics: counts what the engine and the server do.
        max_waiting: sequences that may wait for a slot; more are rejected.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_waiting: int) -> None:
        self._llm, self._engine, self.metrics = llm, llm.engine, metrics
        self._max_in_flight = self._engine.backend.num_slots + max_waiting
        self._submitted: set[Job] = set()  # whose clients wait; used by asyncio's thread alone
        self._is_lost, self.ready_at = False, math.inf  # when the first tokens had run, by `time.monotonic`
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: dict[Job, list[Stream]] = {}  # jobs that have not ended; in turn, one stream for each request
        self._unsent: list[tuple[Job, _Result]] = []
        self._stepped_at = self._sent_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="taper-engine", daemon=True)

    async def start(self) -> None:
        """Start the thread, and wait until it has run a few tokens. Chunks go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._warm)
        self.ready_at = time.monotonic()

    def stop(self) -> None:
        """End the thread after its current step; jobs that still run end with an error."""
        if not self._is_lost:
            self._commands.put(None)
            self._thread.join()

    def lose_device(self) -> None:
        """End all jobs with an error and accept no more, as the current step never ends. Any thread may call it."""
        self._is_lost = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end_submitted)

    def _end_submitted(self) -> None:
        for job in self._submitted:
            job.results.put_nowait(device_lost())

    def check_alive(self) -> None:
        """Check that the thread runs, on a device that is there.

        Raises:
            ApiError: it does not.
        """
        if self._is_lost:
            raise device_lost()
        if not self._thread.is_alive():
            raise ApiError(503, "the engine has ended; restart the server", code="engine_ended")

    def check_room(self, count: int) -> None:
        """Check that `count` more sequences may run or wait.

        Raises:
            ApiError: that would be too many, or the engine has ended.
        """
        self.check_alive()
        if sum(len(job.requests) for job in self._submitted) + count > self._max_in_flight:
            raise queue_full()

    @contextmanager
    def submit(self, requests: Sequence[Request], arrived: float, in_turn: bool, whole: bool) -> Iterator[Job]:
        """Let the engine complete requests. On leaving, those that have not finished end before the next step.

        Args:
            requests: of one client.
            arrived: when they arrived, by `time.perf_counter`.
            in_turn: advance them by a token in turn, not together, and count the time of each alone.
            whole: hand over their chunks once all have finished.

        Raises:
            ApiError: too many sequences would wait, or the engine has ended.
        """
        self.check_room(len(requests))
        job = Job(requests, arrived, in_turn, whole)
        self._submitted.add(job)
        self._commands.put(lambda: self._begin(job))
        try:
            yield job
        finally:
            self._submitted.remove(job)
            self._commands.put(lambda: self._abort(job))

    # Everything below runs in the engine's thread, but for `_deliver`.

    def _run(self) -> None:
        try:  # run a few tokens, so that the first client does not wait for what is set up once
            policy = DepthPolicy.full(self._llm.config.num_hidden_layers)
            self._engine.complete([Request([0], SamplingParams(max_tokens=2, ignore_eos=True), policy)])
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        goes_on = True
        while goes_on:
            try:
                if goes_on := self._run_commands():
                    self._step()
            except DeviceLostError as error:
                end_process(error)
            except Exception as error:  # a bug: the jobs that ran are lost, later requests are served
                log.exception("a step of the engine failed")
                self._end_all(RuntimeError(f"the engine failed: {type(error).__name__}"))
        self._end_all(RuntimeError("the server stopped"))

    def _run_commands(self) -> bool:
        """Run the commands that are queued, and wait for one while there are no jobs; False to stop."""
        while not self._jobs or not self._commands.empty():
            self._send()  # a command may begin a long prompt
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _begin(self, job: Job) -> None:
        streams = self._jobs[job] = list[Stream]()
        try:
            for requests in [[request] for request in job.requests] if job.in_turn else [job.requests]:
                streams.append(self._llm.stream_of(requests, job.arrived, len(streams)))
        except TaperError as error:
            self._end(job, error)

    def _abort(self, job: Job) -> None:
        for stream in self._jobs.pop(job, ()):
            stream.close()

    def _end(self, job: Job, error: Exception) -> None:
        self._abort(job)
        self._unsent.append((job, error))
        self._send()

    def _end_all(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._end(job, error)

    def _step(self) -> None:
        """Run one step of the engine, and send the chunks to their jobs, or keep them until a next, short step."""
        started, waiting = time.perf_counter(), self._waiting()
        all_streams = [stream for streams in self._jobs.values() for stream in streams]
        advancing = [stream for stream in all_streams if stream not in waiting]
        self._engine.step([sequence for stream in advancing for sequence in stream.unfinished] if waiting else None)
        now = time.perf_counter()
        for stream, job in waiting.items():
            stream.leave_out(now - max(self._stepped_at, job.arrived))
        chunks: list[Chunk] = []
        for job, streams in list(self._jobs.items()):
            try:
                received = [chunk for stream in streams for chunk in stream.received()]
            except TaperError as error:
                self._end(job, error)
                continue
            chunks += received
            has_ended = all(stream.has_ended for stream in streams)
            if job.whole:
                job.kept += received
                received = job.kept if has_ended else []
            self._unsent += [(job, chunk) for chunk in received]
            if has_ended:
                del self._jobs[job]
        self._stepped_at = time.perf_counter()  # what is left out begins after the times of these chunks
        # Counted before they are sent, so that a client with a reply finds it in the metrics.
        self.metrics.count_step(chunks, now - started)
        all_decode = len(chunks) == sum(len(stream.unfinished) for stream in all_streams)
        if not all_decode or now - self._sent_at >= HAND_OVER_SECONDS:
            self._send()

    def _waiting(self) -> dict[Stream, Job]:
        """The streams that wait for their turn in this step: all of a job but the one with the fewest tokens."""
        waiting: dict[Stream, Job] = {}
        for job, streams in self._jobs.items():
            if job.in_turn and (unfinished := [stream for stream in streams if stream.unfinished]):
                turn = min(unfinished, key=lambda stream: stream.unfinished[0].step)
                waiting |= {stream: job for stream in unfinished if stream is not turn}
        return waiting

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
