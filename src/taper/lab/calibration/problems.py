"""Problems with known answers, which a model must still solve with fewer layers.

Replay follows the outputs of full depth, so it misses small errors that add up: without some layers the mean KL hardly
rises, and yet half of the problems go wrong. Here the model continues from its own tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...engine import Request
from ...errors import RequestError
from ...llm import LLM
from ...models.files import text_lines
from ...policy import DepthPolicy
from ...sampling import SamplingParams
from .progress import SILENT, Progress, Stage
from .prompts import BATCH
from .search import COLLAPSED
from .statistics import SolvedProblems, mcnemar_score, ratio_estimate
from .store import Store, digest, numbers

MAX_TOKENS = 320  # of an output; one that has not ended by then is wrong
SOLVED = 1 / 3  # share of a level's first problems that full depth must solve for the level to say anything
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Attempt(NamedTuple):
    """One problem as it was solved, or not."""

    solved: bool
    completion_ids: list[int]


class ProblemSet(Protocol):
    """Problems, numbered from 0, which a model solves under a policy."""

    identity: Any  # JSON that differs if prompts, outputs or right answers would

    def __len__(self) -> int: ...
    def prompt_ids(self, indices: Sequence[int]) -> dict[int, tuple[int, ...]]: ...
    def attempt(self, indices: Sequence[int], policy: DepthPolicy) -> list[Attempt]: ...


@dataclass(frozen=True)
class Problems:
    """Problems on which policies are judged, some to search with, others to validate with; attempts are stored."""

    problem_set: ProblemSet
    search: Sequence[int]  # indices
    validation: Sequence[int]
    store: Store

    def attempts(self, indices: Sequence[int], policy: DepthPolicy, stage: Stage = SILENT) -> list[Attempt]:
        """Each problem under a policy, in batches, which are the parts of the stage."""
        attempts: list[Attempt] = []
        for first in range(0, len(indices), BATCH):
            batch = list(indices[first : first + BATCH])
            prompts = list(self.problem_set.prompt_ids(batch).values())
            key = {"problems": self.problem_set.identity, "prompts": prompts, "policy": numbers(policy)}
            stored = self.store.remember(key, partial(self.problem_set.attempt, batch, policy))
            attempts += [Attempt(*attempt) for attempt in stored]
            stage.done()
        return attempts

    def solved(
        self, indices: Sequence[int], policy: DepthPolicy, stage: Stage = SILENT
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which problems full depth solves, and which a policy does: bool [indices] each."""
        both = (DepthPolicy.full(policy.num_hidden_layers), policy)
        full, own = ([attempt.solved for attempt in self.attempts(indices, one, stage)] for one in both)
        return np.array(full, bool), np.array(own, bool)

    def score(self, policy: DepthPolicy) -> float:
        """By how many standard errors it solves fewer search problems than full depth (McNemar's test).

        Half of them are enough if no fewer are solved, or so few that the other half would say nothing new.
        """
        half = self._score(self.search[: len(self.search) // 2], policy) * 2**0.5  # if the other half is alike
        return self._score(self.search, policy) if 0 < half <= COLLAPSED else half

    def _score(self, indices: Sequence[int], policy: DepthPolicy) -> float:
        full, own = self.solved(indices, policy)
        return mcnemar_score(int((full & ~own).sum()), int((own & ~full).sum()))

    def validate(self, policy: DepthPolicy, progress: Progress) -> SolvedProblems:
        """How many of the validation problems are solved."""
        stage = progress.stage("word problems", 2 * -(-len(self.validation) // BATCH))
        full, own = (solved.astype(float) for solved in self.solved(self.validation, policy, stage))
        share, full_share, difference = (ratio_estimate(part, np.ones(len(full))) for part in (own, full, own - full))
        return SolvedProblems(share, full_share, difference, len(full))


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
        prompts, attempts = self.prompt_ids(indices).values(), []
        requests = [Request(prompt, params, policy, tokenizer.eos_token_ids, reuse="exact") for prompt in prompts]
        for index, ids in zip(indices, self._llm.engine.complete(requests), strict=True):
            right = len(ids) < MAX_TOKENS and is_right(tokenizer.decode(ids), self._problems[index].answer)
            attempts.append(Attempt(right, ids))
        return attempts


def word_problems(llm: LLM, store: Store, levels: Iterable[Sequence[WordProblem]] | None = None) -> Problems | None:
    """Word problems of the hardest level that a model can do at full depth, half of them to search with.

    The levels, the easiest first, are by default the built-in ones. None if the model cannot do the easiest level, or
    its context is too short for it.
    """
    full = DepthPolicy.full(llm.config.num_hidden_layers)
    problems = None
    for level in builtin_problems() if levels is None else levels:
        indices, half = range(len(level)), len(level) // 2
        harder = Problems(WordProblemSet(llm, level), indices[:half], indices[half:], store)
        if not _fits(llm, harder.problem_set):
            break
        attempts = harder.attempts(indices[:BATCH], full)
        if sum(attempt.solved for attempt in attempts) < SOLVED * len(attempts):
            break
        problems = harder
    return problems


def builtin_problems() -> list[list[WordProblem]]:
    """The problems that come with Taper, by level: of one step, two steps and several steps."""
    text = resources.files(__package__).joinpath("problems.jsonl").read_text(encoding="utf-8")
    problems = [WordProblem(**json.loads(line)) for line in text_lines(text)]
    return [[problem for problem in problems if problem.steps == steps] for steps in (1, 2, 3)]


def is_right(output: str, answer: str) -> bool:
    """Whether an output gives the answer: a number must be its last number, a text must be in its last line."""
    if _NUMBER.fullmatch(answer.strip()):
        wanted, *values = (float(text.replace(",", "")) for text in (answer.strip(), *_NUMBER.findall(output)))
        return wanted in values[-1:]
    lines = [line for line in output.splitlines() if line.strip()]
    words = re.escape(" ".join(answer.lower().split()))
    return bool(lines) and re.search(rf"(?<!\w){words}(?!\w)", " ".join(lines[-1].lower().split())) is not None


def _fits(llm: LLM, problems: ProblemSet) -> bool:
    """Whether the longest problem and its output fit into the context."""
    try:
        longest = max(map(len, problems.prompt_ids(range(len(problems))).values()))
    except RequestError:
        return False
    return longest + MAX_TOKENS <= llm.engine.backend.context_length
