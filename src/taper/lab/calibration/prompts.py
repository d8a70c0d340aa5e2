"""Prompts, and the model's own outputs at full depth: what calibration measures on."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...engine import Request
from ...errors import RequestError, shown
from ...llm import LLM, Prompt
from ...models.files import decode_text, text_lines
from ...policy import DepthPolicy
from ...sampling import SamplingParams
from .progress import Stage
from .replay import Reference
from .statistics import MIN_OUTPUTS
from .store import Store, numbers

BATCH = 16  # outputs generated at a time, and stored together
MIN_PROMPTS = 2 * MIN_OUTPUTS  # half for the search, half held out
FOLLOW_UP = "Explain the most important part of that in more detail."
_PLACE = "OUTPUT"  # of an output, in a conversation that is rendered to see what follows it
MAX_LINE = 100_000  # characters
MAX_FILE_BYTES = 1 << 28
_BLANK = " \t\r"
T = TypeVar("T")  # a prompt, or its output
_TABLES = {".csv": ",", ".tsv": "\t"}  # what separates their cells


def builtin_prompts() -> list[Prompt]:
    """The prompts that come with Taper: chat, explanation, summaries, code, arithmetic, lists."""
    text = resources.files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text_lines(text)]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSON with "prompt" or "messages", one a line or in a list, or text with a prompt a line.

    Of a table, a .csv or .tsv file, they are the column `prompt`. Empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, is not UTF-8, or a line is not a prompt.
    """
    try:
        with path.open("rb") as file:  # or a pipe
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read prompts {path}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise RequestError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", "give a sample of it")
    text = decode_text(raw, path)
    if is_table(path):
        prompts: list[Prompt] = [row["prompt"] for row in table_rows(text, path, ("prompt",)) if row["prompt"]]
        if not prompts:
            raise RequestError(f"{path} holds no prompt", "its column prompt is empty")
        return prompts
    if text.lstrip().startswith("[") and (listed := _json_list(text)) is not None:
        return [
            item if isinstance(item, str) and item.strip() else _json_prompt(item, f"{path}, prompt {number}")
            for number, item in enumerate(listed, 1)
        ]
    numbered = [(number, line.strip(_BLANK)) for number, line in enumerate(text_lines(text), 1) if line.strip(_BLANK)]
    if not numbered:
        raise RequestError(f"{path} holds no prompt", "one a line, as text or as JSON with prompt or messages")
    is_json = numbered[0][1].startswith("{")
    prompts = []
    for number, line in numbered:
        where = f"{path}, line {number}"
        if len(line) > MAX_LINE:
            raise RequestError(f"{where} has {len(line)} characters; at most {MAX_LINE} are read")
        prompts.append(_json_prompt(_parsed(line, where), where) if is_json else line)
    return prompts


def is_table(path: Path) -> bool:
    """Whether a file is a table by its name: .csv or .tsv."""
    return path.suffix.lower() in _TABLES


def table_rows(text: str, path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The cells of some columns, by name, of a table whose first line has the names of its columns.

    Raises:
        RequestError: it has no such column, or is no table.
    """
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=_TABLES[path.suffix.lower()])
    try:
        named = {(name or "").strip().lower(): name for name in table.fieldnames or ()}
        for column in columns:
            if column not in named:
                found = ", ".join(shown(name) for name in table.fieldnames or ()) or "none"
                reason = f"{path} has no column {column}; its columns are {found}"
                raise RequestError(reason, f'name one "{column}", or give JSON lines')
        return [{column: (row[named[column]] or "").strip() for column in columns} for row in table]
    except csv.Error as error:
        raise RequestError(f"{path} is not a table: {error}", "write quotes around cells with line breaks") from None


def _json_list(text: str) -> list[Any] | None:
    """The items of a JSON list; None if it is none, as a plain prompt may begin with a bracket too."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, list) and data else None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}", "the first line is, so all must be") from None


def _json_prompt(data: Any, where: str) -> Prompt:
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise RequestError(f'{where} needs either "prompt" or "messages"')
    prompt: Any = data.get("prompt", data.get("messages"))
    if not isinstance(prompt, str if "prompt" in data else list):
        raise RequestError(f"{where}: prompt must be text, and messages a list of messages")
    return prompt


def encode_prompts(llm: LLM, prompts: Sequence[Prompt], seed: int, max_prompts: int) -> dict[tuple[int, ...], str]:
    """Different prompts by their token ids, shuffled by the seed, `max_prompts` at most: of each what was said last.

    Raises:
        RequestError: a prompt cannot be completed, or there are too few to split.
    """
    encoded: dict[tuple[int, ...], str] = {}
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = tuple(llm.encode(prompt))
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error.message}", error.hint) from None
        encoded[ids] = _last_text(llm, prompt)
    if len(encoded) < MIN_PROMPTS:
        raise RequestError(
            f"{len(encoded)} different prompts are too few",
            f"give at least {MIN_PROMPTS}, so that some can be held out",
        )
    different = list(encoded.items())
    order = np.random.default_rng(seed).permutation(len(different))[:max_prompts]
    return dict(different[i] for i in order)


def _last_text(llm: LLM, prompt: Prompt) -> str:
    last = prompt if isinstance(prompt, str | Mapping) else prompt[-1]
    if isinstance(last, int):
        return llm.tokenizer.decode([token_id for token_id in prompt if isinstance(token_id, int)])
    return last if isinstance(last, str) else str(last["content"])


def completions(
    llm: LLM,
    prompts: Sequence[tuple[int, ...]],
    policy: DepthPolicy,
    max_tokens: int,
    store: Store,
    stage: Stage,
    sampling: SamplingParams = SamplingParams(),
) -> list[Reference]:
    """The model's outputs under a policy, stop id included; each batch of them is stored by itself.

    `sampling` has no seed: each output has its place in the list as its own.
    """
    references, greedy = [], vars(SamplingParams())
    chosen = {name: value for name, value in vars(sampling).items() if value != greedy[name]}
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        key: dict[str, Any] = {"completions of": batch, "max_tokens": max_tokens, "policy": numbers(policy)}
        if chosen:
            key |= {"sampling": chosen} | ({"first": first} if first else {})
        params = [replace(sampling, max_tokens=max_tokens, seed=first + i) for i in range(len(batch))]
        eos_token_ids = llm.tokenizer.eos_token_ids
        given = zip(batch, params, strict=True)
        requests = [Request(prompt, one, policy, eos_token_ids, reuse="exact") for prompt, one in given]
        outputs = store.remember(key, partial(llm.engine.complete, requests))
        references += [Reference(prompt, tuple(ids)) for prompt, ids in zip(batch, outputs, strict=True)]
        stage.done()
    return references


def next_prompts(llm: LLM, references: Sequence[Reference], max_tokens: int) -> list[tuple[Reference, tuple[int, ...]]]:
    """Conversations that go on: each prompt with its output, stop id left out, and a prompt that begins with both.

    Those that leave no room for an output of `max_tokens` tokens in the context are left out.
    """
    follow_up, room = _follow_up(llm), llm.engine.backend.context_length - max_tokens
    going_on = []
    for reference in references:
        ids = reference.completion_ids
        ids = ids[:-1] if ids[-1] in llm.tokenizer.eos_token_ids else ids
        prompt = (*reference.prompt_ids, *ids, *follow_up)
        if len(ids) > 1 and len(prompt) < room:
            going_on.append((Reference(reference.prompt_ids, ids), prompt))
    return going_on


def _follow_up(llm: LLM) -> list[int]:
    """What a chat template writes between an output and the next one; plain text without a template."""
    text = f"\n\n{FOLLOW_UP}\n\n"
    if llm.tokenizer.chat_template:
        turns = [("user", FOLLOW_UP), ("assistant", _PLACE), ("user", FOLLOW_UP)]
        with suppress(RequestError):  # a template for one turn
            text = llm.tokenizer.render([{"role": role, "content": content} for role, content in turns])
            text = text.rpartition(_PLACE)[2]
    return llm.tokenizer.encode(text, add_special_tokens=False)


def split(prompts: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The half that is searched on, and the half that is held out; the prompts were shuffled before."""
    half = len(prompts) // 2
    return prompts[:half], prompts[half:]
