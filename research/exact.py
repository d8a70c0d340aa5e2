"""Exact mode beside full depth, and drafts beside a policy alone: four sets of 16 prompts, one output at a time.

    python research/exact.py --model MODEL --out research/results/exact-MODEL.json

Every output is written by all modes in turn, greedily, so whatever slows the machine slows all alike; the ratio of a
mode is that of the seconds for the tokens after the first. The first three prompts of each set, which warm up, are
written twice and count once. It also says how many texts equal those without drafts. With --bits, a second pass
compares with --exact-bits, drafts and full depth alike. With --texts, 200 texts, 100 of JSON and 100 calls of a tool
are compared in f32, half of them sampled, with every draft verified (five minutes for the default model). With
--llama-bin, llama-server writes the same outputs with and without its drafts. Leave the machine alone while it runs
(a quarter of an hour for 1 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode import conditions, write
from server_process import Server, free_port, post, serving

from taper import LLM, Output, SamplingParams
from taper.engine import Request
from taper.engine.drafting import Drafting
from taper.lab.healing.prompts import builtin_prompts
from taper.models.download import DEFAULT_MODEL

TOKENS = 160
CODE = '''
def total_price(items, tax_rate):
    """The price of all items with tax."""
    subtotal = 0
    for item in items:
        if item.quantity < 0:
            raise ValueError("a quantity is negative")
        subtotal += item.price * item.quantity
    return round(subtotal * (1 + tax_rate), 2)


def print_receipt(items, tax_rate):
    """Print a line for each item, and the total."""
    for item in items:
        print(f"{item.name:<20} {item.quantity:>3} x {item.price:>8.2f}")
    print(f"total: {total_price(items, tax_rate):.2f}")
'''
TEXT = """The library on Mill Street opened its new reading room on Monday. It has forty desks, two quiet rooms for
groups, and a long shelf of newspapers from nine countries. The old reading room will become a workshop where people can
repair bicycles and radios. The city paid half of the cost, and the rest came from a fund that the friends of the
library had collected over six years. Opening hours stay the same, from ten in the morning to eight in the evening."""
EDITS = (
    "rename `tax_rate` to `rate`",
    "rename `items` to `goods`",
    "rename `total_price` to `price_with_tax`",
    "use a name `amount` instead of `quantity`",
    "raise a TypeError instead of a ValueError",
    "round to 3 digits instead of 2",
    "print names in 30 columns instead of 20",
    "add type hints to both functions",
    "print `sum` instead of `total`",
    "translate both docstrings into German",
    "delete both docstrings",
    "add a default of 0.2 to `tax_rate` in both functions",
    "raise the error also if the quantity is 0",
    "use single quotes instead of double quotes",
    "add a comment above the loop of the first function",
    "swap the two functions",
)
ABOUT_TEXT = (
    "Repeat the text word for word.",
    "Quote the first two sentences of the text.",
    "Quote the last two sentences of the text.",
    "Summarise the text in two sentences.",
    "Write the text again, with Oak Street instead of Mill Street.",
    "Which sentence says who paid? Quote it.",
    "Correct spelling mistakes in the text, if there are any, and write it out in full.",
    "List the facts of the text, one a line, in its own words.",
    "Write the text again in the present tense.",
    "Write the text again with fifty desks instead of forty.",
    "Put every sentence of the text on a line of its own.",
    "Quote everything that the text says about the old reading room.",
    "Write the text again without its third sentence.",
    "Write the text again, and put the names of days and streets in bold.",
    "Number the sentences of the text, and write them out.",
    "Summarise the text in one sentence, and then quote the sentence that matters most.",
)
CHATS = (
    "Why is the sky blue?",
    "How can I fall asleep more easily?",
    "Write a short poem about autumn.",
    "What should I see in Rome in two days?",
    "Explain inflation to a child.",
    "Give me three ideas for a birthday present.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email that declines an invitation.",
    "How do I start running?",
    "Tell me a story about a lighthouse keeper.",
    "What are good questions for a job interview?",
    "How does a bicycle stay upright?",
    "Why do cats purr?",
    "Suggest a simple dinner with rice.",
    "What makes a good friend?",
    "Describe a walk in the mountains.",
)
SETS: dict[str, Sequence[str]] = {
    "edit code": [f"Here is a Python file:\n```python{CODE}```\nWrite the whole file again, but {e}." for e in EDITS],
    "quote and summarise": [f"{TEXT}\n\n{request}" for request in ABOUT_TEXT],
    "chat": CHATS,
    "arithmetic": [
        f"A box holds {3 + n} rows of {7 + 2 * n} apples. {n + 2} boxes arrive, and {11 + n} apples are bad. "
        "How many good apples are there? Think step by step."
        for n in range(16)
    ],
}
# What is compared with what: the arguments of `LLM.generate`.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact over full": ({"mode": "exact"}, {"mode": "full"}),
    "taper with n-grams over taper": ({"mode": "taper", "draft": "ngram"}, {"mode": "taper"}),
}
BITS = "exact over full, both with --exact-bits"
SPECULATION = ("--spec-type", "ngram-mod")
LLAMA_SERVER = "llama-server with ngram-mod over without"


def seconds(output: Output) -> float:
    """The time of the tokens after the first."""
    return (output.completion_tokens - 1) / output.tokens_per_second if output.tokens_per_second else 0.0


def taper_cell(
    llm: LLM, prompts: Sequence[str], tokens: int, compared: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]
) -> dict[str, Any]:
    """Each pair of modes on a set of prompts."""
    modes = {str(how): how for pair in compared.values() for how in pair}
    outputs: dict[str, list[Output]] = {name: [] for name in modes}
    for number, prompt in enumerate([*prompts[:3], *prompts]):
        for name, how in modes.items():
            output = llm.generate(prompt, temperature=0, max_tokens=tokens, **how)
            if number >= 3:
                outputs[name].append(output)
    cell = {}
    for title, (drafts, plain) in compared.items():
        with_drafts, without = outputs[str(drafts)], outputs[str(plain)]
        pairs = list(zip(with_drafts, without, strict=True))
        # Texts that differ may differ in length: seconds a token are compared.
        ratios = [
            (seconds(b) / max(1, b.completion_tokens - 1)) / (seconds(a) / max(1, a.completion_tokens - 1))
            for a, b in pairs
            if seconds(a) and seconds(b)
        ]
        cell[title] = spread(ratios) | {
            "equal_texts": sum(a.token_ids == b.token_ids for a, b in pairs),
            "drafted": sum(a.drafted_tokens for a in with_drafts),
            "accepted": sum(a.accepted_tokens for a in with_drafts),
            "tokens": sum(a.completion_tokens for a in with_drafts),
        }
    return cell


def same_texts(model: str, threads: int) -> dict[str, Any]:
    """How many outputs in f32 have the same tokens with drafts and without, by kind."""
    llm = LLM(model, dtype="f32", context=1024, threads=threads, max_batch_size=8)
    prompts = [llm.encode(prompt) for prompt in builtin_prompts()[:200]]
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}},
    }
    schema |= {"required": ["title", "year"], "additionalProperties": False}
    kinds = {
        "texts": (200, None),
        "JSON by a schema": (100, llm.grammars.compile(schema)),
        "calls of a tool": (100, llm.grammars.compile_calls({"look_up": schema}, only_one=True)),
    }
    full, counts = llm.resolve_policy(mode="full"), {}
    for kind, (number, token_filter) in kinds.items():
        sampled = [{"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0.0} for i in range(number)]
        params = [SamplingParams(max_tokens=48, **one) for one in sampled]
        completions = []
        for drafting in (None, Drafting("ngram", min_match=2, always=True)):
            eos, given = llm.tokenizer.eos_token_ids, zip(prompts[:number], params, strict=True)
            requests = [Request(ids, one, full, eos, token_filter, drafting=drafting) for ids, one in given]
            completions.append(llm.engine.complete(requests))
        counts[kind] = {"outputs": number, "same": sum(a == b for a, b in zip(*completions, strict=True))}
    return counts


def llama_cell(servers: Sequence[Server], prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """llama-server with and without drafts, in turn."""
    ratios, equal = [], 0
    for number, prompt in enumerate([*prompts[:3], *prompts]):
        times, texts = [], []
        for server in servers:
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": tokens}
            reply = json.loads(asyncio.run(post(server.port, "/v1/chat/completions", body)).body)
            times.append(reply["timings"]["predicted_ms"] / reply["timings"]["predicted_n"])
            texts.append(reply["choices"][0]["message"]["content"])
        if number >= 3:
            ratios.append(times[1] / times[0])
            equal += texts[0] == texts[1]
    return spread(ratios) | {"equal_texts": equal}


def spread(ratios: Sequence[float]) -> dict[str, Any]:
    """The median of ratios and their extremes."""
    values = (statistics.median(ratios), min(ratios), max(ratios))
    return dict(zip(("median", "lowest", "highest"), (round(value, 3) for value in values), strict=True))


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure set by set; each is written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", action="store_true", help="also with --exact-bits")
    parser.add_argument("--texts", action="store_true", help="also compare texts in f32")
    parser.add_argument("--sets", default=",".join(SETS), help="names with commas between; default all")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="most of an output; default %(default)s")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(None if arguments is None else list(arguments))
    llm = LLM(options.model, context=2048, threads=options.threads)
    about = conditions(llm.path) | {
        "threads": options.threads,
        "most_tokens": options.tokens,
        "kernels": llm.engine.backend.kernels,
    }
    result: dict[str, Any] = {"conditions": about, "sets": {}}
    chosen = {name: SETS[name] for name in options.sets.split(",")}
    for name, prompts in chosen.items():
        result["sets"][name] = taper_cell(llm, prompts, options.tokens, PAIRS)
        write(options.out, result)
    if options.bits:
        alike = llm.resolve_drafting("auto", "exact", exact_bits=True)
        result["bitwise_width"] = llm.engine.bitwise_width
        for name, prompts in chosen.items():
            pair = {BITS: ({"mode": "exact", "draft": alike}, {"mode": "full"})}
            result["sets"][name] |= taper_cell(llm, prompts, options.tokens, pair)
            write(options.out, result)
    if options.texts:
        result["texts"] = same_texts(options.model, options.threads)
        write(options.out, result)
    if options.llama_bin is None:
        return
    program = shutil.which("llama-server", path=str(options.llama_bin))
    common = [program, "-m", str(llm.path), "-t", str(options.threads), "-c", "2048", "-np", "1", "--port"]
    ports = free_port(), free_port()
    llm.close()
    commands = [*common, str(ports[0]), *SPECULATION], [*common, str(ports[1])]
    with serving(commands[0], ports[0]) as drafts, serving(commands[1], ports[1]) as plain:
        for name, prompts in chosen.items():
            result["sets"][name][LLAMA_SERVER] = llama_cell((drafts, plain), prompts, options.tokens)
            write(options.out, result)


if __name__ == "__main__":
    main()
