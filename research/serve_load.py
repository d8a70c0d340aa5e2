"""taper serve under mixed load: are answers right, is memory flat, is anything stuck at the end?

    python research/serve_load.py load restart --minutes 30 --out research/results/serve_load.json

Clients ask for answers of random lengths under several policies, streamed or not; leave in the middle; send what is no
request; and do not read. Weights and key-value cache are f32, so each answer must be, token for token, the one that the
model gives alone. Then SIGTERM comes under load, and kill -9. Loopback only. Ends with exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import conditions, write
from server_process import CHAT, COMPLETIONS, Reply, Server, free_port, post, request_bytes, send, serving

from taper import LLM
from taper.models import find_model
from taper.models.download import DEFAULT_MODEL

NAME, SLOTS, CONTEXT, CLIENTS, WAITING = "load", 8, 512, 24, 12
CASES = 60  # different requests
POLICIES = ("full", "fast")
# What requests ask for; the model recommends the rest, and all of it where there is nothing. All filter: over a whole
# vocabulary at temperature 1, one draw in thousands lies so near to a border that rounding in another batch moves it.
SAMPLING: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05}, {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.0},
]  # fmt: skip
TEXT = "lighthouse river why seven the blue machine explains how winter counts stones to children and sleeps"
# How often each thing happens, of 20.
KINDS = {"json": 5, "stream": 5, "leave stream": 3, "leave json": 2, "bad request": 3, "not a request": 1, "silent": 1}
BAD = [
    {"model": "other"}, {"max_tokens": 0}, {"messages": []}, {"unknown": 1}, {"n": 99}, {"temperature": "hot"},
    {"stop": [5]}, {"taper": {"policy": "none"}}, {"logit_bias": {"-1": 1}}, {"response_format": {"type": "xml"}},
]  # fmt: skip
NOT_REQUESTS = [b"\x00" * 100, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"{" * 70_000]
WARM_UP_SECONDS = 180.0
FLAT = 1.05  # memory at the end over memory at the beginning
RESTARTS = 5  # after kill -9; the median counts


@dataclass(frozen=True)
class Case:
    """A request, and the text that the model gives alone."""

    body: dict[str, Any]
    text: str


def make_cases(llm: LLM, count: int, rng: random.Random) -> list[Case]:
    """Requests of random lengths; half of their prompts share a beginning."""
    cases, words = [], TEXT.split()
    shared = " ".join(rng.choices(words, k=60))
    for number in range(count):
        prompt = (shared if number % 2 else "") + " ".join(rng.choices(words, k=rng.randint(3, 80)))
        options = {"max_tokens": rng.choice([1, 8, 30, 60, 120]), "seed": number}
        options |= rng.choice(SAMPLING)
        policy = rng.choice(POLICIES)
        chosen = llm.resolve_policy(mode="full") if policy == "full" else llm.resolve_policy(policy)
        text = llm.generate(prompt, llm.sampling_params(**options), policy=chosen).text
        messages = [{"role": "user", "content": prompt}]
        cases.append(Case({"model": NAME, "messages": messages, **options, "taper": {"policy": policy}}, text))
    return cases


class Load:
    """What the clients do, and what came of it."""

    def __init__(self, server: Server, cases: list[Case], seed: int) -> None:
        self.port, self.cases, self.rng = server.port, cases, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> None:
        """Keep all clients busy for so long."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(CLIENTS)))

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
            try:
                await getattr(self, "_" + kind.replace(" ", "_"))(self.rng.choice(self.cases))
            except (OSError, ValueError) as error:
                self._fault(f"{kind}: {error!r}")
            self.counts[kind] += 1
            await asyncio.sleep(self.rng.random() * 0.2)

    async def _json(self, case: Case) -> None:
        await self._check(case, await post(self.port, CHAT, case.body))

    async def _stream(self, case: Case) -> None:
        await self._check(case, await post(self.port, CHAT, case.body | {"stream": True}))

    async def _leave_stream(self, case: Case) -> None:
        await post(self.port, CHAT, case.body | {"stream": True}, events=self.rng.randint(1, 20))

    async def _leave_json(self, case: Case) -> None:
        try:
            await asyncio.wait_for(post(self.port, CHAT, case.body), self.rng.random() * 2)
        except asyncio.TimeoutError:
            self.counts["left json early"] += 1

    async def _bad_request(self, case: Case) -> None:
        reply = await post(self.port, CHAT, case.body | self.rng.choice(BAD))
        if not 400 <= reply.status < 500 or set(json.loads(reply.body)) != {"error"}:
            self._fault(f"a bad request gave {reply.status}: {reply.body[:80]!r}")

    async def _not_a_request(self, _: Case) -> None:
        try:
            reply = await asyncio.wait_for(send(self.port, self.rng.choice(NOT_REQUESTS)), 40)
            status = reply.status
        except asyncio.TimeoutError:
            status = 0
        except (OSError, ValueError):  # the connection was closed
            status = 400
        if not 400 <= status < 500:
            self._fault(f"what is no request gave {status}")

    async def _silent(self, case: Case) -> None:
        """A client that asks and does not read."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes("POST", CHAT, json.dumps(case.body | {"stream": True}).encode()))
        await asyncio.sleep(self.rng.random() * 5)
        writer.transport.abort()

    async def _check(self, case: Case, reply: Reply) -> None:
        if reply.status == 429:
            self.counts["queue full"] += 1
            await asyncio.sleep(1)  # as Retry-After says
        elif not reply.is_complete:
            self._fault(f"status {reply.status}, cut short: {reply.body[-80:]!r}")
        elif reply.text != case.text:
            self._fault(f"{case.body['messages'][0]['content'][:30]!r}: {reply.text[:60]!r}, not {case.text[:60]!r}")
        else:
            self.counts["right answers"] += 1

    def _fault(self, reason: str) -> None:
        self.wrong.append(reason)
        print("wrong:", reason, file=sys.stderr)


async def metric(port: int, name: str) -> float:
    """A figure of /metrics."""
    lines = (await send(port, request_bytes("GET", "/metrics"))).body.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


async def under_load(server: Server, cases: list[Case], seconds: float) -> dict[str, Any]:
    """The mixed load, with memory sampled; and whether all is free afterwards."""
    rng = random.Random(1)
    for length in (CONTEXT - 2, 64):  # every cell of the cache is written once, so that its memory is there
        prompts = [[rng.randrange(1000, 20000) for _ in range(length)] for _ in range(SLOTS)]
        body = {"model": NAME, "max_tokens": 1}
        await asyncio.gather(*(post(server.port, COMPLETIONS, body | {"prompt": prompt}) for prompt in prompts))
    load, samples = Load(server, cases, 2), []
    await load.run(min(WARM_UP_SECONDS, seconds / 4))  # graphs for batches of each size are built
    work = asyncio.create_task(load.run(seconds))
    while not work.done():
        samples.append(server.rss_mib)
        await asyncio.wait([work], timeout=min(5.0, seconds / 40))
    await work
    end = time.monotonic() + 30
    while busy := await metric(server.port, "taper_running_sequences") + await metric(
        server.port, "taper_waiting_sequences"
    ):
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    tenth = max(1, len(samples) // 10)
    first, last = statistics.median(samples[:tenth]), statistics.median(samples[-tenth:])
    return {
        "seconds": seconds,
        "counts": dict(load.counts),
        "wrong": load.wrong[:20],
        "stuck_sequences": int(busy),
        "output_tokens": int(await metric(server.port, "taper_completion_tokens_total")),
        "rss_mib": {
            "first_tenth": round(first),
            "last_tenth": round(last),
            "most": round(max(samples)),
            "over_time": [round(sample) for sample in samples[:: max(1, len(samples) // 30)]],
        },
        "memory_ratio": round(last / first, 4),
        "threads": server.status("Threads"),
    }


async def terminated(server: Server, cases: list[Case]) -> dict[str, int]:
    """SIGTERM while answers that are not streamed run and wait: how many of them still come."""
    asked = [asyncio.create_task(post(server.port, CHAT, case.body)) for case in cases[: SLOTS + WAITING]]
    accepted = 0.0
    while accepted < len(asked) - sum(task.done() for task in asked):
        accepted = await metric(server.port, "taper_running_sequences") + await metric(
            server.port, "taper_waiting_sequences"
        )
    server.process.send_signal(signal.SIGTERM)
    replies = await asyncio.gather(*asked, return_exceptions=True)
    right = [
        isinstance(reply, Reply) and reply.is_complete and reply.text == case.text
        for reply, case in zip(replies, cases, strict=False)
    ]
    return {"accepted": len(asked), "answered": sum(right)}


def restarted(command: list[str], body: dict[str, Any]) -> dict[str, Any]:
    """Seconds until a server is ready again after kill -9, and from then to its first answer; medians."""
    port, times = free_port(), []
    for _ in range(RESTARTS + 1):  # each is killed at the end of its block, and the next takes its port
        with serving([*command, "--port", str(port)], port) as server:
            started = time.perf_counter()
            reply = asyncio.run(post(port, CHAT, body | {"max_tokens": 1}))
            first = time.perf_counter() - started
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status} after a restart: {reply.body[:200]!r}")
            times.append((server.started_s, first))
    ready, first = (round(statistics.median(column), 2) for column in zip(*times[1:], strict=True))
    return {"ready": ready, "first_answer": first, "restarts": RESTARTS}


def passed(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold, of the parts that were run."""
    checks = {}
    if load := result.get("load"):
        checks |= {
            "answers": not load["wrong"] and load["counts"].get("right answers", 0) > 0,
            "memory": load["memory_ratio"] < FLAT,
            "nothing stuck": load["stuck_sequences"] == 0,
            "sigterm": result["sigterm"]["answered"] == result["sigterm"]["accepted"],
        }
    if restart := result.get("restart_after_kill_s"):
        checks["restart within 3 s"] = restart["ready"] + restart["first_answer"] < 3
    return checks


def main() -> None:
    """Run the parts asked for and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["load", "restart"])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the file of results; a part that does not run is kept")
    options = parser.parse_args()
    llm = LLM(options.model, dtype="f32", context=CONTEXT, threads=options.threads, max_batch_size=1)
    cases = make_cases(llm, CASES, random.Random(0))
    llm.engine.backend.close()
    del llm
    command = [sys.executable, "-m", "taper", "serve", "--model", options.model, "--name", NAME, "--dtype", "f32"]
    command += ["--threads", str(options.threads), "--context", str(CONTEXT), "--max-batch-size", str(SLOTS)]
    command += ["--max-waiting", str(WAITING), "--policy", "full"]
    about = conditions(find_model(options.model)) | {"threads": options.threads}
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if "load" in options.parts:
        result["conditions"] = about | {"kv_cache": "f32", "batch": SLOTS, "dtype": "f32", "context": CONTEXT}
        result["conditions"] |= {"clients": CLIENTS, "max_waiting": WAITING, "different_requests": len(cases)}
        result["conditions"] |= {"of_20": KINDS, "sampling": SAMPLING}
        for unused in ("rounds", "statistic"):
            result["conditions"].pop(unused)
        port = free_port()
        with serving([*command, "--port", str(port)], port) as server:
            result["load"] = asyncio.run(under_load(server, cases, 60 * options.minutes))
            result["sigterm"] = asyncio.run(terminated(server, cases))
            server.process.wait(60)
    if "restart" in options.parts:
        measured = {key: about[key] for key in ("date", "commit", "cpu", "threads")}
        result["restart_after_kill_s"] = restarted(command, cases[0].body) | measured
    result["passed"] = passed(result)
    write(options.out, result)
    print(json.dumps(result, indent=1))
    sys.exit(not all(result["passed"].values()))


if __name__ == "__main__":
    main()
