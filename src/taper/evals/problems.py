"""The problems of a task as calibration asks them: `taper calibrate --task`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..calibration.problems import Attempt
from ..errors import RequestError
from ..llm import LLM
from ..policy import DepthPolicy
from .run import evaluate, prompt_ids
from .summary import chosen_filter, solved
from .tasks import Selection


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
