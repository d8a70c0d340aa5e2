"""What `taper eval` promises: the figures of lm-evaluation-harness's own class for transformers, and faster in batches.

    python research/harness.py --data-dir DATA equality batching

`equality`: GSM8K problems at full depth through that class (`hf`) in f32, and through ours, in f32 and with the weights
as they are in the file. `batching`: problems one by one and in batches, taking turns, so leave the machine alone
meanwhile. On the default model and two cores, each part takes about ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
from decode import write
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from task_options import made_with, open_results, run, say
from transformers import PreTrainedTokenizerFast
from unnested import load_f32

from taper import LLM
from taper.lab.bench.measure import alternate
from taper.lab.calibration.statistics import wilson
from taper.lab.calibration.summary import to_plain
from taper.lab.evals import evaluate, load_tasks
from taper.lab.evals.records import Record
from taper.lab.evals.summary import chosen_filter, solved
from taper.lab.evals.tasks import Selection
from taper.models.download import DEFAULT_MODEL

PROBLEMS, BATCH = 100, 32  # of the comparison
TIMED, TIMED_BATCH, ROUNDS = 64, 16, 3
CONTEXT = 1024
Json = dict[str, Any]


def equality(options: argparse.Namespace) -> Json:
    """Both classes on the same problems: what is solved, and how many strings are those of `hf`."""
    selection = _selection(options)
    name = chosen_filter(selection.tasks[0], None)
    their_texts, theirs = _through_hf(options, selection, name)
    rows = [{"model": "hf", "dtype": "f32", "solved": wilson(sum(theirs), len(theirs))}]
    for dtype in ("f32", "auto"):
        say(f"taper, {dtype} ...")
        records = _answers(_open(options, BATCH, dtype), selection, options.max_tokens, PROBLEMS)
        right = [bool(solved(record, name)) for record in records]
        row: Json = {"model": "taper", "dtype": dtype, "solved": wilson(sum(right), len(right))}
        ours = [record.completions[0].text for record in records]
        # Theirs show half a character at the end, ours leave it out.
        pairs = [[text.rstrip("\ufffd") for text in pair] for pair in zip(ours, their_texts, strict=True)]
        row["identical"] = sum(one == other for one, other in pairs)
        row["scored_alike"] = sum(a == b for a, b in zip(right, theirs, strict=True))
        rows.append(row)
    return {"problems": len(theirs), "batch": BATCH, "figure": f"exact_match under {name}", "rows": rows}


def batching(options: argparse.Namespace) -> Json:
    """Seconds that problems take one by one and in batches, and how many texts are the same."""
    selection = _selection(options)
    llms = {str(size): _open(options, size) for size in (1, TIMED_BATCH)}

    def timed(llm: LLM) -> tuple[float, list[Record]]:
        started = time.perf_counter()
        records = _answers(llm, selection, options.max_tokens, TIMED)
        seconds = time.perf_counter() - started
        say(f"batches of {llm.engine.backend.num_slots}: {seconds:.1f} s")
        return seconds, records

    rounds = alternate({size: partial(timed, llm) for size, llm in llms.items()}, ROUNDS)
    seconds = {size: [one[0] for one in own] for size, own in rounds.items()}
    alone, together = (own[0][1] for own in rounds.values())
    ratios = [one / other for one, other in zip(*seconds.values(), strict=True)]
    return {
        "problems": len(alone),
        "batch": TIMED_BATCH,
        "rounds": ROUNDS,
        "seconds": {size: statistics.median(own) for size, own in seconds.items()},
        "tokens": {size: sum(len(r.completions[0].token_ids) for r in own[0][1]) for size, own in rounds.items()},
        "speedup": [statistics.median(ratios), min(ratios), max(ratios)],
        "identical": sum(a.completions[0].text == b.completions[0].text for a, b in zip(alone, together, strict=True)),
    }


def _through_hf(options: argparse.Namespace, selection: Selection, filter_name: str) -> tuple[list[str], list[bool]]:
    """The harness's own class: its texts, and which of them are right.

    It is given Taper's tokenizer: transformers makes one of a GGUF file that does not split digits as the model's does.
    """
    say("hf, f32 ...")
    llm = _open(options, 1)
    own = llm.tokenizer
    fast = PreTrainedTokenizerFast(
        tokenizer_object=own.fast, chat_template=own.chat_template or None, **own.template_tokens
    )
    torch.set_num_threads(options.threads)
    hf = HFLM(load_f32(llm.path), tokenizer=fast, batch_size=BATCH, max_length=CONTEXT)
    evaluated = lm_eval.simple_evaluate(
        hf,
        tasks=[selection.tasks[0]._task],
        task_manager=TaskManager(include_defaults=False),
        limit=PROBLEMS,
        apply_chat_template=True,
        gen_kwargs={"max_gen_toks": options.max_tokens},
        bootstrap_iters=0,
    )
    samples = [one for one in evaluated["samples"][selection.tasks[0].name] if one["filter"] == filter_name]
    return [one["resps"][0][0] for one in samples], [bool(one["exact_match"] == 1) for one in samples]


def _selection(options: argparse.Namespace) -> Selection:
    """GSM8K without examples."""
    return load_tasks(["gsm8k"], fewshot=0, data_dir=options.data_dir)


def _open(options: argparse.Namespace, batch: int, dtype: str = "auto") -> LLM:
    return LLM(options.model, device="cpu", dtype=dtype, context=CONTEXT, threads=options.threads, max_batch_size=batch)


def _answers(llm: LLM, selection: Selection, max_tokens: int, limit: int) -> Sequence[Record]:
    return evaluate(llm, selection, ["full"], limit=limit, chat=True, max_tokens=max_tokens).records


def main(arguments: Iterable[str] | None) -> None:
    """Measure the parts asked for; the file of results is written after each."""
    parts = {"equality": equality, "batching": batching}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--data-dir", type=Path, required=True, help="the data of GSM8K")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an output; default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="the file of results, which grows; default one in research/results")
    options = parser.parse_args(arguments)
    llm = _open(options, 1)
    path, result = open_results(options, "harness", llm)
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch")}
    about = made_with(llm) | {"max_tokens": options.max_tokens, "versions": versions}
    for part in options.parts:
        result[part] = to_plain(parts[part](options) | {"conditions": about})
        write(path, result)


if __name__ == "__main__":
    run(main)
