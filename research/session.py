"""A session as a measure: conversations of four turns over HTTP, on taper serve and on llama.cpp's llama-server.

    python research/session.py --llama-bin DIR --out research/results/session-smollm2-135m-instruct.json

A client asks four questions that belong together, and sends all that was said before with each of them. Requests leave
sampling to the server ("default", as a client does that sets nothing) or ask for temperature 0 ("greedy"). Full depth,
the shipped policies of the model, those that end in -plain left out, and llama-server take turns; servers keep their
caches of prompts, but no run repeats the text of another. Each cell, a kind of sampling and a number of clients, is
written when it is finished; other cells of the file stay. Leave the machine alone while it runs. Ends with exit status
1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median as exact_median
from typing import Any, NamedTuple

from decode import conditions, median, write
from serve_speed import NAME, Target, check, llama_version
from server_process import CHAT, Reply, free_port, post, serving

from taper.lab.bench.measure import alternate
from taper.models import find_model, load_model
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import fitting_policies

Json = dict[str, Any]
CONTEXT, FIRST_NUMBER = 2048, 10_000
FULL, LLAMA_SERVER = "full", "llama_server"
PLAIN = "-plain"  # policies without adapters that one with adapters replaces: as fast, and worse
SAMPLING: dict[str, Json] = {"default": {}, "greedy": {"temperature": 0}}
# How many times as fast as llama-server a target must at least be, by model and cell.
LEAST_RATIOS = {
    "qwen2.5-coder-1.5b-instruct": {
        "default 1": {FULL: 1.10, "balanced": 1.20},
        "default 8": {FULL: 1.30},
    },
    DEFAULT_MODEL: {
        "default 1": {FULL: 1.00, "fast": 1.10},
        "default 8": {FULL: 1.30},
    },
}
MOST_WAIT = 1.2  # first tokens of later turns, over those of full depth

CONVERSATIONS = (
    (
        "Explain in detail how a hash table works.",
        "What happens when two keys have the same hash? Describe several ways to deal with it.",
        "How and when does such a table grow, and what does that cost?",
        "Write a simple one in Python with comments, and explain each part.",
    ),
    (
        "Write a Python function that merges two sorted lists, and explain how it works.",
        "Now change it so that it merges any number of sorted lists.",
        "What are the time and the memory that it needs? Explain why.",
        "Write thorough tests for it, with all the edge cases that you can think of.",
    ),
    (
        "I want to learn how to cook for myself. Which ten dishes should I begin with, and why?",
        "Describe step by step how to make the first of them.",
        "What mistakes do beginners make with it, and how can I avoid them?",
        "Plan a week of dinners around these dishes, with a shopping list.",
    ),
    (
        "How does a web browser load a page? Describe every step from the address to the picture.",
        "Explain the part about DNS in more detail.",
        "What does HTTPS add, and how do both sides agree on a key?",
        "Which caches take part in this, and how does each of them decide what to keep?",
    ),
    (
        "Tell me a long story about a lighthouse keeper who finds a message in a bottle.",
        "Continue the story: who wrote the message?",
        "Now tell the same events as the writer of the message saw them.",
        "Write an ending in which the two of them meet.",
    ),
    (
        "Write a small command-line program in Python that keeps a list of tasks in a JSON file.",
        "Add priorities and due dates to it.",
        "How should it behave if the file is damaged? Change the program accordingly.",
        "Explain how you would turn it into a web service, and show the main parts of the code.",
    ),
    (
        "What causes the seasons? Explain it as you would to a curious twelve-year-old, with examples.",
        "Why is it colder on a mountain, although it is nearer to the Sun?",
        "How do the seasons differ between the equator and the poles?",
        "Make a quiz of ten questions about all this, with answers.",
    ),
    (
        "Compare threads, processes and asynchronous code in Python. When would you use each?",
        "Show an example of a race condition, and explain it.",
        "Fix it in three different ways and compare them.",
        "How would you find such a mistake in a large program? Describe your steps.",
    ),
    (
        "Give me a plan for learning to play the guitar within a year.",
        "Describe the first month in detail, week by week.",
        "My fingers hurt and the changes between chords are slow. What can I do?",
        "Suggest twelve songs, one for each month, and say what each of them teaches.",
    ),
    (
        "Explain what an index of a database is, and how a B-tree helps.",
        "Design the tables of a small library: books, members and loans. Write the SQL.",
        "Write queries for the overdue books and for the most popular ones, and explain them.",
        "Which indexes would you add, and how would you check that they help?",
    ),
    (
        "Describe the history of the bicycle from its beginnings to today.",
        "How did it change cities and the lives of the people in them?",
        "Compare the parts of a modern road bicycle with those of a mountain bicycle.",
        "Write a guide to caring for a bicycle over the year.",
    ),
    (
        "Write a class in Python for matrices, with addition and multiplication, and explain it.",
        "Add the determinant and the inverse.",
        "What are the numerical problems of these methods, and what do libraries do about them?",
        "Rewrite the multiplication so that it is faster, and explain what makes it so.",
    ),
)


class Turn(NamedTuple):
    """A question and its answer: seconds until its first and its last token, and the tokens that no cache held."""

    first_token_s: float
    seconds: float
    new_prompt_tokens: int


class Run(NamedTuple):
    """A whole session of some clients: the seconds of the slowest one, and of each turn the median over clients."""

    seconds: float
    first_token_s: list[float]
    new_prompt_tokens: list[float]


async def converse(target: Target, questions: Sequence[str], fields: Json, max_tokens: int) -> list[Turn]:
    """A client's session: each question as soon as the answer to the one before is there.

    Raises:
        RuntimeError: the server fails, or gives fewer tokens than asked.
    """
    messages: list[Json] = []
    turns = []
    body = {"model": NAME, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = await post(target.port, CHAT, body | {"messages": messages} | fields | target.fields)
        check([reply], max_tokens)
        turns.append(turn_of(reply))
        messages.append({"role": "assistant", "content": reply.text})
    return turns


def turn_of(reply: Reply) -> Turn:
    """The figures of a turn from its stream, whose first event may have no text yet."""
    usage = reply.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Turn(reply.first_text_s, reply.times[-1], usage["prompt_tokens"] - cached)


def run_of(clients: Sequence[Sequence[Turn]]) -> Run:
    """The figures of a session of several clients; what a client does between its turns does not count."""
    turns = list(zip(*clients, strict=True))
    return Run(
        max(sum(turn.seconds for turn in client) for client in clients),
        [exact_median(turn.first_token_s for turn in same) for same in turns],
        [exact_median(turn.new_prompt_tokens for turn in same) for same in turns],
    )


def numbered(conversation: Sequence[str], number: int) -> list[str]:
    """The questions of a conversation that no cache holds, as a number is said at its beginning."""
    first, *others = conversation
    return [f"My ticket has the number {number}. {first}", *others]


def sessions(target: Target, clients: int, fields: Json, max_tokens: int, numbers: Iterator[int]) -> Callable[[], Run]:
    """A function that runs a session of so many clients: at its first call the first conversations, and so on."""
    rounds = count()

    async def clients_together(first: int) -> list[list[Turn]]:
        chosen = [CONVERSATIONS[(first + client) % len(CONVERSATIONS)] for client in range(clients)]
        questions = [numbered(conversation, next(numbers)) for conversation in chosen]
        return list(await asyncio.gather(*(converse(target, own, fields, max_tokens) for own in questions)))

    return lambda: run_of(asyncio.run(clients_together(next(rounds) * clients)))


def spread(values: Sequence[float]) -> list[float]:
    """The median over rounds, and the least and the most."""
    return [median([value]) for value in (exact_median(values), min(values), max(values))]


def summary(runs: Mapping[str, Sequence[Run]], tokens: int) -> Json:
    """The figures of a cell from the runs of each target, round by round; `tokens` are those of a run.

    Ratios are times as fast, first tokens apart: these are times as long.
    """

    def over(other: str) -> Json:
        return {
            name: spread([b.seconds / a.seconds for a, b in zip(own, runs[other], strict=True)])
            for name, own in runs.items()
            if name != other
        }

    def by_turn(values: Sequence[Sequence[float]]) -> list[float]:
        return [median(turn) for turn in zip(*values, strict=True)]

    def later(run: Run) -> float:
        return exact_median(run.first_token_s[1:])

    result = {
        "seconds": {name: median([run.seconds for run in own]) for name, own in runs.items()},
        "tokens_per_second": {name: median([tokens / run.seconds for run in own]) for name, own in runs.items()},
        "first_token_s": {name: by_turn([run.first_token_s for run in own]) for name, own in runs.items()},
        "later_first_token_s": {name: median([later(run) for run in own]) for name, own in runs.items()},
        "new_prompt_tokens": {name: by_turn([run.new_prompt_tokens for run in own]) for name, own in runs.items()},
        "over_full": over(FULL),
        "later_first_token_over_full": {
            name: spread([later(a) / later(b) for a, b in zip(own, runs[FULL], strict=True)])
            for name, own in runs.items()
            if name != FULL
        },
        "seconds_by_round": {name: [median([run.seconds]) for run in own] for name, own in runs.items()},
    }
    return result | ({"over_llama_server": over(LLAMA_SERVER)} if LLAMA_SERVER in runs else {})


def checks(model: str, cells: Mapping[str, Json]) -> dict[str, bool]:
    """What must hold of the cells that were measured, and whether it does."""
    passed = {}
    for name, cell in cells.items():
        for target, least in LEAST_RATIOS.get(model, {}).get(name, {}).items():
            if target in cell.get("over_llama_server", {}):
                passed[f"{name}: {target} at least {least}x llama-server"] = (
                    cell["over_llama_server"][target][0] >= least
                )
        for target, (wait, *_) in cell["later_first_token_over_full"].items():
            if target != LLAMA_SERVER:
                passed[f"{name}: {target} waits at most {MOST_WAIT}x as long as full depth"] = wait <= MOST_WAIT
    return passed


def commands(options: argparse.Namespace, path: Path, clients: int, program: str | None) -> dict[str, list[str]]:
    """How the servers are started, without a port: with their default number of slots for one client."""
    context = CONTEXT * clients
    taper = [sys.executable, "-m", "taper", "serve", "--model", options.model, "--name", NAME]
    taper += ["--threads", str(options.threads), "--context", str(CONTEXT)]
    servers = {"taper": taper + (["--max-batch-size", str(clients)] if clients > 1 else [])}
    if program:
        llama = [program, "-m", str(path), "-t", str(options.threads), "-c", str(context), "--no-webui", "-ngl", "0"]
        servers[LLAMA_SERVER] = llama + (["-np", str(clients)] if clients > 1 else [])
    return servers


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells that were asked for and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clients", type=int, action="append", metavar="N", help="clients at once; repeatable. Default: 1 and 8"
    )
    parser.add_argument("--only", choices=SAMPLING, help="one kind of sampling; both by default")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder of llama-server; that on PATH by default")
    parser.add_argument("--out", type=Path, required=True, help="the file of results; it grows")
    options = parser.parse_args(arguments)
    path = find_model(options.model)
    loaded = load_model(path)
    config = loaded.config
    # No end of an output: Taper's `ignore_eos` goes on after one, which the next turn's text cannot show.
    endless = {"logit_bias": {str(token_id): -100 for token_id in loaded.tokenizer.eos_token_ids}}
    program = shutil.which("llama-server", path=options.llama_bin and str(options.llama_bin))
    if options.llama_bin and not program:
        parser.error(f"no program llama-server in {options.llama_bin}")
    model = Path(options.model).stem if options.model.endswith(".gguf") else options.model
    result: Json = json.loads(options.out.read_text()) if options.out.exists() else {"model": model, "cells": {}}
    if result["model"] != model:
        parser.error(f"{options.out} has results of another model")
    numbers = count(FIRST_NUMBER)
    fields: dict[str, Json] = {FULL: {"mode": "full"}}
    shipped = fitting_policies(config.num_hidden_layers, config.identity)
    fields |= {name: {"policy": name} for name in shipped if not name.endswith(PLAIN)}
    for clients in options.clients or (1, 8):
        with ExitStack() as stack:
            ports = {}
            for server, command in commands(options, path, clients, program).items():
                ports[server] = free_port()
                host = ["--host", "127.0.0.1", "--port", str(ports[server])]
                stack.enter_context(serving([*command, *host], ports[server]))
            targets = {name: Target(ports["taper"], {"taper": own} | endless) for name, own in fields.items()}
            if program:
                targets[LLAMA_SERVER] = Target(ports[LLAMA_SERVER], endless)
            for sampling in [options.only] if options.only else SAMPLING:
                print(f"{sampling} {clients} ...", file=sys.stderr)
                runs = alternate(
                    {
                        name: sessions(target, clients, SAMPLING[sampling], options.tokens, numbers)
                        for name, target in targets.items()
                    },
                    options.rounds,
                )
                about = conditions(path) | {"threads": options.threads, "rounds": options.rounds, "batch": clients}
                about |= {"answer_tokens": options.tokens, "turns": len(CONVERSATIONS[0]), "context": CONTEXT}
                about |= {"client": "one Python process on the same cores"}
                about |= {"llama_server": llama_version(program)} if program else {}
                tokens = clients * len(CONVERSATIONS[0]) * options.tokens
                result["cells"][f"{sampling} {clients}"] = {"conditions": about} | summary(runs, tokens)
                result["passed"] = checks(model, result["cells"])
                write(options.out, result)
    print(json.dumps(result, indent=1))
    sys.exit(not all(result["passed"].values()))


if __name__ == "__main__":
    main()
