"""The model completes each problem under each policy, and every output is scored: for an evaluation, or a calibration.

An evaluation also records them, so that it can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration.problems import Attempt
from ..calibration.store import current_conditions, numbers
from ..engine import Request
from ..errors import RequestError, flag, whole_number
from ..llm import LLM, Output
from ..models.download import content_hash
from ..policy import DepthPolicy
from .records import Completion, Record, RecordFile
from .summary import chosen_filter, solved
from .tasks import EvalTask, Problem, Selection, quiet

if TYPE_CHECKING:
    from .harness import TaperLM

OnRecord = Callable[[Record, int, bool], None]  # a record, how many there will be, and whether the file had it


@dataclass(frozen=True)
class Evaluation:
    """The records that were asked for, and the settings that they depend on."""

    settings: Mapping[str, Any]
    selection: Selection
    policies: dict[str, DepthPolicy]  # by label
    records: list[Record]


def evaluate(
    llm: LLM,
    selection: Selection,
    policies: Sequence[DepthPolicy | str | Path],
    *,
    limit: int | None = None,
    indices: Collection[int] | None = None,
    chat: bool = False,
    max_tokens: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    progress: OnRecord | None = None,
) -> Evaluation:
    """Complete and score the problems of tasks under several policies, as many at a time as the engine has slots.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: what `load_tasks` returned.
        policies: policies, names of shipped ones or files; "full" is full depth.
        limit: problems of each task, the first ones; default all.
        indices: the indices of the problems of each task, instead of a limit.
        chat: ask by the model's chat template, with examples as earlier turns.
        max_tokens: most tokens of an output; default the task's own limit, or 256 where it has none.
        seed: of tasks that sample; a problem has the same seed under every policy.
        out: a file for the records; records that it already has are not computed again.
        progress: called with each record, the number of records there will be, and whether it was in the file.

    Raises:
        RequestError: an argument out of its range, or a file of another evaluation.
        PolicyError: a policy is damaged or made for another model.
        ModelError: the model's output is not a number.
    """
    from .harness import TaperLM  # lm-evaluation-harness takes seconds to import

    limit = None if limit is None else whole_number("limit", limit, 1)
    max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1)
    seed, chat = whole_number("seed", seed, 0), flag("chat", chat)
    if chat and not llm.tokenizer.chat_template:
        raise RequestError("this model has no chat template", "leave out --chat")
    resolved = [llm.resolve_policy(mode="full") if p == "full" else llm.resolve_policy(p) for p in policies]
    by_label = {policy.label: policy for policy in resolved}
    if not by_label or any(numbers(by_label[policy.label]) != numbers(policy) for policy in resolved):
        raise RequestError("policies are missing, or two have the same name", "give each its own name")
    conditions = {"model": llm.model, "batch_size": llm.engine.backend.num_slots, **vars(current_conditions(llm))}
    settings = {
        "model": content_hash(llm.path),
        "backend": conditions["backend"],
        "dtype": llm.dtype,
        "context": llm.engine.backend.context_length,
        "tasks": {task.name: {"version": task.version, "fewshot": task.num_fewshot} for task in selection.tasks},
        "split": selection.split,
        "chat": chat,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    lm = TaperLM(llm, mode="full", seed=seed)  # each request brings its own policy
    render_chat = lm.apply_chat_template if chat else None
    problems = [(task, problem) for task in selection.tasks for problem in task.problems(limit, render_chat, indices)]
    file = RecordFile(out, settings, {label: numbers(policy) for label, policy in by_label.items()}, conditions)
    total = len(problems) * len(by_label)
    report = progress or (lambda record, total, was_there: None)
    jobs = []
    try:
        for task, problem in problems:
            stored = {label: file.find(problem, label) for label in by_label}
            for record in stored.values():
                if record is not None:
                    report(record, total, True)
            if missing := [by_label[label] for label, record in stored.items() if record is None]:
                jobs.append(_Job(task, problem, missing))
        for record in _run(lm, jobs, max_tokens):
            file.append(record)
            report(record, total, False)
    finally:
        file.close()
    keys = [(problem.task, problem.index, label) for _, problem in problems for label in by_label]
    return Evaluation(settings, selection, by_label, [file.records[key] for key in keys])


def prompt_ids(
    llm: LLM, task: EvalTask, indices: Collection[int], chat: bool = False, max_tokens: int | None = None
) -> dict[int, tuple[int, ...]]:
    """The token ids of the first prompt of some problems of a task, as `evaluate` asks them, by index."""
    from .harness import TaperLM

    lm = TaperLM(llm, mode="full")
    problems = task.problems(None, lm.apply_chat_template if chat else None, indices)
    return {p.index: tuple(_requests(lm, p, lm.policy, max_tokens)[0].prompt_ids) for p in problems}


@dataclass
class _Job:
    """A problem, the policies under which it is still to be completed, and the outputs under one of them so far."""

    task: EvalTask
    problem: Problem
    policies: list[DepthPolicy]
    truncated: bool = False  # whether the beginning of a prompt was cut off
    outputs: list[Output] = field(default_factory=list)


def _run(lm: TaperLM, jobs: Sequence[_Job], max_tokens: int | None) -> Iterator[Record]:
    """The records of some jobs, each as soon as its outputs have ended."""
    from .harness import complete

    chains = []
    with quiet():
        for job in jobs:
            truncated_before = lm.num_truncated
            chains.append([r for policy in job.policies for r in _requests(lm, job.problem, policy, max_tokens)])
            job.truncated = lm.num_truncated > truncated_before
    for number, _, output in complete(lm.llm, chains):
        job = jobs[number]
        job.outputs.append(output)
        if len(job.outputs) == len(job.problem.requests) * job.problem.repeats:  # the outputs of a policy are adjacent
            yield _record(job)
            job.outputs = []


def _requests(lm: TaperLM, problem: Problem, policy: DepthPolicy, max_tokens: int | None) -> list[Request]:
    """The engine's requests for a problem under a policy: each of the problem's own, `repeats` times."""
    options = {} if max_tokens is None else {"max_gen_toks": max_tokens}
    requests = []
    for instance in problem.requests:
        context, gen_kwargs = instance.args[:2]
        for repeat in range(problem.repeats):
            seed = lm.request_seed(instance, repeat)
            requests.append(lm.request(context, {**gen_kwargs, **options}, policy, seed))
    return requests


def _record(job: _Job) -> Record:
    """A problem's outputs under one policy, scored."""
    repeats, policy = job.problem.repeats, job.outputs[0].policy
    texts = [output.text for output in job.outputs]
    by_request = [texts[first : first + repeats] for first in range(0, len(texts), repeats)]
    metrics, extracted = job.task.score(job.problem, by_request)
    return Record(
        task=job.task.name,
        problem=job.problem.index,
        mode="full" if policy.min_depth == policy.num_hidden_layers else "taper",
        policy=policy.label,
        prompt_hash=job.problem.prompt_hash,
        truncated=job.truncated,
        metrics=metrics,
        extracted=extracted,
        answers=tuple(Completion(o.text, tuple(o.token_ids), o.mean_depth, o.finish_reason) for o in job.outputs),
    )


# For calibration to a task


class TaskProblems:
    """A task of the harness as a `ProblemSet`.

    Args:
        llm: the model.
        selection: one task, with problems that are not those it is tested on.
        chat: ask by the model's chat template.
        max_tokens: most tokens of an output; default the task's own limit.
        filter_name: the harness's filter that says what is right; default the most lenient one.
        seed: of tasks that sample.

    Raises:
        RequestError: several tasks are given, or the task has no such filter.
    """

    def __init__(
        self,
        llm: LLM,
        selection: Selection,
        *,
        chat: bool = False,
        max_tokens: int | None = None,
        filter_name: str | None = None,
        seed: int = 0,
    ) -> None:
        if len(selection.tasks) != 1:
            raise RequestError("a policy is calibrated to one task at a time", "name one task, not a group")
        self._llm, self._selection, self._task = llm, selection, selection.tasks[0]
        self._filter = chosen_filter(self._task, filter_name)
        self._asked: dict[str, Any] = {"chat": chat, "max_tokens": max_tokens, "seed": seed}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self.identity = {
            "task": self._task.name,
            "version": self._task.version,
            "fewshot": self._task.num_fewshot,
            "split": selection.split,
            "asked": self._asked,
            "figure": self._filter,
            "context": llm.engine.backend.context_length,
        }

    def __len__(self) -> int:
        return self._task.num_problems

    def prompt_ids(self, indices: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The token ids of some prompts, by index."""
        if missing := [index for index in indices if index not in self._prompts]:
            self._prompts |= prompt_ids(self._llm, self._task, missing, self._asked["chat"], self._asked["max_tokens"])
        return {index: self._prompts[index] for index in indices}

    def attempt(self, indices: Sequence[int], policy: DepthPolicy) -> list[Attempt]:
        """Let the model solve some problems under a policy.

        Raises:
            RequestError: no metric of the task says whether an output is right.
        """
        result = evaluate(self._llm, self._selection, [policy], indices=indices, **self._asked)
        by_index = {record.problem: record for record in result.records}
        attempts = []
        for record in (by_index[index] for index in indices):
            right = solved(record, self._filter)
            if right is None:
                raise RequestError(f"task {self._task.name} has no metric that is right or wrong for each problem")
            attempts.append(Attempt(right, list(record.answers[0].token_ids)))
        return attempts
