"""Published methods of skipping layers, and their comparison on tasks, for scripts beside this one.

`methods` makes ordinary nested policies of one mean depth; if a paper leaves a detail open, the name of the method says
"our reading". A `Study` is a model on which methods are compared. A `TaskStudy` is one task of it: the outputs of full
depth, policies tuned to one mean depth over them, and the outputs of those policies. Outputs and replays are kept in a
folder, so an interrupted comparison continues where it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from taper.adapters import Adapters
from taper.errors import RequestError, number, whole_number
from taper.lab.calibration.progress import SILENT
from taper.lab.calibration.prompts import builtin_prompts, completions, encode_prompts
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.statistics import by_completion, ratio_estimate
from taper.lab.calibration.store import Measurements, current_conditions, open_store
from taper.lab.evals.records import Evaluation, Record
from taper.lab.evals.run import Evaluator
from taper.lab.evals.tasks import Selection
from taper.llm import LLM
from taper.models.download import content_hash
from taper.policy import DepthPolicy, middle_first_order

FULL, MEASURED_ORDER = "full depth", "measured order"
ADAPTERS = f"{MEASURED_ORDER}, adapters"
RANDOM_SEEDS = 3
TUNED = 32  # problems of each task; policies are tuned to a mean depth over full depth's outputs to them
SPANS = (1, 9, 17, 33, 65, 129, 257, 513, 1025)  # first steps of the spans over which metrics by step are averaged
INFLUENCE_PROMPTS, INFLUENCE_TOKENS = 24, 64  # block influence is measured on outputs to these built-in prompts
_ALPHA_STEPS = 1_000_000  # the resolution of the alphas that are tried
Log = Callable[[str], None]


def methods(
    num_hidden_layers: int,
    depth: float,
    lengths: Sequence[int],
    measured_order: Sequence[int],
    influence: Sequence[float],
    log: Log,
    adapters: Adapters | None = None,
) -> dict[str, DepthPolicy]:
    """The policy of every method by its name: full depth, and the others at mean depth `depth`.

    The mean is over all tokens after the first of outputs of these lengths; `mean_depth` gives the actual one. D3
    reaches it by its alpha, with the measured order, the middle first and random orders alike; SkipDecode and HSD reach
    it by their span. The methods of constant depth run the nearest whole number of layers. A method that cannot come
    within half a layer, such as an order of too few layers, is left out.

    Args:
        num_hidden_layers: layers of the model, L.
        depth: from 2 to L - 1.
        lengths: of outputs at full depth, in tokens.
        measured_order: flex layers in the order in which calibration skips them.
        influence: block influence of each layer, [L].
        log: called with one line for each method that is left out.
        adapters: of the first layers of the measured order. D3 skips these alone then, without adapters and with them.

    Raises:
        RequestError: the depth is out of range, or no output has two tokens.
        PolicyError: the order names a layer twice or one that the model does not have.
    """
    depth = number("depth", depth, 2, num_hidden_layers - 1)
    if max(lengths, default=0) < 2:
        raise RequestError("no output has two tokens, so no method can skip a layer", "choose a task with longer ones")
    if adapters is not None and (lowest := num_hidden_layers - len(adapters.layers)) >= depth:
        log(f"D3, {ADAPTERS} is left out at mean depth {depth:g}: the adapters go down to {lowest} layers")
        adapters = None
    orders = {
        MEASURED_ORDER: measured_order if adapters is None else measured_order[: len(adapters.layers)],
        "middle first (our reading)": middle_first_order(num_hidden_layers),
        **random_orders(num_hidden_layers),
    }
    policies = {f"D3, {name}": closest_d3(num_hidden_layers, order, depth, lengths) for name, order in orders.items()}
    if adapters is not None:
        policies |= {f"D3, {ADAPTERS}": replace(policies[f"D3, {MEASURED_ORDER}"], adapters=adapters)}
    policies |= baseline_policies(num_hidden_layers, depth, influence, lengths)
    close = {FULL: DepthPolicy.full(num_hidden_layers)}
    for name, policy in policies.items():
        actual = mean_depth(policy, lengths)
        if abs(actual - depth) > 0.5:
            log(f"{name} is left out at mean depth {depth:g}: {actual:.2f} is the closest that it comes")
        else:
            close[name] = policy
    return close


def baseline_policies(
    num_hidden_layers: int, depth: float, influence: Sequence[float], lengths: Sequence[int]
) -> dict[str, DepthPolicy]:
    """The methods other than D3 by name, each as close to mean depth `depth` over outputs of these lengths as possible.

    Early exit, ShortGPT (arXiv 2403.03853) and Unified Layer Skipping (arXiv 2404.06954) run the same layers at every
    step, so a whole number of them. SkipDecode decays linearly. So does HSD (arXiv 2403.14919), which skips layers "in
    a hierarchical manner based on the current sequence length": spread evenly, level by level, is our reading of that.

    The arguments are those of `methods`; one length is at least 2.
    """
    layers, whole = num_hidden_layers, round(depth)
    evenly_spread = set(np.round(np.linspace(0, layers - 1, whole)).astype(int).tolist())
    orders: dict[str, Sequence[int]] = {
        "early exit": range(layers - 1, 0, -1),
        "ShortGPT": np.argsort(np.asarray(influence), kind="stable").tolist(),
        "Unified (evenly spread)": [layer for layer in range(layers) if layer not in evenly_spread],
    }
    policies = {name: DepthPolicy.static(layers, whole, order) for name, order in orders.items()}
    min_depth = max(2, round(layers - 2 * (layers - depth)))
    decaying = closest_policy(
        lambda span: DepthPolicy.skipdecode(layers, min_depth, span), 4 * max(lengths), depth, lengths
    )
    by_level = replace(decaying, skip_order=_level_by_level(layers))
    return {**policies, "SkipDecode": decaying, "HSD (our reading)": by_level}


def random_orders(num_hidden_layers: int) -> dict[str, list[int]]:
    """Orders of all layers but the first and the last, by name."""
    inner = num_hidden_layers - 2
    seeds = range(RANDOM_SEEDS)
    return {f"random order {i + 1}": (1 + np.random.default_rng(i).permutation(inner)).tolist() for i in seeds}


def mean_depth(policy: DepthPolicy, lengths: Sequence[int]) -> float:
    """Mean depth over all steps from 1 on of outputs of these lengths in tokens, one of at least 2."""
    at_least = np.bincount(lengths)[::-1].cumsum()[::-1]  # outputs of at least n tokens, by n
    return float(np.average([policy.depth(step) for step in range(1, max(lengths))], weights=at_least[2:]))


def closest_d3(
    num_hidden_layers: int, skip_order: Sequence[int], depth: float, lengths: Sequence[int], start: int = 0
) -> DepthPolicy:
    """D3 with the alpha whose mean depth over outputs of these lengths is closest to `depth`."""

    def d3(alpha_steps: int) -> DepthPolicy:
        return DepthPolicy.d3(num_hidden_layers, alpha_steps / _ALPHA_STEPS, start, skip_order=skip_order)

    return closest_policy(d3, _ALPHA_STEPS, depth, lengths)


def closest_policy(
    policy_of: Callable[[int], DepthPolicy], largest: int, depth: float, lengths: Sequence[int]
) -> DepthPolicy:
    """The policy whose mean depth is closest to `depth`, among policy_of(1) to policy_of(largest).

    Their depth must grow with the argument.
    """
    arguments = range(1, largest + 1)
    above = bisect_left(arguments, depth, key=lambda argument: mean_depth(policy_of(argument), lengths))
    close = [policy_of(argument) for argument in arguments[max(0, above - 1) : above + 1]]
    return min(close, key=lambda policy: abs(mean_depth(policy, lengths) - depth))


def _level_by_level(layers: int) -> tuple[int, ...]:
    """All layers but the first and last: every second one, then every second of the rest, and so on.

    Each level is spread evenly: its layers are sorted by their binary digits read backwards, in descending order.
    """
    digits = layers.bit_length()
    return tuple(sorted(range(1, layers - 1), key=lambda layer: f"{layer:0{digits}b}"[::-1], reverse=True))


# The comparison


@dataclass
class Study:
    """A model on which methods are compared. Close it to close its files.

    Raises:
        RequestError: a number is below 1, or the folder cannot be written to.
    """

    llm: LLM  # its `max_batch_size` is the number of outputs at a time
    order: Sequence[int]  # flex layers in the order in which calibration skips them
    folder: Path  # keeps outputs and replays
    limit: int | None = None  # problems of each task, the first ones; None: all
    max_tokens: int | None = None  # of an output; None: the task's own limit
    num_replayed: int = 16  # outputs of full depth to each task that policies are replayed on
    log: Log = print  # called with one line about each step of the work
    adapters: Adapters | None = None  # of the first layers of the order

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole_number("limit", self.limit, 1)
        whole_number("num_replayed", self.num_replayed, 1)
        self.num_hidden_layers = self.llm.config.num_hidden_layers
        self.full = DepthPolicy.full(self.num_hidden_layers)
        replays = self.folder / "replays.sqlite"
        self._store = open_store(content_hash(self.llm.path), current_conditions(self.llm), replays)

    def close(self) -> None:
        """Close the file of replays."""
        self._store.close()

    def measurements(self, references: Sequence[Reference]) -> closing[Measurements]:
        """Replays of known outputs, for a `with` statement."""
        return closing(Measurements(self.llm.engine, references, self._store))

    def scores(self, references: Sequence[Reference], policies: Mapping[str, DepthPolicy]) -> dict[str, Scores]:
        """Policies by name, replayed on known outputs: steps from 1 on."""
        with self.measurements(references) as measurements:
            replayed = {name: measurements.scores(policy, SILENT) for name, policy in policies.items()}
        return {name: scores.where(scores.step > 0) for name, scores in replayed.items()}

    @cached_property
    def influence(self) -> list[float]:
        """Block influence of each layer on outputs to built-in prompts, which are not problems of a task: [L]."""
        prompts = list(encode_prompts(self.llm, builtin_prompts(), 0, INFLUENCE_PROMPTS))
        references = completions(self.llm, prompts, self.full, INFLUENCE_TOKENS, self._store, SILENT)
        with self.measurements(references) as measurements:
            return measurements.block_influence()


class TaskStudy:
    """One task of a study.

    Args:
        study: the model.
        selection: the task, alone.
        chat: ask by the model's chat template.

    Raises:
        RequestError: the selection has several tasks.
    """

    def __init__(self, study: Study, selection: Selection, chat: bool) -> None:
        if len(selection.tasks) != 1:
            raise RequestError(f"{len(selection.tasks)} tasks are given as one", "name each task by itself")
        self.study, self.task, self.chat = study, selection.tasks[0], chat
        self.num_problems = min(study.limit or self.task.num_problems, self.task.num_problems)
        self._evaluator = Evaluator(study.llm, selection, chat=chat, max_tokens=study.max_tokens)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of full depth's outputs to the first `TUNED` problems, whatever the limit."""
        problems = range(min(TUNED, self.task.num_problems))
        records = self._evaluate([self.study.full], problems).records
        return [len(record.completions[0].token_ids) for record in records if record.completions[0].token_ids]

    @cached_property
    def records(self) -> list[Record]:
        """Full depth on the first problems, up to the limit."""
        return self._evaluate([self.study.full], range(self.num_problems)).records

    @cached_property
    def prompts(self) -> dict[int, tuple[int, ...]]:
        """Token ids of the prompt of each problem, by its index."""
        return self._evaluator.prompt_ids(range(self.num_problems))

    @cached_property
    def references(self) -> list[Reference]:
        """The first `num_replayed` outputs of full depth that have at least two tokens, with their prompts."""
        outputs = [Reference(self.prompts[r.problem], r.completions[0].token_ids) for r in self.records]
        return [output for output in outputs if len(output.completion_ids) > 1][: self.study.num_replayed]

    def methods(
        self, depth: float, log: Log | None = None, lengths: Sequence[int] | None = None
    ) -> dict[str, DepthPolicy]:
        """Full depth and every method at one mean depth over outputs of some lengths, by default `lengths`, by name.

        A method that cannot come near it is left out, and `log` is called with a line about it; default the study's.

        Raises:
            RequestError: what `methods` raises.
        """
        study, log, lengths = self.study, log or self.study.log, lengths or self.lengths
        arguments = (study.num_hidden_layers, depth, lengths, study.order, study.influence, log)
        tuned = methods(*arguments, study.adapters)
        suffix = f"at depth {depth:.6g}"  # in one file of records, policies of one name must be the same
        return {n: policy if n == FULL else replace(policy, name=f"{n}, {suffix}") for n, policy in tuned.items()}

    def evaluate(self, policies: Sequence[DepthPolicy]) -> Evaluation:
        """Policies, each with a name of its own, on the first problems, up to the limit.

        Each batch of problems is completed under one policy after the other: a prompt stays in its slot, and the rows
        of a batch all skip the same layers.
        """
        size, count = self.study.llm.engine.backend.num_slots, len(self.prompts)  # which makes all prompts at once
        for first in range(0, count, size):
            for policy in policies:
                self._evaluate([policy], range(first, min(first + size, count)))
        return self._evaluate(policies, range(count))

    def _evaluate(self, policies: Sequence[DepthPolicy], problems: range) -> Evaluation:
        is_new: list[bool] = []
        evaluation = self._evaluator.evaluate(
            policies,
            indices=problems,
            out=self.study.folder / f"{self.task.name}.jsonl",
            progress=lambda record, total, was_there: is_new.append(not was_there),
        )
        if any(is_new):
            labels = ", ".join(policy.label for policy in policies)
            self.study.log(f"{self.task.name}, {labels}: problems {problems.start + 1} to {problems.stop}")
        return evaluation


def joined(parts: Sequence[Evaluation], groups: Mapping[str, list[str]]) -> Evaluation:
    """Evaluations of several tasks as one, with groups of tasks; each of them has policies of the same names."""
    first, tasks = parts[0], [task for part in parts for task in part.selection.tasks]
    selection = replace(first.selection, tasks=tasks, groups=dict(groups))
    settings = {**first.settings, "tasks": {k: v for part in parts for k, v in part.settings["tasks"].items()}}
    return Evaluation(settings, selection, first.policies, [record for part in parts for record in part.records])


def by_step(scores: Scores, metrics: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Means of metrics over spans of steps that at least two outputs reach; each metric is [steps] of the scores."""
    rows = []
    for first, end in pairwise(SPANS):
        inside = (scores.step >= first) & (scores.step < end)
        part = scores.where(inside)
        if len(set(part.reference.tolist())) > 1:
            ones = by_completion(part, np.ones(len(part.step)))
            sums = {name: by_completion(part, values[inside]) for name, values in metrics.items()}
            means = {name: ratio_estimate(values, ones) for name, values in sums.items()}
            rows.append({"steps": [first, end - 1], "outputs": len(ones), **means})
    return rows
