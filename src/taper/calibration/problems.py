"""Problems with known answers, which a model must still solve with fewer layers.

Replay follows the outputs of full depth, so it does not see a layer whose absence leads the model astray little by
little: the mean KL hardly rises, and half of the problems go wrong. Here the model goes on from its own tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..engine import Request
from ..errors import RequestError
from ..llm import LLM
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from .prompts import BATCH
from .search import COLLAPSED
from .statistics import SolvedProblems, mcnemar_score, ratio_estimate
from .store import Store, Tick, digest, numbers

MAX_TOKENS = 320  # of an output; one that has not ended by then is wrong
SOLVED = 1 / 3  # share of a level's first problems that full depth must solve for the level to say anything
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Attempt(NamedTuple):
    """One problem as it was solved, or not."""

    solved: bool
    completion_ids: list[int]


class ProblemSet(Protocol):
    """Problems, numbered from 0. `identity`: JSON that differs if prompts, outputs or right answers would."""

    identity: Any

    def __len__(self) -> int: ...

    def prompt_ids(self, indices: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The token ids of some prompts, by index."""
        ...

    def attempt(self, indices: Sequence[int], policy: DepthPolicy) -> list[Attempt]:
        """Let the model solve some problems under a policy."""
        ...


class Problems:
    """Problems on which policies are judged. What a policy does on each batch is stored.

    Args:
        problem_set: the problems.
        search: indices of those to search with.
        validation: indices of those to validate with.
        full: full depth.
        store: keeps the attempts.
    """

    def __init__(
        self, problem_set: ProblemSet, search: Sequence[int], validation: Sequence[int], full: DepthPolicy, store: Store
    ) -> None:
        self.problem_set, self.search, self.validation = problem_set, list(search), list(validation)
        self._full, self._store = full, store

    def attempts(self, indices: Sequence[int], policy: DepthPolicy, tick: Tick = lambda: None) -> list[Attempt]:
        """Each problem under a policy; `tick` is called after each batch."""
        attempts: list[Attempt] = []
        for first in range(0, len(indices), BATCH):
            batch = list(indices[first : first + BATCH])
            prompts = list(self.problem_set.prompt_ids(batch).values())
            key = {"problems": self.problem_set.identity, "prompts": prompts, "policy": numbers(policy)}
            stored = self._store.remember(key, partial(self.problem_set.attempt, batch, policy))
            attempts += [Attempt(*attempt) for attempt in stored]
            tick()
        return attempts

    def solved(self, indices: Sequence[int], policy: DepthPolicy, tick: Tick = lambda: None) -> np.ndarray:
        """Which problems a policy solves: bool [indices]."""
        return np.array([attempt.solved for attempt in self.attempts(indices, policy, tick)], bool)

    def score(self, policy: DepthPolicy) -> float:
        """By how many standard errors it solves fewer search problems than full depth (McNemar's test).

        Half of them are enough if no fewer are solved, or so few that the other half would say nothing new.
        """
        half = self._score(self.search[: len(self.search) // 2], policy) * 2**0.5  # if the other half is alike
        return self._score(self.search, policy) if 0 < half <= COLLAPSED else half

    def validate(self, policy: DepthPolicy, ticks: Callable[[int], Tick]) -> SolvedProblems | None:
        """How many of the validation problems are solved; None if there are none.

        `ticks` is told how many batches there are, and returns what is called after each.
        """
        if not self.validation:
            return None
        tick = ticks(2 * -(-len(self.validation) // BATCH))
        full, own = (self.solved(self.validation, one, tick).astype(float) for one in (self._full, policy))
        policy_share, full_share, difference = (
            ratio_estimate(part, np.ones(len(full))) for part in (own, full, own - full)
        )
        return SolvedProblems(policy_share, full_share, difference, len(full))

    def _score(self, indices: Sequence[int], policy: DepthPolicy) -> float:
        full, own = self.solved(indices, self._full), self.solved(indices, policy)
        return mcnemar_score(int((full & ~own).sum()), int((own & ~full).sum()))


class WordProblem(NamedTuple):
    """A question, and the number or text that answers it."""

    prompt: str
    answer: str
    steps: int  # of reasoning


class WordProblemSet:
    """Word problems on a model, asked by its chat template and solved greedily."""

    def __init__(self, llm: LLM, problems: Sequence[WordProblem]) -> None:
        self._llm, self._problems = llm, problems
        self.identity = ["word problems", MAX_TOKENS, digest(problems)]

    def __len__(self) -> int:
        return len(self._problems)

    def prompt_ids(self, indices: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The token ids of some prompts, by index."""
        return {index: tuple(self._llm.encode(self._problems[index].prompt)) for index in indices}

    def attempt(self, indices: Sequence[int], policy: DepthPolicy) -> list[Attempt]:
        """Solve some problems together under a policy."""
        params, tokenizer = SamplingParams(max_tokens=MAX_TOKENS), self._llm.tokenizer
        prompts = self.prompt_ids(indices).values()
        requests = [Request(prompt, params, policy, tokenizer.eos_token_ids) for prompt in prompts]
        attempts = []
        for index, ids in zip(indices, self._llm.engine.complete(requests), strict=True):
            right = len(ids) < MAX_TOKENS and is_right(tokenizer.decode(ids), self._problems[index].answer)
            attempts.append(Attempt(right, ids))
        return attempts


def word_problems(llm: LLM, store: Store) -> Problems:
    """The built-in word problems of the hardest level that a model can do at full depth, half of them to search with.

    There are none for a model that cannot do the easiest level, or whose context is too short for it.
    """
    full = DepthPolicy.full(llm.config.num_hidden_layers)
    problems = Problems(WordProblemSet(llm, []), [], [], full, store)
    for level in builtin_problems():
        harder = WordProblemSet(llm, level)
        indices = range(len(level))
        tried = Problems(harder, indices[: len(level) // 2], indices[len(level) // 2 :], full, store)
        if not _fits(llm, harder) or tried.solved(indices[:BATCH], full).mean() < SOLVED:
            break
        problems = tried
    return problems


def builtin_problems() -> list[list[WordProblem]]:
    """The problems that come with Taper, by level: of one step, two steps and several steps."""
    text = resources.files(__package__).joinpath("problems.jsonl").read_text(encoding="utf-8")
    problems = [WordProblem(**json.loads(line)) for line in text.splitlines()]
    return [[problem for problem in problems if problem.steps == steps] for steps in (1, 2, 3)]


def is_right(output: str, answer: str) -> bool:
    """Whether an output gives the answer: a number must be its last number, a text must be in its last line."""
    if _NUMBER.fullmatch(answer.strip()):
        numbers = _NUMBER.findall(output)
        return bool(numbers) and _value(numbers[-1]) == _value(answer.strip())
    lines = [line for line in output.splitlines() if line.strip()]
    words = re.escape(" ".join(answer.lower().split()))
    return bool(lines) and re.search(rf"(?<!\w){words}(?!\w)", " ".join(lines[-1].lower().split())) is not None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _fits(llm: LLM, problems: WordProblemSet) -> bool:
    """Whether the longest problem and its output fit into the context."""
    try:
        longest = max(map(len, problems.prompt_ids(range(len(problems))).values()))
    except RequestError:
        return False
    return longest + MAX_TOKENS <= llm.engine.backend.context_length
