"""Problems whose outcomes are made up."""

from __future__ import annotations

from collections.abc import Callable

from taper.lab.calibration.problems import Attempt, Problems
from taper.lab.calibration.store import Store


class MadeUpProblems:
    """`solves(index, skipped)` says whether problem `index` is solved with these layers skipped."""

    def __init__(self, solves: Callable[[int, set[int]], bool], count: int = 128) -> None:
        self.solves, self.count = solves, count
        self.asked: list[tuple[int, tuple[int, ...]]] = []  # problems and the layers skipped
        self.identity = {"task": "made up"}

    def __len__(self) -> int:
        return self.count

    def prompt_ids(self, indices):
        return {index: (3 + index % 250, 7, 9) for index in indices}

    def attempt(self, indices, policy):
        skipped = policy.skip_order[: policy.num_hidden_layers - policy.min_depth]
        self.asked += [(index, skipped) for index in indices]
        return [Attempt(self.solves(index, set(skipped)), [4, 5, 6 + index % 9, 8]) for index in indices]

    def judged(self, store: Store) -> Problems:
        """The first half to search with, the rest to validate with."""
        half = self.count // 2
        return Problems(self, range(half), range(half, self.count), store)
