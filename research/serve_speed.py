"""taper serve's speed: many streams at a time, tapered beside full depth, newcomers, and llama.cpp's llama-server.

    python research/serve_speed.py --out research/results/serve_speed.json

Leave the machine alone while it runs. Prompts are random token ids, so that no cache holds them. What is compared takes
turns; all figures are medians. llama-server takes part where --llama-bin or PATH has it. Ends with exit status 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from decode import conditions, median, write
from server_process import COMPLETIONS, Reply, free_port, post, serving

from taper import DepthPolicy
from taper.lab.bench.measure import alternate
from taper.models import find_model, load_model
from taper.models.config import ModelConfig
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import fitting_policies

NAME, PROMPT_TOKENS, NEWCOMER_TOKENS, CONTEXT = "speed", 32, 200, 1024
AFTER_TOKENS = 16  # of each stream, before a newcomer comes


class Target(NamedTuple):
    """A server, and how its requests ask for a depth and for no end before `max_tokens`."""

    port: int
    fields: dict[str, Any]


class Streams(NamedTuple):
    """Tokens per second of all streams together, from the first request to the last token, and while all decode.

    `decode` counts events: a server that holds back parts of characters, as llama-server does, has fewer than tokens.
    """

    whole: float
    decode: float


class Prompts:
    """Random prompts, none like another."""

    def __init__(self, vocab_size: int) -> None:
        self._rng, self._vocab_size = random.Random(0), vocab_size

    def body(self, target: Target, length: int, max_tokens: int) -> dict[str, Any]:
        """A greedy, streamed request."""
        prompt = [self._rng.randrange(self._vocab_size // 10, self._vocab_size) for _ in range(length)]
        return {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | target.fields


async def complete(target: Target, prompts: Prompts, batch: int, max_tokens: int) -> Streams:
    """Speed of so many streams that begin together."""
    bodies = [prompts.body(target, PROMPT_TOKENS, max_tokens) for _ in range(batch)]
    replies = await asyncio.gather(*(post(target.port, COMPLETIONS, body) for body in bodies))
    check(replies, max_tokens)
    tokens = [reply.times[:max_tokens] for reply in replies]  # another event may tell the end
    begin, end = max(times[0] for times in tokens), min(times[-1] for times in tokens)
    inside = sum(begin < moment <= end for times in tokens for moment in times)
    whole = batch * max_tokens / max(times[-1] for times in tokens)
    return Streams(whole, inside / (end - begin) if end > begin else 0.0)


async def newcomer(target: Target, prompts: Prompts, batch: int, max_tokens: int) -> float:
    """Seconds to the first token of a prompt that comes while so many streams decode; 0 streams: an idle server."""
    streams = [
        asyncio.create_task(post(target.port, COMPLETIONS, prompts.body(target, PROMPT_TOKENS, max_tokens)))
        for _ in range(batch)
    ]
    if streams:  # another one like them has so many tokens when they do
        await post(target.port, COMPLETIONS, prompts.body(target, PROMPT_TOKENS, AFTER_TOKENS))
    reply = await post(target.port, COMPLETIONS, prompts.body(target, NEWCOMER_TOKENS, 2))
    assert not any(stream.done() for stream in streams), "the load ended before the newcomer's first token"
    check([reply], 2)
    check(await asyncio.gather(*streams), max_tokens)
    return reply.times[0]


def check(replies: Sequence[Reply], max_tokens: int) -> None:
    """Check that all were answered, with as many tokens as were asked for: speeds are worked out from these.

    Raises:
        RuntimeError: one was not.
    """
    for reply in replies:
        if reply.status != 200 or not reply.times:
            raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
        if reply.completion_tokens != max_tokens:
            raise RuntimeError(f"{reply.completion_tokens} tokens, not {max_tokens}: {reply.body[-200:]!r}")


def llama_version(program: str) -> str:
    """What llama-server says of itself, such as "version: 9897 (0123abc)"."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version"))


def token_flops(config: ModelConfig, depth: int) -> int:
    """Multiplications by weights for a token at a depth, lm_head included; attention itself is left out."""
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return depth * layer + config.vocab_size * config.hidden_size


def ideal_speedup(config: ModelConfig, policy: DepthPolicy, max_tokens: int) -> float:
    """Full depth's FLOPs over a policy's, for the steps after the first."""
    tapered = [token_flops(config, policy.depth(step)) for step in range(1, max_tokens)]
    return token_flops(config, config.num_hidden_layers) / statistics.fmean(tapered)


def main() -> None:
    """Run all parts and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--policy", default="fast-plain", help="a shipped policy of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder of llama-server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = find_model(options.model)
    config = load_model(path).config
    policy = fitting_policies(config.num_hidden_layers, config.identity)[options.policy]
    program = shutil.which("llama-server", path=options.llama_bin and str(options.llama_bin))
    slots = options.batch + 1  # a newcomer finds a free one
    prompts, port, llama_port = Prompts(config.vocab_size), free_port(), free_port()
    command = [sys.executable, "-m", "taper", "serve", "--model", options.model, "--name", NAME, "--port", str(port)]
    command += ["--threads", str(options.threads), "--context", str(CONTEXT), "--max-batch-size", str(slots)]
    llama = [str(program), "-m", str(path), "-t", str(options.threads), "-c", str(CONTEXT * slots), "-np", str(slots)]
    llama += ["--host", "127.0.0.1", "--port", str(llama_port), "-fa", "on", "--no-webui", "-ngl", "0"]
    with ExitStack() as stack:
        stack.enter_context(serving(command, port))
        full = Target(port, {"taper": {"mode": "full", "ignore_eos": True}})
        targets = {"full": full, "taper": Target(port, {"taper": {"policy": options.policy, "ignore_eos": True}})}
        if program:
            stack.enter_context(serving(llama, llama_port))
            targets["llama_server"] = Target(llama_port, {"ignore_eos": True, "cache_prompt": False})

        def streams(name: str, batch: int) -> Callable[[], Streams]:
            return lambda: asyncio.run(complete(targets[name], prompts, batch, options.tokens))

        def ttft(name: str, batch: int) -> Callable[[], float]:
            return lambda: asyncio.run(newcomer(targets[name], prompts, batch, options.tokens))

        wanted = [(name, batch) for name in targets for batch in (1, options.batch)]
        speeds = alternate({f"{name} {batch}": streams(name, batch) for name, batch in wanted}, options.rounds)
        idle_and_busy = [(name, batch) for name in targets if name != "taper" for batch in (0, options.batch)]
        waits = alternate({f"{name} {batch}": ttft(name, batch) for name, batch in idle_and_busy}, options.rounds)

    def ratio(a: str, b: str, of: Callable[[Streams], float]) -> float:
        return median([of(x) / of(y) for x, y in zip(speeds[a], speeds[b], strict=True)])

    batch, ideal = options.batch, ideal_speedup(config, policy, options.tokens)
    speedup = ratio(f"taper {batch}", f"full {batch}", lambda run: run.decode)
    result: dict[str, Any] = {
        "conditions": conditions(path)
        | {"threads": options.threads, "rounds": options.rounds, "answer_tokens": options.tokens, "batch": batch}
        | {"prompt_tokens": PROMPT_TOKENS, "newcomer_prompt_tokens": NEWCOMER_TOKENS, "policy": options.policy}
        | {"slots": slots, "context": CONTEXT, "client": "one Python process on the same cores"}
        | ({"llama_server": llama_version(program)} if program else {}),
        "tokens_per_second": {
            name: {"whole": median([run.whole for run in runs]), "decode": median([run.decode for run in runs])}
            for name, runs in speeds.items()
        },
        "ttft_s": {name: median(values) for name, values in waits.items()},
        "streams_over_one": ratio(f"full {batch}", "full 1", lambda run: run.whole),
        "taper_over_full": {"measured": speedup, "ideal_by_flops": round(ideal, 4), "ratio": round(speedup / ideal, 4)},
        "ttft_under_load_over_idle": median(
            [a / b for a, b in zip(waits[f"full {batch}"], waits["full 0"], strict=True)]
        ),
    }
    passed = {
        "streams at least 1.5x one": result["streams_over_one"] >= 1.5,
        "tapered at least 0.9 of the ideal": speedup / ideal >= 0.9,
        "newcomer under 3x": result["ttft_under_load_over_idle"] < 3,
    }
    if program:
        against = {
            f"{name} {count}": ratio(f"full {count}", f"llama_server {count}", of)
            for count in (1, batch)
            for name, of in (("whole", lambda run: run.whole), ("decode", lambda run: run.decode))
        }
        result["full_over_llama_server"] = against
        passed["at least 0.95x llama-server"] = against[f"whole {batch}"] >= 0.95
    result["passed"] = passed
    write(options.out, result)
    print(json.dumps(result, indent=1))
    sys.exit(not all(passed.values()))


if __name__ == "__main__":
    main()
