"""Word problems with known answers: how many the model still solves without some layers.

Replay follows the answers of full depth, so it cannot see a layer whose absence leads astray little by little: the mean
KL hardly rises, and half of the problems go wrong. Here the model goes on from its own tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import resources
from typing import NamedTuple

import numpy as np

from ..errors import RequestError
from ..llm import LLM
from ..policy import DepthPolicy
from .measure import Tick
from .prompts import BATCH, completions
from .search import LOST
from .statistics import SolvedProblems, ratio_estimate
from .store import Store

MAX_TOKENS = 320  # of an answer; one that has not ended by then is not right
SOLVED = 1 / 3  # share of a level's first problems that full depth must solve for the level to tell anything
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Problem(NamedTuple):
    """A question, and the number or text that answers it."""

    prompt: str
    answer: str
    steps: int  # of reasoning


def builtin_problems() -> list[list[Problem]]:
    """The problems that come with Taper, by level: of one step, two steps and several steps."""
    text = resources.files(__package__).joinpath("problems.jsonl").read_text(encoding="utf-8")
    problems = [Problem(**json.loads(line)) for line in text.splitlines()]
    return [[problem for problem in problems if problem.steps == steps] for steps in (1, 2, 3)]


def is_right(output: str, answer: str) -> bool:
    """Whether an output gives the answer: a number must be its last number, a text must stand in its last line."""
    if _NUMBER.fullmatch(answer.strip()):
        numbers = _NUMBER.findall(output)
        return bool(numbers) and _value(numbers[-1]) == _value(answer.strip())
    lines = [line for line in output.splitlines() if line.strip()]
    words = re.escape(" ".join(answer.lower().split()))
    return bool(lines) and re.search(rf"(?<!\w){words}(?!\w)", " ".join(lines[-1].lower().split())) is not None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


class WordProblems:
    """Built-in problems on a model, of the hardest level that it can do at full depth.

    One half is to search with, the other half to validate with. A model that cannot do the easiest level, or whose
    context is too short for it, has none.
    """

    def __init__(self, llm: LLM, store: Store) -> None:
        self._llm, self._store = llm, store
        self._full = DepthPolicy.full(llm.config.num_hidden_layers)

    @cached_property
    def _halves(self) -> tuple[list[Problem], list[Problem]]:
        """Those to search with and those to validate with."""
        level: list[Problem] = []
        for harder in builtin_problems():
            if not self._fit(harder) or self._solved(harder[:BATCH], self._full).mean() < SOLVED:
                break
            level = harder
        return level[: len(level) // 2], level[len(level) // 2 :]

    def _fit(self, problems: Sequence[Problem]) -> bool:
        """Whether there is room for the longest of them and its answer."""
        try:
            longest = max(len(self._llm.encode(problem.prompt)) for problem in problems)
        except RequestError:
            return False
        return longest + MAX_TOKENS <= self._llm.engine.backend.context_length

    @property
    def tell(self) -> bool:
        """Whether there are any for this model."""
        return bool(self._halves[0])

    def harm(self, policy: DepthPolicy) -> float:
        """By how many standard errors fewer search problems are solved than at full depth (McNemar's test).

        The first half of them is enough if it tells already: not one fewer is solved, or far fewer.
        """
        problems = self._halves[0]
        harm = self._harm(problems[: len(problems) // 2], policy) * 2**0.5  # if the other half does the same
        return self._harm(problems, policy) if 0 < harm <= LOST else harm

    def validate(self, policy: DepthPolicy, tick: Callable[[int], Tick]) -> SolvedProblems | None:
        """How many of the held-out problems are solved. `tick` is told how often it will be called."""
        if not self.tell:
            return None
        problems, policies = self._halves[1], (self._full, policy)
        done = tick(len(policies) * -(-len(problems) // BATCH))
        full, own = (self._solved(problems, each, done).astype(float) for each in policies)
        policy_share, full_share, difference = (
            ratio_estimate(part, np.ones(len(full))) for part in (own, full, own - full)
        )
        return SolvedProblems(policy_share, full_share, difference, len(full))

    def _harm(self, problems: Sequence[Problem], policy: DepthPolicy) -> float:
        full, own = (self._solved(problems, each) for each in (self._full, policy))
        lost, gained = int((full & ~own).sum()), int((own & ~full).sum())
        return float((lost - gained) / max(1, lost + gained) ** 0.5)

    def _solved(self, problems: Sequence[Problem], policy: DepthPolicy, tick: Tick = lambda: None) -> np.ndarray:
        """Which ones: bool [problems]."""
        prompts = [tuple(self._llm.encode(problem.prompt)) for problem in problems]
        answers = completions(self._llm, prompts, policy, MAX_TOKENS, self._store, tick)
        right = [
            len(reference.answer_ids) < MAX_TOKENS
            and is_right(self._llm.tokenizer.decode(reference.answer_ids), problem.answer)
            for reference, problem in zip(answers, problems, strict=True)
        ]
        return np.array(right, bool)
