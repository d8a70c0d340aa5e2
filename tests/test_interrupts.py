"""Ctrl-C at every line of a step and of a stream: what came stays, what was asked for still comes.

A trace function raises at each line of the engine and the stream: when it first runs, later, and when it last does.
"""

from __future__ import annotations

import asyncio
import errno
import linecache
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import FileIO

import pytest
from tiny import PLACE

from taper import LLM, DepthPolicy, SamplingParams
from taper.engine import Engine, Request, Sequence, Slots
from taper.engine.drafting import Drafting, NgramDrafter, Planner, SuffixIndex
from taper.errors import ModelError
from taper.server.engine_loop import EngineLoop
from taper.server.metrics import Metrics
from taper.stream import OutputBuilder, Stream

TAPERED = DepthPolicy.d3(6, 0.9, skip_order=[4, 1, 2])
PROMPTS = ["one", "a longer prompt, number two", "three"]  # for two slots: one has to wait
SAMPLED = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=7)


def functions(*classes: type) -> set:
    """The code of what `next` runs; not of making a stream, nor of ending one."""
    left_out = {"__init__", "__del__", "close", "abort", "add", "deliver", "received", "_exclusive"}
    members = [(name, getattr(member, "fget", member)) for cls in classes for name, member in vars(cls).items()]
    return {member.__code__ for name, member in members if name not in left_out and hasattr(member, "__code__")}


WATCHED = functions(Engine, Sequence, Slots, Stream, OutputBuilder, NgramDrafter, SuffixIndex, Planner)
DRAFTING = Drafting("ngram", max_tokens=3, min_match=1, always=True)
EXACT = Drafting("auto", policy=TAPERED, max_tokens=3, min_match=1, min_probability=0.0, always=True)


@cache
def begins_a_block(file: str, line: int) -> bool:
    """Whether the line is of a `with`."""
    return linecache.getline(file, line).strip().startswith("with ")


class Interrupt:
    """Raises KeyboardInterrupt, or another error, at the `at`-th line of the watched code that runs; never for 0.

    The line of a `with` comes again when its block ends, just before its lock is released. No signal is handled there:
    CPython looks for signals after calls and in loops only.
    """

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt, watched: set = WATCHED) -> None:
        self.at, self.lines = at, []  # function and number of each line that ran
        self.error, self.watched = error, watched

    def __enter__(self) -> Interrupt:
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def call(self, frame, event, argument):
        blocks = set()  # lines of `with` that have run in this call

        def line(frame, event, argument):
            if event == "line" and frame.f_lineno not in blocks:
                if begins_a_block(frame.f_code.co_filename, frame.f_lineno):
                    blocks.add(frame.f_lineno)
                self.lines.append((frame.f_code.co_name, frame.f_lineno))
                if len(self.lines) == self.at:
                    raise self.error
            return line

        return line if frame.f_code in self.watched else None


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(str(tiny_llama.folder), dtype="f32", context=64, max_batch_size=2, **PLACE)


def outputs_of(chunks: list) -> list:
    return [output for _, output in sorted((chunk.index, chunk.output) for chunk in chunks if chunk.output is not None)]


def read(stream: Stream, chunks: list) -> None:
    for chunk in stream:
        chunks.append(chunk)


def interrupted(
    llm, at: int, params: SamplingParams, draft: Drafting | None, policy: DepthPolicy
) -> tuple[Stream, list, Interrupt]:
    """A stream whose `at`-th line was interrupted, and the chunks that it gave before."""
    stream, chunks, interrupt = llm.stream(PROMPTS, params, policy=policy, draft=draft), [], Interrupt(at)
    try:
        with interrupt:
            read(stream, chunks)
    except KeyboardInterrupt:
        pass
    return stream, chunks, interrupt


def ends(llm) -> None:
    assert llm.engine.num_free_slots == 2
    assert llm.engine.num_waiting == 0


KINDS = ["sampled", "stop string", "drafted", "exact"]


# A stop string ends an output before its sequence; the first word of this one is found when the tests are run.
# After an interrupt, each kind goes on; at every fourth line it also aborts, at another fourth it closes, and the next
# kind does so at other lines.
@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_loses_nothing(llm, kind):
    params = SAMPLED
    if kind == "stop string":
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        text = llm.generate(PROMPTS[1], params, policy=TAPERED).text
        params = SamplingParams(max_tokens=4, ignore_eos=True, stop=[text[len(text) // 2 :][:2]])
    draft = {"drafted": DRAFTING, "exact": EXACT}.get(kind)
    policy = DepthPolicy.full(6) if kind == "exact" else TAPERED
    whole = llm.generate(PROMPTS, params, policy=policy)
    assert kind != "stop string" or "stop" in [output.finish_reason for output in whole]
    *_, none = interrupted(llm, 0, params, draft, policy)
    at_lines = {line: [at for at, other in enumerate(none.lines, 1) if other == line] for line in none.lines}
    assert len(at_lines) > 100, "the trace found the code"
    for number, times in enumerate(at_lines.values(), KINDS.index(kind)):
        goes_on, aborts, closes = times[0], times[len(times) // 2], times[-1]
        stream, chunks, interrupt = interrupted(llm, goes_on, params, draft, policy)
        read(stream, chunks)
        expected = [(output.token_ids, output.text, output.finish_reason) for output in whole]
        got = [(output.token_ids, output.text, output.finish_reason) for output in outputs_of(chunks)]
        assert got == expected, interrupt.lines[-1]
        ends(llm)
        if number % 2:
            continue
        if number % 4:
            stream, *_ = interrupted(llm, closes, params, draft, policy)
            stream.close()
            ends(llm)
            continue
        stream, chunks, interrupt = interrupted(llm, aborts, params, draft, policy)
        chunks += stream.abort()
        for index, (output, complete) in enumerate(zip(outputs_of(chunks), whole, strict=True)):
            assert output.token_ids == complete.token_ids[: len(output.token_ids)], interrupt.lines[-1]
            assert complete.text.startswith(output.text.rstrip("\ufffd")), interrupt.lines[-1]  # half a character
            assert output.text == "".join(chunk.text for chunk in chunks if chunk.index == index), interrupt.lines[-1]
            delivered = [chunk.token_id for chunk in chunks if chunk.index == index and chunk.token_id >= 0]
            assert output.token_ids == delivered[: len(output.token_ids)], interrupt.lines[-1]
        assert list(stream) == []
        ends(llm)
    again = llm.generate(PROMPTS, params, policy=policy)
    assert [output.token_ids for output in again] == [output.token_ids for output in whole]


@pytest.mark.ci
def test_an_error_at_any_line_of_the_servers_loop_ends_its_requests_and_no_later_ones(llm, caplog):
    caplog.set_level(logging.CRITICAL)  # each error is logged
    watched = WATCHED | {vars(EngineLoop)[name].__code__ for name in ("_step", "_waiting")}
    expected = [llm.generate(prompt, SAMPLED, policy=TAPERED).token_ids for prompt in PROMPTS]
    requests = [Request(llm.encode(prompt), SAMPLED, TAPERED, llm.tokenizer.eos_token_ids) for prompt in PROMPTS]

    async def tokens(loop: EngineLoop, chosen: list[Request], whole: bool) -> list[list[int]] | None:
        outputs: list[list[int]] = [[] for _ in chosen]
        try:
            with loop.submit(chosen, 0.0, False, whole) as job:
                async for chunks in job:
                    for chunk in chunks:
                        outputs[chunk.index].append(chunk.token_id)
        except RuntimeError:  # the engine failed
            return None
        return outputs

    async def failing(loop: EngineLoop, at: int) -> list:
        interrupt = Interrupt(at, ZeroDivisionError, watched)
        loop._commands.put(lambda: sys.settrace(interrupt.call))
        jobs = (tokens(loop, requests[:2], True), tokens(loop, requests[2:], False))
        got = await asyncio.wait_for(asyncio.gather(*jobs), 60)
        loop._commands.put(lambda: sys.settrace(None))
        assert at or got == [expected[:2], expected[2:]]
        assert all(one in (None, right) for one, right in zip(got, (expected[:2], expected[2:]), strict=True))
        assert await asyncio.wait_for(tokens(loop, requests, False), 60) == expected, interrupt.lines[-1]
        ends(llm)
        return interrupt.lines

    async def main() -> None:
        loop = EngineLoop(llm, Metrics(llm.engine), 4)
        await loop.start()
        try:
            lines = await failing(loop, 0)
            assert len(set(lines)) > 100, "the trace found the code"
            for number, line in enumerate(sorted(set(lines))):  # when it first runs, or when it last does
                first, last = lines.index(line) + 1, len(lines) - lines[::-1].index(line)
                await failing(loop, last if number % 2 else first)
        finally:
            loop.stop()

    asyncio.run(main())


@pytest.mark.device
def test_streams_made_in_one_thread_are_read_in_an_executor(llm):
    """As `asyncio.run_in_executor(None, next, stream)` does; more of them than slots, each in turns."""
    expected = [llm.generate(prompt, SAMPLED, policy=TAPERED).token_ids for prompt in PROMPTS]

    async def tokens(stream: Stream) -> list[int]:
        loop = asyncio.get_running_loop()
        chunks = []
        while chunk := await loop.run_in_executor(None, next, stream, None):
            chunks.append(chunk)
        return [chunk.token_id for chunk in chunks]

    async def main() -> list[list[int]]:
        streams = [llm.stream(prompt, SAMPLED, policy=TAPERED) for prompt in PROMPTS]
        return await asyncio.wait_for(asyncio.gather(*map(tokens, streams)), 60)

    assert asyncio.run(main()) == expected
    ends(llm)


@pytest.mark.device
def test_a_stream_waits_for_slots_that_another_thread_frees(llm):
    """The streams that hold every slot were made here and are read elsewhere, after one that waits."""
    streams = [llm.stream(prompt, SAMPLED, policy=TAPERED) for prompt in PROMPTS]
    first = [next(streams[0]), next(streams[1])]
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(list, streams[2]).result(60)
    assert len(last) == 4
    others: list[list] = [[], []]
    threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in zip(streams, others, strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    got = [[head.token_id, *(chunk.token_id for chunk in tail)] for head, tail in zip(first, others, strict=True)]
    assert got == [llm.generate(prompt, SAMPLED, policy=TAPERED).token_ids for prompt in PROMPTS[:2]]
    ends(llm)


@pytest.mark.parametrize("has_memory_files", [True, False])
@pytest.mark.parametrize("written", [OSError(errno.ENOSPC, "No space left on device"), 7])
def test_no_room_for_the_file_of_signals_is_one_line(tiny_gguf, monkeypatch, has_memory_files, written):
    def write(file, content):
        if isinstance(written, OSError):
            raise written
        return written

    if not has_memory_files:
        monkeypatch.delattr("os.memfd_create", raising=False)
    monkeypatch.setattr("taper.backends.ggml.FileIO", type("FileIO", (FileIO,), {"write": write}))
    with pytest.raises(ModelError, match="cannot make a temporary file: No space left on device"):
        LLM(tiny_gguf, threads=1)


def test_without_files_in_memory_a_temporary_one_does(tiny_gguf, monkeypatch):
    monkeypatch.delattr("os.memfd_create", raising=False)
    assert LLM(tiny_gguf, threads=1).generate("hi", max_tokens=3, ignore_eos=True).completion_tokens == 3
