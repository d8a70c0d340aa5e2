"""The model completes each problem under each policy, and every output is scored.

For an evaluation, which also records the outputs so that it can be interrupted, and for calibration to a task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...engine import Request
from ...errors import RequestError, flag, whole_number
from ...llm import LLM
from ...models.download import content_hash
from ...policy import DepthPolicy
from ...stream import Output
from ..calibration.problems import Attempt
from ..calibration.store import current_conditions, numbers
from .records import Completion, Evaluation, Record, RecordFile
from .summary import chosen_filter, solved
from .tasks import EvalTask, Problem, Selection, quiet

OnRecord = Callable[[Record, int, bool], None]  # a record, how many there will be, and whether the file had it


def evaluate(
    llm: LLM,
    selection: Selection,
    policies: Sequence[DepthPolicy | str | Path],
    *,
    limit: int | None = None,
    indices: Collection[int] | None = None,
    chat: bool | None = None,
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
        chat: ask by the model's chat template, with examples as earlier turns; default for problems of your own, if
            the model has a template.
        max_tokens: most tokens of an output; default the task's own limit, or 256 where it has none.
        seed: of tasks that sample; a problem has the same seed under every policy.
        out: a file for the records; records that it already has are not computed again.
        progress: called with each record, the number of records there will be, and whether it was in the file.

    Raises:
        RequestError: an argument out of its range, or a file of another evaluation.
        PolicyError: a policy is damaged or made for another model.
        ModelError: the model's output is not a number.
    """
    evaluator = Evaluator(llm, selection, chat=chat, max_tokens=max_tokens, seed=seed)
    return evaluator.evaluate(policies, limit=limit, indices=indices, out=out, progress=progress)


class Evaluator:
    """Tasks as a model is asked them. Each prompt is made once, however many policies complete it.

    Arguments and errors are those of `evaluate`.
    """

    def __init__(
        self,
        llm: LLM,
        selection: Selection,
        *,
        chat: bool | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        from .harness import TaperLM  # lm-evaluation-harness takes seconds to import

        has_template = bool(llm.tokenizer.chat_template)
        chat = has_template and selection.is_own if chat is None else flag("chat", chat)
        if chat and not has_template:
            raise RequestError("this model has no chat template", "leave out --chat")
        self._llm, self._selection = llm, selection
        self._lm = TaperLM(llm, mode="full", seed=seed)  # each request brings its own policy
        self._render_chat = self._lm.apply_chat_template if chat else None
        self._options = {} if max_tokens is None else {"max_gen_toks": whole_number("max_tokens", max_tokens, 1)}
        self._problems: dict[str, dict[int, Problem]] = {task.name: {} for task in selection.tasks}
        self._seconds, self._num_made = 0.0, 0  # of all records that were made
        self._conditions = vars(current_conditions(llm))
        self._settings = {
            "model": content_hash(llm.path),
            "backend": self._conditions["backend"],
            "dtype": llm.dtype,
            "context": llm.engine.backend.context_length,
            "tasks": {task.name: {"version": task.version, "fewshot": task.num_fewshot} for task in selection.tasks},
            "split": selection.split,
            "chat": chat,
            "max_tokens": max_tokens,
            "seed": seed,
        }

    def prompt_ids(self, indices: Collection[int]) -> dict[int, tuple[int, ...]]:
        """The token ids of the first prompt of some problems by index, if the selection is one task."""
        (task,) = self._selection.tasks
        full = self._lm.policy
        return {p.index: tuple(self._requests(p, full)[0].prompt_ids) for p in self._problems_of(task, indices)}

    def evaluate(
        self,
        policies: Sequence[DepthPolicy | str | Path],
        *,
        limit: int | None = None,
        indices: Collection[int] | None = None,
        out: Path | None = None,
        progress: OnRecord | None = None,
    ) -> Evaluation:
        """Complete and score problems, see `evaluate`."""
        limit = None if limit is None else whole_number("limit", limit, 1)
        llm, report = self._llm, progress or (lambda record, total, was_there: None)
        resolved = list(map(llm.resolve_policy, policies))
        by_label = {policy.label: policy for policy in resolved}
        if not by_label or any(numbers(by_label[policy.label]) != numbers(policy) for policy in resolved):
            raise RequestError("policies are missing, or two have the same name", "give each its own name")
        problems = []
        for task in self._selection.tasks:
            asked = range(task.num_problems)[:limit] if indices is None else sorted(set(indices))
            problems += [(task, problem) for problem in self._problems_of(task, asked)]
        conditions = {"model": llm.model, "batch_size": llm.engine.backend.num_slots, **self._conditions}
        total = len(problems) * len(by_label)
        file = RecordFile(out, self._settings, {name: numbers(policy) for name, policy in by_label.items()}, conditions)
        try:
            jobs = []
            for task, problem in problems:
                stored = {label: file.find(problem, label) for label in by_label}
                for record in stored.values():
                    if record is not None:
                        report(record, total, True)
                if missing := [by_label[label] for label, record in stored.items() if record is None]:
                    jobs.append((task, problem, missing))
            started = time.perf_counter()
            for record in self._completed(jobs):
                file.append(record)
                report(record, total, False)
                self._num_made += 1
            self._seconds += time.perf_counter() - started
        finally:
            file.close()
        records = [file.records[problem.task, problem.index, label] for _, problem in problems for label in by_label]
        return Evaluation(self._settings, self._selection, by_label, records, self.record_s)

    @property
    def record_s(self) -> float | None:
        """Seconds that a problem took under one policy, mean over those that were asked; None if none was."""
        return self._seconds / self._num_made if self._num_made else None

    def _problems_of(self, task: EvalTask, indices: Collection[int]) -> list[Problem]:
        made = self._problems[task.name]
        if missing := set(indices) - made.keys():
            if task.num_fewshot:  # then those before are made too: make more at a time
                missing.add(min(2 * max(missing), task.num_problems - 1))
            made |= task.problems(missing, self._render_chat)
        return [made[index] for index in indices]

    def _completed(self, jobs: Sequence[tuple[EvalTask, Problem, list[DepthPolicy]]]) -> Iterator[Record]:
        """The records of problems, each under some policies; each record as soon as its outputs have ended."""
        from .harness import complete

        chains, truncated = [], []
        with quiet():
            for _, problem, policies in jobs:
                truncated_before = self._lm.num_truncated
                chains.append([request for policy in policies for request in self._requests(problem, policy)])
                truncated.append(self._lm.num_truncated > truncated_before)
        outputs: list[list[Output]] = [[] for _ in jobs]
        for number, output in complete(self._llm, chains):
            (task, problem, _), own = jobs[number], outputs[number]
            own.append(output)
            if len(own) == len(problem.requests) * problem.repeats:  # the outputs of a policy are adjacent
                yield _record(task, problem, own, truncated[number])
                own.clear()

    def _requests(self, problem: Problem, policy: DepthPolicy) -> list[Request]:
        """The engine's requests for a problem under a policy: each of the problem's own, `repeats` times."""
        return [
            self._lm.request(context, {**gen_kwargs, **self._options}, policy, self._lm.request_seed(instance, repeat))
            for instance in problem.requests
            for context, gen_kwargs in [instance.args[:2]]
            for repeat in range(problem.repeats)
        ]


def _record(task: EvalTask, problem: Problem, outputs: Sequence[Output], truncated: bool) -> Record:
    """A problem's outputs under one policy, scored."""
    repeats, policy = problem.repeats, outputs[0].policy
    texts = [output.text for output in outputs]
    metrics, extracted = task.score(
        problem, [texts[first : first + repeats] for first in range(0, len(texts), repeats)]
    )
    return Record(
        task=task.name,
        problem=problem.index,
        mode="full" if policy.min_depth == policy.num_hidden_layers else "taper",
        policy=policy.label,
        prompt_hash=problem.prompt_hash,
        truncated=truncated,
        metrics=metrics,
        extracted=extracted,
        completions=tuple(Completion(o.text, tuple(o.token_ids), o.mean_depth, o.finish_reason) for o in outputs),
    )


class TaskProblems(Evaluator):
    """A task of the harness as a `ProblemSet`, for calibration.

    Args:
        llm: the model.
        selection: one task, with problems that are not those it is tested on.
        filter_name: the harness's filter that says what is right; default the most lenient one.
        asked: `chat`, `max_tokens` and `seed`, see `evaluate`.

    Raises:
        RequestError: several tasks are given, the task has no such filter, or an argument is out of its range.
    """

    def __init__(self, llm: LLM, selection: Selection, *, filter_name: str | None = None, **asked: Any) -> None:
        if len(selection.tasks) != 1:
            raise RequestError("a policy is calibrated to one task at a time", "name one task, not a group")
        super().__init__(llm, selection, **asked)
        self._task, self._filter = selection.tasks[0], chosen_filter(selection.tasks[0], filter_name)
        self.identity = {
            "task": self._task.name,
            "version": self._task.version,
            "fewshot": self._task.num_fewshot,
            "split": selection.split,
            "asked": {name: self._settings[name] for name in ("chat", "max_tokens", "seed")},
            "figure": self._filter,
            "context": llm.engine.backend.context_length,
        }

    def __len__(self) -> int:
        return self._task.num_problems

    def attempt(self, indices: Sequence[int], policy: DepthPolicy) -> list[Attempt]:
        """Let the model solve some problems under a policy.

        Raises:
            RequestError: no metric of the task says whether an output is right.
        """
        by_index = {record.problem: record for record in self.evaluate([policy], indices=indices).records}
        attempts = []
        for record in (by_index[index] for index in indices):
            right = solved(record, self._filter)
            if right is None:
                raise RequestError(f"task {self._task.name} has no metric that is right or wrong for each problem")
            attempts.append(Attempt(right, list(record.completions[0].token_ids)))
        return attempts
