"""What the benchmarks of methods and of the paper's claims share: a model, and full depth's answers to tasks.

Records of answers and replays are kept in a folder, so that a benchmark that was interrupted continues where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from taper import LLM, DepthPolicy
from taper.calibration.conditions import current_conditions
from taper.calibration.measure import Measurements
from taper.calibration.references import builtin_prompts, completions, encode_prompts
from taper.calibration.statistics import Estimate, by_answer, ratio_estimate
from taper.calibration.store import Store
from taper.errors import RequestError, TaperError
from taper.evals import Evaluation, Selection, evaluate, load_tasks
from taper.evals.harness import TaperLM
from taper.evals.methods import FULL
from taper.evals.tasks import Problem
from taper.models import DEFAULT_MODEL, content_hash
from taper.replay import Reference, Scores

RESULTS = Path(__file__).parent / "results"
TASKS = (
    "gsm8k",
    "bbh_cot_zeroshot_boolean_expressions",
)
INFLUENCE_PROMPTS, INFLUENCE_TOKENS = 24, 64  # answers to built-in prompts that block influence comes from


@dataclass(frozen=True)
class TaskAnswers:
    """Full depth on the problems of one task."""

    selection: Selection  # the task alone
    evaluation: Evaluation
    problems: list[Problem]
    prompts: list[tuple[int, ...]]  # token ids, one for each problem
    references: list[Reference]  # prompt and answer, of the answers that have at least two tokens
    lengths: list[int]  # tokens of all answers, as they were written
    same_length: int  # answers whose text has as many tokens as were written

    @property
    def name(self) -> str:
        """The task's name."""
        return self.selection.tasks[0].name


class Study:
    """A model and the answers and replays that were measured of it so far.

    Args:
        llm: the model.
        policy: the policy whose skip order is the measured one.
        data_dir: the data of GSM8K and BBH.
        folder: keeps records and replays.
        limit: problems of each task, the first ones.
        max_tokens: most tokens of an output.
    """

    def __init__(
        self, llm: LLM, policy: DepthPolicy, data_dir: Path, folder: Path, limit: int, max_tokens: int
    ) -> None:
        self.llm, self.order, self.layers = llm, policy.skip_order, llm.config.num_hidden_layers
        self.limit, self._data_dir, self._folder, self._max_tokens = limit, data_dir, folder, max_tokens
        conditions = current_conditions(llm)
        common = {name: getattr(conditions, name) for name in ("backend", "dtype", "taper", "kernels")}
        self._store = Store(folder / "replays.sqlite", {"model": content_hash(llm.path), **common})

    def full_depth(self, name: str) -> TaskAnswers:
        """Full depth's answers to a task, asked in a chat without examples unless the task is one of examples."""
        selection = load_tasks([name], fewshot=None if "fewshot" in name else 0, data_dir=self._data_dir)
        if len(selection.tasks) != 1:
            raise RequestError(f"{name} stands for {len(selection.tasks)} tasks", "name each task by itself")
        evaluation = self._evaluate(selection, ["full"], f"{name}.full")
        full, lm = DepthPolicy.full(self.layers), TaperLM(self.llm, mode="full")
        render = lm.apply_chat_template if _is_chat(selection) else None
        problems, prompts, references = selection.tasks[0].problems(self.limit, render), [], []
        same_length = 0
        for problem, record in zip(problems, evaluation.records, strict=True):
            context, options = problem.requests[0].args[:2]
            request = lm.request(context, {**options, "max_gen_toks": self._max_tokens}, full, 0)
            prompts.append(tuple(request.prompt_ids))
            # Records hold texts: the tokens are those that the text has, without the stop token.
            answer_ids = self.llm.tokenizer.encode(record.answers[0].text, add_special_tokens=False)
            same_length += len(answer_ids) == record.answers[0].tokens
            if len(answer_ids) > 1:
                references.append(Reference(prompts[-1], tuple(answer_ids)))
        lengths = [answer.tokens for record in evaluation.records for answer in record.answers]
        return TaskAnswers(selection, evaluation, problems, prompts, references, lengths, same_length)

    def with_policies(self, answers: TaskAnswers, policies: Mapping[str, DepthPolicy], file: str) -> Evaluation:
        """Full depth and policies by name on the same problems; `file` names the policies' records."""
        named = [replace(policy, name=name) for name, policy in policies.items() if name != FULL]
        others = self._evaluate(answers.selection, named, f"{answers.name}.{file}")
        full = answers.evaluation
        return replace(full, policies=full.policies | others.policies, records=full.records + others.records)

    def scores(self, references: Sequence[Reference], policies: Mapping[str, DepthPolicy]) -> dict[str, Scores]:
        """Each policy replayed on known answers, steps from 1 on."""
        with closing(Measurements(self.llm.engine, references, self._store)) as measurements:
            replayed = {name: measurements.scores(policy, _nothing) for name, policy in policies.items()}
        return {name: scores.where(scores.step > 0) for name, scores in replayed.items()}

    def skipped_alone(self, references: Sequence[Reference]) -> np.ndarray:
        """The sum of KL over each answer when one layer is skipped at every step: float64 [answers, L], nats."""
        with closing(Measurements(self.llm.engine, references, self._store)) as measurements:
            answers = [range(index, index + 1) for index in range(len(references))]
            sums = [measurements.kl_sums(frozenset(), range(self.layers), one, _nothing) for one in answers]
        return np.stack(sums)

    def influence(self) -> list[float]:
        """Block influence of each layer on answers to built-in prompts, which are no problems of any task: [L]."""
        prompts = encode_prompts(self.llm, builtin_prompts(), 0, INFLUENCE_PROMPTS)
        full = DepthPolicy.full(self.layers)
        references = completions(self.llm, prompts, full, INFLUENCE_TOKENS, self._store, _nothing)
        with closing(Measurements(self.llm.engine, references, self._store)) as measurements:
            return measurements.block_influence()

    def _evaluate(self, selection: Selection, policies: Sequence[Any], file: str) -> Evaluation:
        done = 0

        def progress(record: Any, total: int, was_there: bool) -> None:
            nonlocal done
            done += 1
            if not was_there and (done == total or done % 16 == 0):
                say(f"{file}: {done} of {total}")

        return evaluate(
            self.llm,
            selection,
            policies,
            limit=self.limit,
            chat=_is_chat(selection),
            max_tokens=self._max_tokens,
            out=self._folder / f"{file}.jsonl",
            progress=progress,
        )


def _is_chat(selection: Selection) -> bool:
    return selection.tasks[0].num_fewshot == 0


def _nothing() -> None:
    pass


def losses(scores: Scores) -> dict[str, Estimate]:
    """Mean KL and agreement over steps."""
    ones = by_answer(scores, np.ones(len(scores.step)))
    values = {"kl": scores.kl, "agreement": scores.agreement}
    return {name: ratio_estimate(by_answer(scores, value), ones) for name, value in values.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both benchmarks have."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or file; default %(default)s")
    parser.add_argument("--policy", help="whose skip order is the measured one; default the model's shipped policy")
    parser.add_argument("--data-dir", type=Path, required=True, help="the data of GSM8K and BBH")
    parser.add_argument("--folder", type=Path, required=True, help="keeps records and replays, to continue from")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas between; default %(default)s")
    parser.add_argument("--limit", type=int, default=16, help="problems of each task; default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an output; default %(default)s")
    parser.add_argument("--depth", type=float, help="mean depth of every method; default 0.9 of the layers")
    parser.add_argument("--context", type=int, default=2048, help="prompt and output together; default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="outputs at a time; default %(default)s")
    parser.add_argument("--out", type=Path, help="the file of results, which grows; default one in benchmarks/results")


def open_study(options: argparse.Namespace) -> Study:
    """The model of the options, ready to answer."""
    llm = LLM(options.model, context=options.context, threads=options.threads, max_batch_size=options.batch_size)
    policy = llm.resolve_policy(options.policy, "taper")
    return Study(llm, policy, options.data_dir, options.folder, options.limit, options.max_tokens)


def wanted_depth(options: argparse.Namespace, layers: int) -> float:
    """The mean depth of every method."""
    return float(options.depth if options.depth is not None else round(0.9 * layers))


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
    """What figures depend on, for readers; paths are left out."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    chosen = {key: getattr(options, key) for key in ("limit", "max_tokens", "batch_size", "context")}
    return {**vars(current_conditions(llm)), "commit": git.stdout.strip(), **chosen}


def listed(names: str) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def say(line: str) -> None:
    """Tell what is being done."""
    print(line, file=sys.stderr, flush=True)


def run(main: Callable[[Iterable[str] | None], None]) -> None:
    """Run a benchmark; a mistake that Taper names is one line and exit code 2."""
    try:
        main(None)
    except TaperError as error:
        say(str(error))
        sys.exit(2)
