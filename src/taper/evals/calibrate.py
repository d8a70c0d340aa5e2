"""From a model and a task to the fastest policy that keeps the task's accuracy within a margin.

Replay cannot tell a harmless layer from one that the task needs: the harm grows as the model goes on from its own
tokens. So layers are judged by what the model writes without them, and policies by the problems that they solve.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration.clock import CostModel, measure_cost, measure_speedup
from ..calibration.measure import Measurements
from ..calibration.replay import Reference
from ..calibration.search import first_steps, flex_layers
from ..calibration.store import current_conditions, digest, open_store
from ..calibration.summary import to_plain
from ..errors import RequestError, number, whole_number
from ..llm import LLM
from ..models.download import cache_folder, content_hash
from ..policy import DepthPolicy
from .records import Record
from .run import evaluate, prompt_ids
from .statistics import compare_in_looks
from .summary import chosen_filter, solved
from .tasks import EvalTask, Selection
from .trials import TaskCalibration, TaskSettings, Trial

SEARCH_PROBLEMS, PROBLEMS = 32, 192
LOOK = 32  # problems before the first look at the result, where a policy that fails at once is given up
REPLAYED, REPLAYED_STEPS = 16, 48  # outputs of full depth and steps of each: they say which layers are worth trying
CANDIDATES = 4  # layers tried at a time, those of the lowest KL
MOST = 3  # a third of the layers at most
ReportProgress = Callable[[str, float], None]  # a stage, and what part of it was done since it was last told


def calibrate_to_task(
    llm: LLM,
    selection: Selection,
    margin: float,
    *,
    problems: int = PROBLEMS,
    chat: bool = False,
    max_tokens: int | None = None,
    filter_name: str | None = None,
    seed: int = 0,
    name: str = "",
    progress: ReportProgress | None = None,
) -> TaskCalibration:
    """Find the layers that a task can spare, and the most of them that it can spare at once.

    The problems of the selection are shuffled. On the first ones, layers are chosen one after another: the candidates
    of lowest KL are skipped in turn while the model answers, until no fewer problems are solved than at full depth;
    else the one goes without which most are solved. After each layer, the policy without all those so far is compared
    with full depth on other problems, and the first that does not hold ends it. Each is compared at the 5 % level,
    gentle to fast, so the last one that holds does so at that level too.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: one task, with problems that are not those it is tested on.
        margin: the loss of accuracy that is accepted, in (0, 1).
        problems: most problems for each comparison.
        chat: ask by the model's chat template.
        max_tokens: most tokens of an output; default the task's own limit.
        filter_name: the harness's filter whose figure counts; default the most lenient one.
        seed: of the shuffle.
        name: of the policy.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Raises:
        RequestError: an argument out of its range, several tasks, too few problems, or a figure that is not 0 or 1.
        ModelError: the model's output is not a number.
    """
    number("margin", margin, 0, 1, above=True, below=True)
    whole_number("problems", problems, LOOK)
    if len(selection.tasks) != 1:
        raise RequestError("a policy is calibrated to one task at a time", "name one task, not a group")
    calibrator = _TaskCalibrator(
        llm, selection, margin, chat, max_tokens, filter_name, seed, progress or (lambda stage, part: None)
    )
    return calibrator.run(problems, name)


class _TaskCalibrator:
    """One calibration to a task: outputs are recorded in the cache folder, so that it goes on where it was killed."""

    def __init__(
        self,
        llm: LLM,
        selection: Selection,
        margin: float,
        chat: bool,
        max_tokens: int | None,
        filter_name: str | None,
        seed: int,
        progress: ReportProgress,
    ) -> None:
        self.llm, self.selection, self.margin, self.seed, self.progress = llm, selection, margin, seed, progress
        self.task: EvalTask = selection.tasks[0]
        self.filter = chosen_filter(self.task, filter_name)
        self.asked: dict[str, Any] = {"chat": chat, "max_tokens": max_tokens, "seed": seed}
        self.layers = llm.config.num_hidden_layers
        self.full = DepthPolicy.full(self.layers)
        self.conditions = current_conditions(llm)
        self.model_hash = content_hash(llm.path)
        key = [self.model_hash, self.task.name, self.task.version, selection.split, self.asked, self.conditions.kernels]
        context = llm.engine.backend.context_length
        self.out = cache_folder() / "tasks" / f"{digest([*key, llm.dtype, context, self.task.num_fewshot])}.jsonl"

    def run(self, problems: int, name: str) -> TaskCalibration:
        """All stages in turn."""
        shuffled = np.random.default_rng(self.seed).permutation(self.task.num_problems).tolist()
        searched, rest = shuffled[:SEARCH_PROBLEMS], shuffled[SEARCH_PROBLEMS:]
        if len(rest) < LOOK:
            raise RequestError(
                f"task {self.task.name} has {len(shuffled)} problems; {SEARCH_PROBLEMS + LOOK} are needed",
                "give a task with more problems",
            )
        self.out.parent.mkdir(parents=True, exist_ok=True)
        full = self._answers("answers at full depth", self.full, searched)
        if not any(solved(record, self.filter) for record in full):
            raise RequestError(
                f"at full depth the model solves none of {len(full)} problems of {self.task.name}",
                "choose a task that it can do, or another --filter",
            )
        settings = self._settings(problems)
        order: list[int] = []
        trials: list[Trial] = []
        with closing(self._layers_to_skip(full)) as layers:
            for layer in layers:
                order.append(layer)
                trials.append(self._trial(order, rest[:problems]))
                if not trials[-1].holds:
                    break
        best = max((trial for trial in trials if trial.holds), key=lambda trial: trial.speedup, default=None)
        policy = None if best is None else self._finished(best, order, settings, name)
        return TaskCalibration(policy, settings, trials)

    def _layers_to_skip(self, full: Sequence[Record]) -> Generator[int, None, None]:
        """One layer after another; each is looked for only when it is asked for, as that takes long."""
        prompts = self._prompts([record.problem for record in full])
        references = [Reference(prompts[r.problem], r.answers[0].token_ids) for r in full if r.answers[0].token_ids]
        known = first_steps(references, REPLAYED_STEPS)[:REPLAYED]
        at_full_depth = sum(bool(solved(record, self.filter)) for record in full)
        store = open_store(self.model_hash, self.conditions)
        order: list[int] = []
        with closing(store), closing(Measurements(self.llm.engine, known, store)) as measurements:

            def kl_sums(stage: str, layers: Sequence[int]) -> np.ndarray:
                return measurements.kl_sums(frozenset(order), layers, range(len(known)), self._ticks(stage, len(known)))

            importance = kl_sums("importance of each layer", range(self.layers))
            left = flex_layers(importance.tolist())
            sums = importance[left]
            for length in range(1, 1 + min(len(left) - 1, self.layers // MOST)):
                if order:
                    sums = kl_sums(f"layer {length}: KL", left)
                near = [left[i] for i in np.argsort(sums, kind="stable")[:CANDIDATES]]
                measurements.replay.close()  # frees the slots for the outputs
                right: dict[int, int] = {}
                for layer in near:
                    right[layer] = self._num_solved([*order, layer], prompts)
                    if right[layer] >= at_full_depth:
                        break
                order.append(max(right, key=lambda layer: right[layer]))  # of equals, the one of the lowest KL
                left.remove(order[-1])
                yield order[-1]

    def _num_solved(self, skipped: Sequence[int], problems: Iterable[int]) -> int:
        """How many problems are solved without some layers."""
        stage = f"layer {len(skipped)}: answers without {skipped[-1]}"
        records = self._answers(stage, self._policy(skipped), list(problems))
        return sum(bool(solved(record, self.filter)) for record in records)

    def _trial(self, skipped: Sequence[int], problems: Sequence[int]) -> Trial:
        """Compare a policy with full depth on more and more problems, until the verdict is clear or none is left."""
        policy, own = self._policy(skipped), list[Record]()

        def ask(count: int) -> tuple[list[bool], list[bool]]:
            stage = f"{len(skipped)} layers skipped: {count} problems"
            full, own[:] = (self._answers(stage, each, problems[:count]) for each in (self.full, policy))
            right, tapered = ([bool(solved(record, self.filter)) for record in records] for records in (full, own))
            return right, tapered

        comparison = compare_in_looks(ask, len(problems), LOOK, self.margin, self.seed)
        tokens = float(np.mean([len(record.answers[0].token_ids) for record in own]))
        return Trial(policy, comparison, tokens, self._cost(round(tokens)).speedup(policy, max(2, round(tokens))))

    def _finished(self, trial: Trial, order: Sequence[int], settings: TaskSettings, name: str) -> DepthPolicy:
        """The policy with its provenance, its speed measured."""
        policy, tokens = trial.policy, max(2, round(trial.tokens))
        prompt = next(iter(self._prompts([0]).values()))
        self._ticks("speed", 1)()
        measured = measure_speedup(self.llm.engine, prompt, policy, tokens)
        provenance = to_plain(settings) | {
            "order": list(order),
            "comparison": to_plain(trial.comparison),
            "answer_tokens": tokens,
            "mean_depth": round(policy.mean_depth(tokens), 3),
            "speedup": {"predicted": round(trial.speedup, 4), "measured": to_plain(measured)},
        }
        return replace(policy, name=name, model=self.llm.config.identity, provenance=provenance)

    def _settings(self, problems: int) -> TaskSettings:
        return TaskSettings(
            task=self.task.name,
            version=self.task.version,
            fewshot=self.task.num_fewshot,
            split=self.selection.split,
            asked=self.asked,
            figure=self.filter,
            margin=self.margin,
            problems={"search": SEARCH_PROBLEMS, "validation": problems},
            conditions=self.conditions,
            model={"name": Path(self.llm.model).name, "sha256": self.model_hash, "num_hidden_layers": self.layers},
        )

    def _cost(self, tokens: int) -> CostModel:
        """The time of a step by depth, measured once for outputs of about this length."""
        tokens = max(32, tokens // 32 * 32)
        store = open_store(self.model_hash, self.conditions)
        with closing(store):
            prompt = next(iter(self._prompts([0]).values()))
            machine, threads = self.conditions.machine, self.llm.threads
            key = {"cost": tokens, "prompt": len(prompt), "machine": machine, "threads": threads}
            return CostModel(**store.remember(key, lambda: asdict(measure_cost(self.llm.engine, prompt, tokens))))

    def _answers(self, stage: str, policy: DepthPolicy, indices: Sequence[int]) -> list[Record]:
        tick = self._ticks(stage, len(indices))
        result = evaluate(
            self.llm,
            self.selection,
            [policy],
            indices=indices,
            out=self.out,
            progress=lambda record, total, was_there: tick(),
            **self.asked,
        )
        return result.records

    def _prompts(self, indices: Sequence[int]) -> dict[int, tuple[int, ...]]:
        return prompt_ids(self.llm, self.task, indices, self.asked["chat"], self.asked["max_tokens"])

    def _policy(self, skipped: Sequence[int]) -> DepthPolicy:
        """The policy that skips these layers from step 1 on, named after them."""
        policy = DepthPolicy.static(self.layers, self.layers - len(skipped), skipped)
        return replace(policy, name=f"skip {' '.join(map(str, skipped))}")

    def _ticks(self, stage: str, count: int) -> Callable[[], None]:
        """Begin a stage; to be called `count` times while it goes on."""
        self.progress(stage, 0.0)
        return lambda: self.progress(stage, 1 / max(1, count))
