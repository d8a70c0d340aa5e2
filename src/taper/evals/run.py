"""One evaluation: problems answered under each policy through one engine, scored and recorded one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calibration.store import current_conditions, numbers
from ..engine import Request
from ..errors import RequestError, flag, whole_number
from ..llm import LLM, Output
from ..models.download import content_hash
from ..policy import DepthPolicy
from .records import Answer, Record, RecordFile
from .tasks import EvalTask, Problem, Selection, quiet

ReportProgress = Callable[[Record, int, bool], None]  # a record, how many there will be, and whether it was there


@dataclass(frozen=True)
class Evaluation:
    """What came out: the records that were asked for, and what they were made under."""

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
    progress: ReportProgress | None = None,
) -> Evaluation:
    """Answer and score the problems of tasks under several policies, as many at a time as the engine has slots.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: what `load_tasks` returned.
        policies: policies, names of shipped ones or files; "full" is full depth.
        limit: problems of each task, the first ones; default all.
        indices: which problems of each task, instead.
        chat: ask by the model's chat template, with examples as earlier turns.
        max_tokens: most tokens of an output; default the task's own limit, or 256 where it has none.
        seed: of tasks that sample; a problem has the same seed under every policy.
        out: a file for the records; those that it has already are not computed again.
        progress: called with each record, the number of records there will be, and whether it was in the file.

    Raises:
        RequestError: an argument out of its range, or a file of another evaluation.
        PolicyError: a policy is damaged or made for another model.
        ModelError: the model's output is not a number.
    """
    limit = None if limit is None else whole_number("limit", limit, 1)
    max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1)
    seed, chat = whole_number("seed", seed, 0), flag("chat", chat)
    if chat and not llm.tokenizer.chat_template:
        raise RequestError("this model has no chat template", "leave out --chat")
    resolved = [llm.resolve_policy(**_chosen(policy)) for policy in policies]
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
    evaluator = _Evaluator(llm, chat, max_tokens, seed)
    problems = [(task, problem) for task in selection.tasks for problem in evaluator.problems(task, limit, indices)]
    records = RecordFile(out, settings, {label: numbers(policy) for label, policy in by_label.items()}, conditions)
    total = len(problems) * len(by_label)
    report = progress or (lambda record, total, was_there: None)
    try:
        jobs = []
        for task, problem in problems:
            missing = []
            for label, policy in by_label.items():
                if (record := records.find(problem, label)) is None:
                    missing.append(policy)
                else:
                    report(record, total, True)
            if missing:
                jobs.append(_Job(task, problem, missing))
        for record in evaluator.run(jobs):
            records.append(record)
            report(record, total, False)
    finally:
        records.close()
    wanted = [records.find(problem, label) for _, problem in problems for label in by_label]
    return Evaluation(settings, selection, by_label, [record for record in wanted if record])


def prompt_ids(
    llm: LLM, task: EvalTask, indices: Collection[int], chat: bool = False, max_tokens: int | None = None
) -> dict[int, tuple[int, ...]]:
    """The token ids of the prompts of some problems of a task, as `evaluate` asks them."""
    evaluator = _Evaluator(llm, chat, max_tokens, seed=0)
    return {problem.index: evaluator.prompt_ids(problem) for problem in evaluator.problems(task, None, indices)}


@dataclass
class _Job:
    """A problem, the policies under which it is still to be answered, and the outputs that came so far."""

    task: EvalTask
    problem: Problem
    policies: list[DepthPolicy]
    truncated: bool = False  # whether the beginning of a prompt was cut off
    outputs: list[Output] = field(default_factory=list)


class _Evaluator:
    """The model as the harness sees it, and how it is asked."""

    def __init__(self, llm: LLM, chat: bool, max_tokens: int | None, seed: int) -> None:
        from .harness import TaperLM  # the harness takes seconds to import

        self._lm = TaperLM(llm, mode="full")  # each request brings its own policy
        self._chat, self._seed = chat, seed
        self._options = {} if max_tokens is None else {"max_gen_toks": max_tokens}

    def problems(self, task: EvalTask, limit: int | None, indices: Collection[int] | None) -> list[Problem]:
        """The problems of a task as this model is asked them."""
        return task.problems(limit, self._lm.apply_chat_template if self._chat else None, indices)

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """The token ids of a problem's first prompt."""
        context, gen_kwargs = problem.requests[0].args[:2]
        return tuple(self._lm.request(context, {**gen_kwargs, **self._options}, self._lm.policy, 0).prompt_ids)

    def run(self, jobs: Sequence[_Job]) -> Iterator[Record]:
        """The records of some jobs, as their problems are answered."""
        from .harness import complete

        with quiet():
            chains = [[request for policy in job.policies for request in self._requests(job, policy)] for job in jobs]
        for number, _, output in complete(self._lm.llm, chains):
            job = jobs[number]
            job.outputs.append(output)
            wanted = len(job.problem.requests) * job.problem.repeats
            if len(job.outputs) == wanted:  # those of a policy come one after the other
                yield self._record(job, job.outputs)
                job.outputs = []

    def _requests(self, job: _Job, policy: DepthPolicy) -> list[Request]:
        """What a problem asks of the engine under a policy: each request as often as the task wants."""
        from .harness import request_seed

        requests, cut_before = [], self._lm.num_truncated
        for instance in job.problem.requests:
            context, gen_kwargs = instance.args[:2]
            for repeat in range(job.problem.repeats):
                seed = request_seed(self._seed, instance, repeat)
                requests.append(self._lm.request(context, {**gen_kwargs, **self._options}, policy, seed))
        job.truncated = self._lm.num_truncated > cut_before
        return requests

    def _record(self, job: _Job, outputs: list[Output]) -> Record:
        """A problem's outputs under one policy, scored."""
        repeats, policy = job.problem.repeats, outputs[0].policy
        texts = [output.text for output in outputs]
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
            answers=tuple(Answer(o.text, tuple(o.token_ids), o.mean_depth, o.finish_reason) for o in outputs),
        )


def _chosen(policy: DepthPolicy | str | Path) -> dict[str, Any]:
    """The arguments of `LLM.resolve_policy`."""
    return {"mode": "full"} if policy == "full" else {"policy": policy}
