"""What the benchmarks of methods and of the paper's claims share: options, the file of results, figures of replay."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison import FULL, Study, TaskStudy

from taper import LLM, DepthPolicy
from taper.errors import Names, RequestError, TaperError, shown
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.statistics import Estimate, by_completion, ratio_estimate
from taper.lab.calibration.store import current_conditions
from taper.lab.evals import load_tasks
from taper.models.download import DEFAULT_MODEL, content_hash

RESULTS = Path(__file__).parent / "results"
BBH_TASKS = (
    "boolean_expressions",
    "date_understanding",
    "hyperbaton",
    "logical_deduction_three_objects",
    "reasoning_about_colored_objects",
    "sports_understanding",
    "word_sorting",
)
DEFAULTS = {"context": 1024, "threads": 2, "batch_size": 16}  # what a command to repeat need not name
TASKS = ("gsm8k", *(f"bbh_cot_zeroshot_{name}" for name in BBH_TASKS))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both benchmarks have."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--policy", help="has the measured order, and adapters; default the model's shipped policy")
    parser.add_argument("--data-dir", type=Path, required=True, help="the data of GSM8K and BBH")
    parser.add_argument("--folder", type=Path, required=True, help="keeps outputs and replays, to continue from")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas between; default %(default)s")
    parser.add_argument("--limit", type=int, default=16, help="problems of each task; default %(default)s")
    parser.add_argument("--replayed", type=int, default=8, help="outputs replayed of each task; default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an output; default %(default)s")
    parser.add_argument("--depth", type=float, help="mean depth of every method; default 0.9 of the layers")
    parser.add_argument("--context", type=int, help="prompt and output together; default %(default)s")
    parser.add_argument("--threads", type=int, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, help="outputs at a time; default %(default)s")
    parser.add_argument("--out", type=Path, help="the file of results, which grows; default one in research/results")
    parser.set_defaults(**DEFAULTS)


def open_study(options: argparse.Namespace) -> Study:
    """The model of the options, ready to answer."""
    llm = LLM(options.model, context=options.context, threads=options.threads, max_batch_size=options.batch_size)
    policy = llm.resolve_policy(options.policy, "taper")
    limits = {"limit": options.limit, "max_tokens": options.max_tokens, "num_replayed": options.replayed}
    return Study(llm, policy.skip_order, options.folder, **limits, log=say, adapters=policy.adapters)


def open_task(study: Study, name: str, options: argparse.Namespace) -> TaskStudy:
    """A task, asked in a chat without examples, unless it is a task of examples."""
    is_fewshot = "fewshot" in name
    selection = load_tasks([name], fewshot=None if is_fewshot else 0, data_dir=options.data_dir)
    return TaskStudy(study, selection, chat=not is_fewshot)


def chosen(policies: Mapping[str, DepthPolicy], words: Sequence[str]) -> list[str]:
    """The names of full depth and of the methods whose names contain one of some words; all names without any word.

    Raises:
        RequestError: no name contains a word.
    """
    for word in words:
        if not any(word.lower() in name.lower() for name in policies):
            raise RequestError(f"there is no method {shown(word)}", f"there are {'; '.join(policies)}")
    return [n for n in policies if n == FULL or not words or any(word.lower() in n.lower() for word in words)]


def mean_depth_of(options: argparse.Namespace, num_hidden_layers: int) -> float:
    """The mean depth of every method."""
    return float(options.depth if options.depth is not None else round(0.9 * num_hidden_layers))


def open_results(options: argparse.Namespace, kind: str, llm: LLM) -> tuple[Path, dict[str, Any]]:
    """The file of a model's results, and what it holds so far."""
    name = Path(llm.model).name.removesuffix(".gguf")
    path = options.out or RESULTS / f"{kind}-{name}.json"
    model = {"name": name, "sha256": content_hash(llm.path), "num_hidden_layers": llm.config.num_hidden_layers}
    result = json.loads(path.read_text()) if path.exists() else {"model": model}
    if result.get("model") != model:
        raise RequestError(f"{path} has results of another model", "give another file with --out")
    return path, result


def conditions(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on, for readers; the folders of data and outputs are left out."""
    names = ("policy", "limit", "replayed", "max_tokens", "batch_size", "context")
    return made_with(llm) | {name: getattr(options, name) for name in names}


def made_with(llm: LLM) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {**vars(current_conditions(llm)), "commit": git.stdout.strip()}


def compared(index: int, reference: Reference, p: np.ndarray, q: np.ndarray, depths: Sequence[int] = ()) -> Scores:
    """What q loses against p, both log-probabilities [steps, V] of one output; `depths` are of its steps, if known."""
    steps, own = np.arange(len(p)), np.array(reference.completion_ids)[:, None]
    nll_p, nll_q = (-np.take_along_axis(x, own, -1)[:, 0].astype(float) for x in (p, q))
    kl, agreement = (np.exp(p) * (p - q)).sum(-1).astype(float), (p.argmax(-1) == q.argmax(-1)).astype(float)
    depth = np.array(depths or [0] * len(p))
    return Scores(np.full(len(p), index), steps, depth, kl, agreement, nll_q, nll_p)


def losses(scores: Scores) -> dict[str, Estimate]:
    """Mean KL and agreement over steps."""
    ones = by_completion(scores, np.ones(len(scores.step)))
    values = {"kl": scores.kl, "agreement": scores.agreement}
    return {name: ratio_estimate(by_completion(scores, value), ones) for name, value in values.items()}


def listed(names: str) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def say(line: str) -> None:
    """Tell what is being done."""
    print(line, file=sys.stderr, flush=True)


def run(main: Callable[[Iterable[str] | None], None]) -> None:
    """Run a benchmark; a mistake that Taper names is one line and exit code 2."""
    Names.are_options = True
    try:
        main(None)
    except TaperError as error:
        say(str(error))
        sys.exit(2)
