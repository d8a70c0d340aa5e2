"""The engine's thread: everything that touches the engine happens in it, between two steps.

asyncio hands it commands through a queue and gets chunks through `call_soon_threadsafe`. A client that reads slowly
leaves its chunks waiting, at most `max_tokens` of them; the engine does not wait for it.
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
from .limits import ApiError, queue_full
from .metrics import Metrics

log = logging.getLogger(__name__)
_Event = Chunk | Exception


class Job:
    """The outputs of one HTTP request: an asynchronous iterator over their chunks, as they come.

    Raises:
        TaperError: the engine cannot complete the request.
        RuntimeError: the engine failed.
    """

    def __init__(self, requests: Sequence[Request], arrived: float) -> None:
        self.requests, self.arrived = requests, arrived
        self.stream: Stream | None = None  # the engine thread's
        self.cancelled = False  # set by asyncio, read by the engine thread
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._unfinished = len(requests)

    def put(self, event: _Event) -> None:
        """Take what the engine made; in asyncio's thread."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while self._unfinished:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            self._unfinished -= event.output is not None
            yield event


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        llm: its engine is used by this thread alone from `start` on.
        metrics: what is counted.
        max_waiting: sequences that may wait for a slot; more are refused.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_waiting: int) -> None:
        self._llm, self._engine, self._metrics = llm, llm.engine, metrics
        self._most = llm.engine.backend.num_slots + max_waiting
        self._in_flight = 0  # sequences; asyncio's
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by sequence id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="taper-engine", daemon=True)
        metrics.watch(self._engine)

    async def start(self) -> None:
        """Start the thread, and wait until it has run a few tokens; its outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._warm)

    def stop(self) -> None:
        """End the thread after the present step, and whatever still runs in it."""
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
        """Reject so many more sequences if that is more than may run and wait.

        Raises:
            ApiError: it is, or the engine has ended.
        """
        self.check_alive()
        if self._in_flight + count > self._most:
            raise queue_full()

    @contextmanager
    def submit(self, requests: Sequence[Request], arrived: float) -> Iterator[Job]:
        """Let the engine complete requests; on leaving, what has not finished is aborted before the next step.

        Args:
            requests: for the same client.
            arrived: when they came, by `time.perf_counter`.

        Raises:
            ApiError: too many wait already.
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

    # From here on: in the engine's thread.

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        while self._obey():
            try:
                self._step()
            except Exception as error:  # a bug; those that ran are lost, and whoever comes next is served
                log.exception("a step of the engine failed")
                for job in {id(job): job for job in self._jobs.values()}.values():
                    self._end(job, RuntimeError(f"the engine failed: {type(error).__name__}"))
        for job in list(self._jobs.values()):
            self._end(job, RuntimeError("the server stopped"))

    def _warm_up(self) -> None:
        """A few tokens, so that the first client does not wait for what is set up once."""
        policy = DepthPolicy.full(self._llm.config.num_hidden_layers)
        self._engine.complete([Request([0], SamplingParams(max_tokens=2, ignore_eos=True), policy)])

    def _obey(self) -> bool:
        """Carry out the commands that came, and wait for one if there is nothing else to do; False to stop."""
        while not self._jobs or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _begin(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            job.stream = Stream(self._engine, self._llm.tokenizer, job.requests, job.arrived)
        except TaperError as error:
            self._send([(job, error)])
            return
        self._jobs |= dict.fromkeys(job.stream.sequence_ids, job)

    def _abort(self, job: Job) -> None:
        if job.stream is not None:
            for sequence_id in job.stream.sequence_ids:
                del self._jobs[sequence_id]
            job.stream.close()

    def _end(self, job: Job, error: Exception) -> None:
        self._abort(job)
        self._send([(job, error)])

    def _step(self) -> None:
        """One step of the engine; each chunk goes to its job."""
        started, events = time.perf_counter(), []
        for step in self._engine.step():
            job = self._jobs.get(step.sequence_id)
            if job is None or job.stream is None:  # an earlier output of this step ended it
                continue
            try:
                chunk = job.stream.take(step)
            except TaperError as error:
                self._end(job, error)
                continue
            if chunk.output is not None:
                del self._jobs[step.sequence_id]
            events.append((job, chunk))
        # Before they are sent: who has a reply finds it counted.
        self._metrics.count_step([chunk for _, chunk in events], time.perf_counter() - started)
        self._send(events)

    def _send(self, events: Sequence[tuple[Job, _Event]]) -> None:
        """Hand events to asyncio, all at once; a loop that has ended wants none."""
        assert self._loop is not None
        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[Job, _Event]]) -> None:
    for job, event in events:
        job.put(event)
